"""Settings of every service: flags > environment > file > defaults.

A service declares a subclass and gets the rest::

    class SchedulerSettings(ServiceSettings, section="scheduler"):
        port: int = Field(50051, description="gRPC port; 0 takes a free one")

Then `port` is the flag `--port`, the variable `PACELINE_SCHEDULER_PORT`, and the key `scheduler.port` of the YAML file
that `--config` or `PACELINE_CONFIG` names. `log_level` and `log_format` are also read from `PACELINE_LOG_LEVEL` and
`PACELINE_LOG_FORMAT`, which every service of a machine shares, and `tls_dir` from `PACELINE_TLS_DIR`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

import yaml
from pydantic import AfterValidator, Field, PrivateAttr, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError
from pydantic_settings.sources import InitSettingsSource

ENV_PREFIX = "PACELINE_"
CONFIG_ENV = "PACELINE_CONFIG"
# The sections of the file, which all services share.
SECTIONS = ("up", "cache", "scheduler", "worker", "gateway")
# Fields that one variable can set for every service.
SHARED_ENV_FIELDS = ("log_level", "log_format", "tls_dir")

LogLevel = Literal["debug", "info", "warning", "error", "critical"]

# While load_settings builds the object: the parsed flags, and the file of --config, which wins over PACELINE_CONFIG.
_flags: ContextVar[CliSettingsSource[Any] | None] = ContextVar("paceline_flags", default=None)
_config_flag: ContextVar[str | None] = ContextVar("paceline_config_flag", default=None)


# gRPC's own address schemes, which may contain commas.
_GRPC_NAMES = ("dns://", "unix:", "ipv4:", "ipv6:", "xds:///")


def _address(value: str) -> str:
    """Check an address. gRPC would accept anything, wrap a port that is too large, and retry forever."""
    if value.startswith(_GRPC_NAMES):
        return value
    host, _, port = value.rpartition(":")
    if not host or (":" in host and not host.startswith("[")) or not (port.isascii() and port.isdecimal()):
        raise ValueError("must be host:port, like 127.0.0.1:50051 or [::1]:50051")
    if not 1 <= int(port) <= 65535:
        raise ValueError("the port must be between 1 and 65535")
    return value


def split_addresses(value: str) -> list[str]:
    """The addresses of an AddressList, in order."""
    return [value] if value.startswith(_GRPC_NAMES) else [part.strip() for part in value.split(",")]


def _address_list(value: str) -> str:
    addresses = [_address(part) for part in split_addresses(value)]
    if len(set(addresses)) < len(addresses):
        raise ValueError("an address occurs twice")
    return ",".join(addresses)


# The address of another service.
Address = Annotated[str, AfterValidator(_address)]
# The addresses of several instances of a service, one of which leads: host:port[,host:port...].
AddressList = Annotated[str, AfterValidator(_address_list)]


class ConfigError(Exception):
    """A setting cannot be used. The message is one line and names the flag, variable or file key at fault."""


class _FileSource(InitSettingsSource):
    """One section of the YAML file. Empty without a file or section."""

    def __init__(self, settings_cls: type[BaseSettings], path: str | None, section: str) -> None:
        super().__init__(settings_cls, _read_section(path, section) if path else {})


class _SharedEnvSource(PydanticBaseSettingsSource):
    """PACELINE_LOG_LEVEL and the like, for a service without a flag or a variable of its own. They win over the
    file."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return os.environ.get(_shared_env_name(field_name)), field_name, False

    def __call__(self) -> dict[str, Any]:
        values = {name: os.environ.get(_shared_env_name(name)) for name in SHARED_ENV_FIELDS}
        return {name: value for name, value in values.items() if value}


class ServiceSettings(BaseSettings):
    """The settings that every service has."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        # Compose files pass unset variables as empty strings.
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_show_env_vars=True,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    section: ClassVar[str] = "service"
    _config_file: str | None = PrivateAttr(default_factory=lambda: config_path())

    log_level: LogLevel = Field("info", description="least severe level that is logged")
    log_format: Literal["auto", "human", "json"] = Field(
        "auto", description="auto: human on a terminal, JSON otherwise"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    tls_dir: Path | None = Field(
        None,
        description="folder of certificates (ca.pem, cert.pem, key.pem): encrypt the links of services, and accept "
        "only peers with a certificate of ca.pem",
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="port of Prometheus /metrics; 0 takes a free one")
    ping_timeout_s: float = Field(
        2.0, ge=0.1, description="seconds without an answer to a ping, after which another service counts as dead"
    )
    heartbeat_timeout_s: float = Field(
        1.5,
        ge=0.5,
        description="seconds without a heartbeat, after which a service counts as dead; more on a busy machine",
    )
    drain_s: float = Field(30.0, ge=0, description="seconds after SIGTERM in which running requests may end")

    @property
    def config_file(self) -> str | None:
        """The path of the file that these settings came from."""
        return self._config_file

    def __init_subclass__(cls, section: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if section is not None:
            cls.section = section
            cls.model_config["env_prefix"] = f"{ENV_PREFIX}{section.upper()}_"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order: flags, explicit arguments, the service's environment, the shared environment, the file."""
        flags = _flags.get()
        return (
            *((flags,) if flags is not None else ()),
            init_settings,
            env_settings,
            _SharedEnvSource(settings_cls),
            _FileSource(settings_cls, config_path(), cls.section),
        )


