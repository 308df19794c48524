"""The flags of `paceline bench`, and what they mean."""

from __future__ import annotations

import argparse
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from services.cli.api_key import API_KEY_ENV, key_of
from services.cli.arguments import Parser
from services.cli.bench.load.arrivals import LoadKind, OfferedLoad
from services.cli.bench.load.prompts import Endpoint
from services.cli.bench.load.ranges import parse_count, parse_seconds, parse_seconds_range, parse_tokens
from services.cli.bench.load.workloads import KINDS, WorkloadSettings, parse_mix
from services.cli.bench.runner import StageLimits
from services.cli.bench.stats.slo import ServiceLevel, parse_slo
from services.cli.servers import SERVER_ENV, NoAddress, server_of
from services.runtime.tls.files import TlsPaths

PROG = "paceline bench"
DESCRIPTION = "Put load on an OpenAI-compatible server, and measure latency, throughput and goodput."
EPILOG = """\
examples:
  paceline bench --concurrency 1,4,16                        the running `paceline up`, three stages
  paceline bench --url http://host:8000/v1 --poisson 2,4,8 --slo ttft=200ms,itl=50ms --html report.html
  paceline bench --ramp 1-64 --slo ttft=500ms,share=0.95     the highest rate that holds the SLO
  paceline bench --trace conversation.jsonl.gz --trace-speed 2
  paceline bench --concurrency 8 --workload agent=1,multi-turn=3
  paceline bench compare A.json B.json --html both.html

Ctrl-C ends the run, and reports what was measured until then. Page: docs/benchmarking.md."""
DEFAULT_LOADS = (OfferedLoad("concurrency", 1), OfferedLoad("concurrency", 4), OfferedLoad("concurrency", 16))
MAX_RATE, MAX_CONCURRENCY = 10_000, 10_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The flags of a run, checked."""

    url: str
    ca_file: str
    api_key: str
    model: str
    endpoint: Endpoint
    timeout_s: float
    loads: tuple[OfferedLoad, ...]  # empty: a ramp
    ramp: tuple[float, float] | None
    precision: float
    limits: StageLimits
    workload: WorkloadSettings
    trace: Path | None
    trace_scale: float
    trace_max_tokens: int
    trace_start_s: float
    slo: ServiceLevel | None
    seed: int
    ignore_eos: bool
    vocabulary: int
    extra_body: dict[str, Any]
    json_file: Path | None
    html_file: Path | None


def parse_options(argv: list[str]) -> BenchOptions:
    """Raises SystemExit after a line about a mistake."""
    flags = parser()
    arguments = flags.parse_args(argv)
    try:
        return _options(arguments)
    except ValueError as error:
        flags.error(str(error))


def parser() -> Parser:
    """The flags of a run."""
    parser = Parser(
        prog=PROG,
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=110),
    )
    flag = parser.add_argument_group("server").add_argument
    flag("--url", help="base URL, like http://host:8000/v1; default: the running `paceline up`")
    flag("--server", metavar="NAME", help=f"HTTP port or model of a `paceline up` of this machine [env: {SERVER_ENV}]")
    flag("--model", default="", help="default: the only one of /v1/models")
    flag("--endpoint", choices=("chat", "completion"), default="chat", help="default: chat")
    flag("--api-key", metavar="KEY", help=f"[env: {API_KEY_ENV}, which other users of this machine cannot read]")
    flag("--cacert", metavar="FILE", default="", help="certificates (PEM) to trust besides the system's")
    flag("--timeout", metavar="TIME", type=_as(_positive_seconds), default=120.0, help="of one request; default: 120s")
    flag("--ignore-eos", action="store_true", help="send ignore_eos and min_tokens, which OpenAI does not have")
    flag("--token-ids", metavar="N", type=_as(_vocabulary), default=0,
         help="prompts are token ids below N instead of texts (--endpoint completion)")  # fmt: skip
    flag("--extra-body", metavar="JSON", type=_as(_object), default={}, help="fields to add to each request")

    group = parser.add_argument_group("load (default: --concurrency 1,4,16)")
    flag = group.add_mutually_exclusive_group().add_argument
    flag("--rate", metavar="R[,R]", type=_as(_rates("rate")), help="start sessions at a fixed rate per second")
    flag("--poisson", metavar="R[,R]", type=_as(_rates("poisson")), help="start sessions as a Poisson process")
    flag("--concurrency", metavar="N[,N]", type=_as(_rates("concurrency")), help="N sessions at once")
    flag("--ramp", metavar="FROM-TO", type=_as(_ramp),
         help="raise a Poisson rate until the SLO breaks, then narrow it down")  # fmt: skip
    flag = group.add_argument
    flag("--precision", metavar="SHARE", type=_as(_fraction), default=0.1, help="of the ramp's result; default: 0.1")
    flag("--duration", metavar="TIME", type=_as(_positive_seconds), default=None,
         help="of each stage; default: 20s, or 60s for a trace at its own times")  # fmt: skip
    flag("--sessions", metavar="N", type=_as(_positive), help="of each stage, at most")
    flag("--warmup", metavar="TIME", type=_as(parse_seconds), default=0.0, help="of each stage, not measured")
    flag("--drain", metavar="TIME", type=_as(parse_seconds), default=30.0,
         help="for the requests that run at a stage's end, before they fail as unfinished; default: 30s")  # fmt: skip
    flag("--slo", type=_as(parse_slo), help="like ttft=200ms,itl=50ms,tpot=30ms,e2e=5s,share=0.99")
    flag("--seed", type=_as(_seed), help="makes the same load again; default: another one each time")

    defaults = WorkloadSettings()
    flag = parser.add_argument_group("workload").add_argument
    flag("--workload", metavar="KIND", type=_as(parse_mix), default=defaults.mix,
         help=f"{', '.join(KINDS)}, or a mix like agent=1,multi-turn=3")  # fmt: skip
    for name, parse, text in (
        ("input_tokens", parse_tokens, "prompt tokens of a turn"),
        ("output_tokens", parse_tokens, "limit of output tokens of a turn"),
        ("prefix_tokens", parse_tokens, "of each shared prefix (shared-prefix, agent)"),
        ("turns", parse_tokens, "of the user in a session (multi-turn, agent)"),
        ("think_s", parse_seconds_range, "think time before each later turn of the user (multi-turn, agent)"),
        ("tool_calls", parse_count, "tool calls after each turn of the user (agent)"),
        ("tool_tokens", parse_tokens, "of a tool's result (agent)"),
        ("tool_s", parse_seconds_range, "how long a tool runs (agent)"),
    ):
        value = getattr(defaults, name)
        spelled = {"think_s": "think-time", "tool_s": "tool-time"}.get(name, name.replace("_", "-"))
        metavar = "TIME[-TIME]" if name.endswith("_s") else "N[-N]"
        flag(f"--{spelled}", dest=name, metavar=metavar, type=_as(parse), default=value,
             help=f"{text}; default: {value}")  # fmt: skip
    flag("--prefixes", metavar="N", type=_as(_positive), default=defaults.prefixes,
         help=f"different shared prefixes; default: {defaults.prefixes}")  # fmt: skip

    flag = parser.add_argument_group("trace, instead of a workload").add_argument
    flag("--trace", metavar="FILE", type=Path,
         help="of Mooncake, Azure, Dynamo, ServeGen or Vidur; at its own times, if no load is given")  # fmt: skip
    flag("--trace-speed", metavar="F[,F]", type=_as(_rates("trace")), help="F times as fast; default: 1")
    flag("--trace-start", metavar="TIME", type=_as(parse_seconds), default=0.0, help="skip the trace until then")
    flag("--trace-scale", metavar="F", type=_as(_scale), default=1.0, help="lengths times F, for smaller models")
    flag("--trace-max-tokens", metavar="N", type=_as(_positive), default=0,
         help="leave out sessions with a request of more tokens (prompt and output)")  # fmt: skip

    flag = parser.add_argument_group("reports").add_argument
    flag("--json", metavar="FILE", type=_as(_writable), help="everything measured, for `compare`")
    flag("--html", metavar="FILE", type=_as(_writable), help="one page with plots, which works offline")
    return parser


def _options(arguments: argparse.Namespace) -> BenchOptions:
    values = vars(arguments)
    loads = arguments.rate or arguments.poisson or arguments.concurrency or ()
    speeds = arguments.trace_speed or (OfferedLoad("trace", 1.0),)
    if arguments.trace_speed and (not arguments.trace or loads or arguments.ramp):
        raise ValueError("--trace-speed needs --trace, and no other load")
    if arguments.trace and not loads and not arguments.ramp:
        loads = speeds
    if arguments.ramp and arguments.slo is None:
        raise ValueError("--ramp needs --slo, like --slo ttft=200ms,itl=50ms,share=0.99")
    if arguments.token_ids and (
        arguments.endpoint != "completion" or arguments.workload.keys() & {"multi-turn", "agent"}
    ):
        raise ValueError("--token-ids needs --endpoint completion, and a workload of one turn")
    duration_s = arguments.duration or (60.0 if arguments.trace and loads == speeds else 20.0)
    if arguments.warmup >= duration_s:
        raise ValueError(f"--warmup is not shorter than --duration ({duration_s:g} s)")
    if arguments.url and arguments.server:
        raise ValueError("give --url or --server, not both")
    url, ca_file = (_url(arguments.url), "") if arguments.url else _running_server(arguments.server)
    ca_file = arguments.cacert or ca_file
    if ca_file and not Path(ca_file).is_file():
        raise ValueError(f"--cacert: there is no file {ca_file}")
    return BenchOptions(
        url=url,
        ca_file=ca_file,
        api_key=key_of(arguments),
        model=arguments.model,
        endpoint=arguments.endpoint,
        timeout_s=arguments.timeout,
        loads=() if arguments.ramp else loads or DEFAULT_LOADS,
        ramp=arguments.ramp,
        precision=arguments.precision,
        limits=StageLimits(duration_s, arguments.sessions, arguments.drain, arguments.warmup),
        workload=WorkloadSettings(
            mix=arguments.workload,
            **{name: values[name] for name in WorkloadSettings.__dataclass_fields__ if name != "mix"},
        ),
        trace=arguments.trace,
        trace_scale=arguments.trace_scale,
        trace_max_tokens=arguments.trace_max_tokens,
        trace_start_s=arguments.trace_start,
        slo=arguments.slo,
        seed=secrets.randbelow(2**31) if arguments.seed is None else arguments.seed,
        ignore_eos=arguments.ignore_eos,
        vocabulary=arguments.token_ids,
        extra_body=arguments.extra_body,
        json_file=arguments.json,
        html_file=arguments.html,
    )


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--url: expected a URL, like http://host:8000/v1 (got {text!r})")
    return text.rstrip("/") + ("/v1" if parts.path in ("", "/") else "")


def _running_server(name: str | None) -> tuple[str, str]:
    """The URL of the running `paceline up`, and the file of the CA to trust."""
    try:
        server = server_of(name)
    except NoAddress as error:
        raise ValueError(f"{error}; name a server with --url or --server") from None
    if not server.tls_dir:
        return f"http://127.0.0.1:{server.port}/v1", ""
    ca, *_ = TlsPaths.of(Path(server.tls_dir), "gateway").cas
    return f"https://127.0.0.1:{server.port}/v1", str(ca)


def _as(parse: Callable[[str], T]) -> Callable[[str], T]:
    """For argparse, which hides the message of a ValueError."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _number(text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"expected a number (got {text!r})") from None
    if not 0 < value <= most:
        raise ValueError(f"expected a number above 0, at most {most:g} (got {text})")
    return value


