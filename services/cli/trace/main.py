"""`paceline trace`: records what all services of a running server do, for Perfetto or chrome://tracing."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from services.cli.arguments import Parser, usage_error
from services.cli.http.client import HttpApi, RequestFailed
from services.cli.http.endpoint import add_flags, find_endpoint
from services.cli.servers import NoAddress
from services.cli.trace.chrome import chrome_trace
from services.cli.trace.records import Record, read_records
from services.runtime.tls.files import TlsError

PROG = "paceline trace"
DEFAULT_S, MAX_S = 10.0, 60.0
# Records come ten times a second.
SILENCE_S = 10.0


def parser() -> Parser:
    parser = Parser(
        prog=PROG,
        description=__doc__,
        epilog="Open the file at https://ui.perfetto.dev, which keeps it on your machine, or at chrome://tracing.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="to write, like out.json; - is standard output")
    parser.add_argument(
        "--seconds", type=_seconds, default=DEFAULT_S, metavar="S", help=f"at most {MAX_S:g}; default: {DEFAULT_S:g}"
    )
    add_flags(parser, "admin key")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_S:
        raise argparse.ArgumentTypeError(f"a number above 0 and at most {MAX_S:g} is needed (got {text!r})")
    return seconds


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    arguments = parser().parse_args(argv)
    path: Path = arguments.file
    to_stdout = str(path) == "-"
    if not to_stdout and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        return usage_error(PROG, f"{path}: cannot be written")
    try:
        server = HttpApi(find_endpoint(arguments))
    except (NoAddress, TlsError, ValueError) as error:
        return usage_error(PROG, str(error))
    try:
        content = chrome_trace(read_records(_record(server, arguments.seconds)))
        if to_stdout:
            json.dump(content, sys.stdout)
        else:
            _write(path, content)
    except BrokenPipeError:
        raise
    except (RequestFailed, OSError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    _tell(path, content)
    return 0


def _record(server: HttpApi, seconds: float) -> list[Record]:
    """The records. Ctrl-C ends the trace early. Raises RequestFailed."""
    records: list[Record] = []
    columns = TextColumn("recording"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f} s")
    screen = Console(stderr=True)
    progress = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
    try:
        with progress, closing(server.stream(f"/v1/live/trace?seconds={seconds}", SILENCE_S)) as found:
            task, began_s = progress.add_task("", total=seconds), time.monotonic()
            for record in found:
                records.append(record)
                progress.update(task, completed=min(time.monotonic() - began_s, seconds))
    except KeyboardInterrupt:
        if not records:
            raise
    except RequestFailed as error:
        if not records:
            raise
        print(f"{PROG}: the trace ends early: {error}", file=sys.stderr)
    if not any(record["scheduler"] for record in records):
        raise RequestFailed(f"{server.endpoint.url} got no records: its scheduler is not there, or refuses more traces")
    return records


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write the file atomically. Raises OSError."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        try:
            json.dump(content, file)
        except BaseException:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o666 & ~_umask())
    os.replace(file.name, path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _tell(path: Path, content: dict[str, Any]) -> None:
    """Say on standard error what the file has, and how well the clocks are aligned."""
    about = content["otherData"]
    worst = max(about["clock_errors_us"].values(), default=0.0)
    num_missed = about["num_missed"]
    missed = f"; {num_missed} steps, exchanges and runs of the scheduler are missing" if num_missed else ""
    print(
        f"{path}: {len(content['traceEvents'])} events{missed}; clocks agree within {worst / 1000:.2f} ms. "
        "Open it at https://ui.perfetto.dev",
        file=sys.stderr,
    )