S = TypeVar("S", bound=ServiceSettings)


def load_settings(cls: type[S], argv: Sequence[str], *, prog: str | None = None, note: str = "") -> S:
    """Settings from `argv` (without the program's name), environment and file. `note` ends the text of --help.

    `--help` and `--print-config` (YAML that `--config` reads back) print and exit 0. A bad value prints one line on
    stderr that names where it came from, and exits 2.
    """
    parser, flags = _declare(cls, prog, note)
    arguments = vars(parser.parse_args(list(argv)))
    config, print_config = arguments.pop("config"), arguments.pop("print_config")
    flags_token, config_token = _flags.set(flags), _config_flag.set(config)
    try:
        flags(parsed_args=arguments)
        settings = cls()
    except ValidationError as error:
        parser.fail(_explain(cls, error, flags()))
    except (ConfigError, SettingsError) as error:
        parser.fail(" ".join(str(error).split()))
    finally:
        _flags.reset(flags_token)
        _config_flag.reset(config_token)
    if print_config:
        sys.stdout.write(dump_settings(settings))
        raise SystemExit(0)
    return settings


def settings_parser(cls: type[ServiceSettings], *, prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of load_settings(), with every flag declared. For shell completion."""
    parser, _ = _declare(cls, prog, "")
    return parser


def _declare(cls: type[ServiceSettings], prog: str | None, note: str) -> tuple[_Parser, CliSettingsSource[Any]]:
    """A parser with the flags of the settings, and the source that reads what it has parsed."""
    parser = _Parser(
        prog=prog or f"paceline serve {cls.section}",
        description=(cls.__doc__ or "").strip().partition("\n")[0],
        epilog=f"Flags win over the environment, the environment over the file's section `{cls.section}`. {note}",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
    )
    parser.add_argument("--config", metavar="FILE", help=f"YAML file with settings [env: {CONFIG_ENV}]")
    parser.add_argument("--print-config", action="store_true", help="print the settings as YAML and exit")
    return parser, CliSettingsSource[Any](cls, root_parser=parser)


def dump_settings(settings: ServiceSettings) -> str:
    """The settings as a YAML section of the configuration file."""
    return yaml.safe_dump({settings.section: settings.model_dump(mode="json")}, sort_keys=False)


def config_path() -> str | None:
    """The configuration file: `--config`, else PACELINE_CONFIG, else none."""
    return _config_flag.get() or os.environ.get(CONFIG_ENV) or None


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line. The usage block belongs to --help."""

    def error(self, message: str) -> NoReturn:
        self.fail(message)

    def fail(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _read_section(path: str, section: str) -> dict[str, Any]:
    """The section's keys, with `-` read as `_`. ConfigError if the file is not a YAML mapping of known sections."""
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"configuration file {path}: expected a mapping of sections, got {type(document).__name__}")
    known = dict.fromkeys((*SECTIONS, section))
    if unknown := [str(name) for name in document if name not in known]:
        raise ConfigError(
            f"configuration file {path}: there is no section {', '.join(unknown)}; there are {', '.join(known)}"
        )
    values = document.get(section)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"configuration file {path}: section {section} must be a mapping of settings")
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _explain(cls: type[ServiceSettings], error: ValidationError, flags: Mapping[str, Any]) -> str:
    """One line for all mistakes: `--port: Input should be ... (got 'x')`."""
    parts = []
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0]) if problem["loc"] else ""
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            parts.append(f"{_origin(cls, name, flags)}: there is no such setting")
        elif not name:
            parts.append(message)
        elif problem["type"] == "missing":
            parts.append(f"--{_kebab(name)} (or {_env_name(cls, name)}) is required")
        else:
            parts.append(
                f"{_origin(cls, name, flags)}: {message} (got {problem['input']!r}){_kubernetes_hint(problem)}"
            )
    return "; ".join(parts)


def _origin(cls: type[ServiceSettings], name: str, flags: Mapping[str, Any]) -> str:
    """Where a field's value came from, as the user wrote it."""
    if name in flags:
        return f"--{_kebab(name)}"
    if os.environ.get(_env_name(cls, name)):
        return _env_name(cls, name)
    if name in SHARED_ENV_FIELDS and os.environ.get(_shared_env_name(name)):
        return _shared_env_name(name)
    path = config_path()
    if path and name in _read_section(path, cls.section):
        return f"{cls.section}.{name} in {path}"
    return name


def _kubernetes_hint(problem: Mapping[str, Any]) -> str:
    # Kubernetes sets NAME_PORT=tcp://... for every Service. A Service named paceline-scheduler collides with our name.
    if str(problem["input"]).startswith("tcp://"):
        return (
            "; Kubernetes sets such variables for a Service of this name unless the pod has enableServiceLinks: false"
        )
    return ""


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _env_name(cls: type[ServiceSettings], name: str) -> str:
    return f"{cls.model_config['env_prefix']}{name.upper()}"


def _shared_env_name(name: str) -> str:
    return f"{ENV_PREFIX}{name.upper()}"


__all__ = [
    "Address",
    "AddressList",
    "ConfigError",
    "LogLevel",
    "ServiceSettings",
    "config_path",
    "dump_settings",
    "load_settings",
    "settings_parser",
    "split_addresses",
]
