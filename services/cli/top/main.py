"""`paceline top`: what a running server does now, in the terminal."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from itertools import islice

from rich.console import Console
from rich.live import Live
from rich.text import Text

from services.cli.arguments import Parser, console, usage_error
from services.cli.http.client import HttpApi, RequestFailed
from services.cli.http.endpoint import add_flags, find_endpoint
from services.cli.servers import NoAddress
from services.cli.top.feed import FIRST_WITH_RATES, LiveFollower, Snapshot, snapshots
from services.cli.top.lines import Choice, Lines
from services.cli.top.screen import ServerState, fitted, full, group
from services.cli.waiting import waiting
from services.runtime.tls.files import TlsError

PROG = "paceline top"
# Without a terminal, every second snapshot is printed: one in 2 s.
PLAIN_EVERY = 2
KEYS_S = 0.1
BACK_SHOWN_S = 5.0
_KEYS = """\
keys: q quits, p pauses, the arrows choose a worker or a tenant, Tab goes from the workers to the tenants and back.
Without a terminal, a snapshot is printed every two seconds.
"""


def parser() -> Parser:
    parser = Parser(prog=PROG, description=__doc__, epilog=_KEYS)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print one snapshot as text (rates of the last 1 to 10 s)")
    how.add_argument("--json", action="store_true", help="print one snapshot as the server's JSON (GET /v1/live)")
    add_flags(parser, "admin key")
    return parser


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    arguments = parser().parse_args(argv)
    try:
        server = HttpApi(find_endpoint(arguments))
    except (NoAddress, TlsError, ValueError) as error:
        return usage_error(PROG, str(error))
    for stream in (sys.stdout, sys.stderr):  # characters that the locale's encoding lacks would raise an error
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        if arguments.json or arguments.once:
            snapshot = _one(server)
            if arguments.json:
                print(json.dumps(snapshot))
            else:
                _print(console(), snapshot, server)
        elif sys.stdin.isatty() and sys.stdout.isatty() and not console().is_dumb_terminal:
            _Top(server, console()).run()
        else:
            out = console()
            with closing(snapshots(server)) as found:
                for snapshot in islice(found, FIRST_WITH_RATES - 1, None, PLAIN_EVERY):
                    _print(out, snapshot, server)
                    out.print()
                    sys.stdout.flush()
    except RequestFailed as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _one(server: HttpApi) -> Snapshot:
    with waiting(Console(stderr=True), "measuring for a second"), closing(snapshots(server)) as found:
        return next(islice(found, FIRST_WITH_RATES - 1, None))


def _print(out: Console, snapshot: Snapshot, server: HttpApi) -> None:
    lines = Lines(snapshot, out.width)
    for line in full(lines, ServerState(server.endpoint.url)):
        line.no_wrap, line.overflow = True, "ignore"
        out.print(line, soft_wrap=True)


class _Top:
    """The screen, its choice, and whether it is paused."""

    def __init__(self, server: HttpApi, out: Console) -> None:
        self._url = server.endpoint.url
        self._follower = LiveFollower(server)
        self._out = out
        self._paused: Snapshot | None = None  # what is shown meanwhile
        self._choice: Choice | None = None

    def run(self) -> None:
        """Until q or Ctrl-C. Raises RequestFailed if there never was a connection."""
        from services.cli.top.keys import read_keys, single_keys  # not every system has termios

        follower, keyboard = self._follower, sys.stdin.fileno()
        follower.start()
        with waiting(self._out, f"waiting for {self._url}"):
            while follower.latest is None:
                if follower.refused is not None:
                    raise follower.refused
                time.sleep(KEYS_S / 2)
        with single_keys(keyboard), Live(console=self._out, screen=True, auto_refresh=False) as live:
            shown: object = None
            while True:
                state = follower.version, self._choice, self._paused is None, self._out.size, int(time.monotonic())
                if state != shown:
                    shown = state
                    live.update(group(self._lines()), refresh=True)
                for key in read_keys(keyboard, KEYS_S):
                    if key in ("q", "Q"):
                        return
                    self.press(key)

    def press(self, key: str) -> None:
        if key == "p":
            self._paused = self._follower.latest if self._paused is None else None
        choices = Lines(self._snapshot, self._out.width).choices()
        if key in ("up", "down", "tab", "back-tab") and choices:
            self._choice = moved(self._choice, choices, key)

    @property
    def _snapshot(self) -> Snapshot:
        snapshot = self._paused or self._follower.latest
        assert snapshot is not None, "run() waits for the first one"
        return snapshot

    def _lines(self) -> list[Text]:
        follower, now_s = self._follower, time.monotonic()
        broken_s, back_s = follower.broken_s, follower.back_s
        status = ServerState(
            self._url,
            paused=self._paused is not None,
            trouble=follower.trouble,
            away_s=now_s - broken_s if broken_s is not None else 0.0,
            back_after_s=max(follower.away_s, 1.0) if back_s is not None and now_s - back_s < BACK_SHOWN_S else 0.0,
        )
        lines = Lines(self._snapshot, self._out.width, self._choice, list(follower.rates))
        return fitted(lines, status, self._out.height)


def moved(choice: Choice | None, choices: list[Choice], key: str) -> Choice:
    """The choice after an arrow or Tab. Tab goes to the first worker or tenant, whichever was not chosen."""
    if key in ("tab", "back-tab"):
        other = "worker" if choice is None or choice.kind == "tenant" else "tenant"
        return next((one for one in choices if one.kind == other), choices[0])
    if choice not in choices:
        return choices[0] if key == "down" else choices[-1]
    return choices[(choices.index(choice) + (1 if key == "down" else -1)) % len(choices)]
