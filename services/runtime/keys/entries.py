"""API keys as a key file declares them: a table `[keys.NAME]` for each key, with the hash of the key.

[keys.alice]
sha256 = "9f86d081884c7d65…"        # of the key, as `paceline keys new` prints it
tenant = "acme"
max_requests = 8
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import tomllib
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.request_fields import METADATA

# A file of 10,000 keys has about 2 MiB.
MAX_FILE_BYTES = 4 * 2**20
PREFIX = "pl-"  # secret scanners find keys by their prefix
_SECRET_BYTES = 32
# Default of `min_slo_s`. The order `deadline` sorts a request with a shorter TTFT SLO or deadline as if this were its
# SLO or deadline.
DEFAULT_MIN_SLO_S = 1.0

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_Name = Annotated[str, Field(pattern=f"^{_NAME.pattern}$")]
_Quota = Annotated[int, Field(ge=1, le=2**53)]


class InvalidKeys(Exception):
    """Keys that cannot be used. The message is one line. For a wrong field, it names the entry and the field."""


class ApiKey(BaseModel):
    """What a key may do. A quota of None is no limit. Quotas hold for one gateway process.

    `tokens_per_minute` counts prompt and output tokens; `max_tokens_in_flight` counts the prompts of queued and running
    requests and the output that they may reach.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: _Name
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: str = Field("", max_length=METADATA["tenant"].max_chars)
    any_tenant: bool = False  # a request may name another tenant
    # Policies, pins, reset, explain, cache events, live view, trace, timelines of all keys, Generate and Embed at the
    # scheduler's port, and all that `metrics` allows.
    admin: bool = False
    metrics: bool = False  # the gateway's /metrics, all of /load, and the load report (ORCA)
    max_priority: float = Field(0.0, allow_inf_nan=True)
    # The queue order moves an earlier deadline or SLO of the key's requests to this many seconds after arrival.
    min_slo_s: float = Field(DEFAULT_MIN_SLO_S, ge=0, le=86400.0, allow_inf_nan=False)
    max_requests: _Quota | None = None  # at a time
    max_tokens_in_flight: _Quota | None = None
    tokens_per_minute: _Quota | None = None

    @property
    def has_quotas(self) -> bool:
        """Whether any quota has a limit."""
        return any((self.max_requests, self.max_tokens_in_flight, self.tokens_per_minute))


def new_secret() -> str:
    """A new random key of 256 bits."""
    return PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def hash_of(secret: str) -> str:
    """The hash of a key, in hexadecimal.

    SHA-256 without salt is enough for a key of new_secret(): it is random and has 256 bits, so no dictionary has it,
    and equal keys do not occur. A key from the environment may be weaker. No file has its hash, but the first 12 digits
    of the hash are in the key's name. A slow hash (bcrypt, Argon2) protects short passwords. Here it would cost each
    request tens of ms, and make a flood of wrong keys expensive for the server.
    """
    return hashlib.sha256(secret.encode()).hexdigest()


def make_key(name: str, **fields: Any) -> ApiKey:
    """A checked key. The tenant defaults to the name. Raises InvalidKeys."""
    fields = {"tenant": name, **fields}
    try:
        key = ApiKey(name=name, **fields)
    except ValidationError as error:
        raise InvalidKeys(_explain(name, error)) from None
    if math.isnan(key.max_priority):
        raise InvalidKeys(f"keys.{name}.max_priority: must be a number")
    return key


def parse_keys(text: str) -> list[ApiKey]:
    """The keys of a file. Raises InvalidKeys."""
    try:
        document = tomllib.loads(text)
    except ValueError as error:  # a TOMLDecodeError, or a number with thousands of digits
        raise InvalidKeys(f"the file is not TOML: {error}") from None
    except RecursionError:
        raise InvalidKeys("the file is nested too deep") from None
    if unknown := sorted(document.keys() - {"keys"}):
        raise InvalidKeys(f"{_shown(unknown[0])}: unknown; a key is a table [keys.NAME]")
    tables = document.get("keys", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise InvalidKeys("keys: must contain one table [keys.NAME] for each key")
    return check_distinct([_parse_table(name, table) for name, table in tables.items()])


def check_distinct(keys: Sequence[ApiKey]) -> list[ApiKey]:
    """The keys, if no two have the same hash or name. Raises InvalidKeys."""
    names: dict[str, str] = {}
    for key in keys:
        if (other := names.setdefault(key.sha256, key.name)) != key.name:
            raise InvalidKeys(f"keys.{key.name}.sha256: the same as of keys.{other}")
    if len({key.name for key in keys}) < len(keys):
        raise InvalidKeys("two keys have the same name")
    return list(keys)


def entry_text(key: ApiKey) -> str:
    """The key's table for a key file. Fields with their default are left out, except the tenant."""
    values = key.model_dump(exclude={"name"}, exclude_defaults=True) | {"tenant": key.tenant}
    lines = [f"{name} = {_toml(value)}" for name, value in values.items()]
    name = key.name if "." not in key.name else json.dumps(key.name)
    return "\n".join([f"[keys.{name}]", *lines, ""])


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)  # also inf and nan
    # A basic string of TOML is a JSON string, but without surrogate pairs, and with an escape for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parse_table(name: str, table: dict[str, Any]) -> ApiKey:
    if "name" in table:
        raise InvalidKeys(f"keys.{_shown(name)}.name: unknown; the table's name is the key's name")
    return make_key(name, **table)


def _explain(name: str, error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(_shown(str(part)) for part in first["loc"])
    if field == "name":
        return f"keys.{_shown(name)}: a name has 1 to 64 letters, digits, dots, hyphens and underscores"
    message = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
    return f"keys.{name}.{field}: {message[0].lower()}{message[1:]}"


def _shown(name: str) -> str:
    """A name of the file, for a message of one line. A name that no key can have is quoted, with escapes, and cut to 80
    characters."""
    return name if _NAME.fullmatch(name) else repr(name[:80])