def _rates(kind: LoadKind) -> Callable[[str], tuple[OfferedLoad, ...]]:
    def parse(text: str) -> tuple[OfferedLoad, ...]:
        most = MAX_CONCURRENCY if kind == "concurrency" else MAX_RATE
        values = [_number(part, most) for part in text.split(",")]
        if kind == "concurrency" and any(value != int(value) for value in values):
            raise ValueError(f"expected whole numbers (got {text})")
        if len(set(values)) < len(values):
            raise ValueError(f"a value occurs twice in {text}")
        return tuple(OfferedLoad(kind, value) for value in values)

    return parse


def _ramp(text: str) -> tuple[float, float]:
    first, _, last = text.partition("-")
    low, high = _number(first, MAX_RATE), _number(last or first, MAX_RATE)
    if low > high:
        raise ValueError(f"the first rate is above the last (got {text})")
    return low, high


def _positive_seconds(text: str) -> float:
    value = parse_seconds(text)
    if value <= 0:
        raise ValueError(f"expected a duration above 0 (got {text})")
    return value


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ValueError(f"expected a whole number above 0 (got {text!r})")
    return int(text)


def _vocabulary(text: str) -> int:
    if (value := _positive(text)) < 2:
        raise ValueError("expected at least 2 token ids")
    return value


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"expected a whole number (got {text!r})")
    return int(text)


def _fraction(text: str) -> float:
    return _number(text, 1.0)


def _scale(text: str) -> float:
    return _number(text, 1000.0)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def _writable(text: str) -> Path:
    """A path that can be written later, when the run is over."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"cannot write {text}: {'a folder' if path.is_dir() else 'its folder does not exist'}")
    return path
