"""`paceline keys`: makes API keys, and checks a key file."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from services.cli.arguments import Parser, console, plain, usage_error
from services.runtime.keys.entries import (
    DEFAULT_MIN_SLO_S,
    ApiKey,
    InvalidKeys,
    entry_text,
    hash_of,
    make_key,
    new_secret,
    parse_keys,
)
from services.runtime.keys.source import FILE_ENV

PROG = "paceline keys"
_QUOTAS = ("max_requests", "max_tokens_in_flight", "tokens_per_minute")


def parser() -> Parser:
    top = Parser(prog=PROG, description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="make a key: print it once, and its entry for the key file")
    new.add_argument("name", help="name of the key, as in [keys.NAME]")
    new.add_argument(
        "--file", type=Path, metavar="FILE", help="add the entry to this file; then only the key is printed"
    )
    new.add_argument("--tenant", help="tenant of its requests (default: the name)")
    new.add_argument("--any-tenant", action="store_true", help="its requests may name other tenants")
    new.add_argument("--admin", action="store_true", help="it may use admin calls, live view, all timelines, /metrics")
    new.add_argument("--metrics", action="store_true", help="it may read the gateway's /metrics and all of /load")
    new.add_argument("--max-priority", type=float, metavar="P", help="highest priority of its requests (default: 0)")
    new.add_argument(
        "--min-slo-s",
        type=float,
        metavar="S",
        help=f"a shorter deadline or ttft_slo_s counts as this in the queue's order (default: {DEFAULT_MIN_SLO_S:g})",
    )
    new.add_argument("--max-requests", type=int, metavar="N", help="requests at a time")
    new.add_argument(
        "--max-tokens-in-flight",
        type=int,
        metavar="N",
        help="tokens of its requests that have not ended: prompts, and the output that they may reach",
    )
    new.add_argument("--tokens-per-minute", type=int, metavar="N", help="prompt and output tokens per minute")
    check = commands.add_parser("check", help="show the keys of a file, or what is wrong with the file")
    check.add_argument("file", type=Path, nargs="?", help=f"(default: {FILE_ENV})")
    return top


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        return _new(arguments) if arguments.command == "new" else _check(arguments)
    except InvalidKeys as error:
        return usage_error(PROG, str(error))
    except BrokenPipeError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        return usage_error(PROG, str(error))


def _new(arguments: argparse.Namespace) -> int:
    names = ("tenant", "any_tenant", "admin", "metrics", "max_priority", "min_slo_s", *_QUOTAS)
    given: dict[str, Any] = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    secret = new_secret()
    entry = entry_text(make_key(arguments.name, sha256=hash_of(secret), **given))
    if arguments.file is not None:
        _append(arguments.file, entry)
        print(secret)
        print(f"{PROG}: added to {arguments.file}; the key is shown only once", file=sys.stderr)
        return 0
    print(f"# the key, shown only once:\n{secret}\n\n# its entry for the key file:\n{entry}", end="")
    return 0


def _append(path: Path, entry: str) -> None:
    """Add an entry. Servers see the old or the new file, never a part of it. Raises InvalidKeys and OSError."""
    path = path.resolve()  # replace the file, not a link to it
    try:
        text, mode = path.read_text("utf-8"), path.stat().st_mode & 0o777
    except FileNotFoundError:
        text, mode = "", 0o644  # hashes of random keys are no secret, and a container's user has to read them
    before = text.rstrip("\n") + "\n\n" if text.strip() else ""
    new = before + entry
    parse_keys(new)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(new)
        file.flush()
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    os.replace(file.name, path)


def _check(arguments: argparse.Namespace) -> int:
    path = arguments.file or (Path(name) if (name := os.environ.get(FILE_ENV)) else None)
    if path is None:
        return usage_error(PROG, f"name a file, or set {FILE_ENV}")
    keys = parse_keys(path.read_text("utf-8"))
    table = Table(box=None, pad_edge=False)
    for title in ("name", "tenant", "may", "priority up to", "requests", "tokens in flight", "tokens per minute"):
        table.add_column(title, overflow="fold")
    for key in keys:
        quotas = ["-" if (limit := getattr(key, name)) is None else str(limit) for name in _QUOTAS]
        table.add_row(key.name, plain(key.tenant), _rights(key), f"{key.max_priority:g}", *quotas)
    console().print(table if keys else "no keys: a server with this file refuses every request")
    return 0


def _rights(key: ApiKey) -> str:
    return ", ".join(name for name in ("any_tenant", "admin", "metrics") if getattr(key, name)) or "-"
