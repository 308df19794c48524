"""The snapshots of a running server, over restarts of its gateway."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator
from typing import Any

from services.cli.http.client import HttpApi, RequestFailed

PATH = "/v1/live?stream=true"
# The server sends one snapshot per second.
SILENCE_S = 5.0
RETRY_S = 1.0
# The tokens per second of this many last snapshots are kept: 30 s.
NUM_RATES = 30
# The second snapshot of a stream is the first with rates and percentiles over a whole second.
FIRST_WITH_RATES = 2

Snapshot = dict[str, Any]


def snapshots(server: HttpApi) -> Generator[Snapshot]:
    """Snapshots until the stream ends. Raises RequestFailed, also when the gateway ends the stream."""
    yield from server.stream(PATH, SILENCE_S)
    raise RequestFailed(f"{server.endpoint.url} has ended the stream")


class LiveFollower:
    """A thread that keeps the latest snapshot. It connects again, for ever, after it was connected once."""

    def __init__(self, server: HttpApi) -> None:
        self._server = server
        self.latest: Snapshot | None = None
        self.version = 0  # changes when another attribute changes
        self.rates: deque[float] = deque(maxlen=NUM_RATES)
        self.trouble = ""  # why there is no connection, in one line
        self.broken_s: float | None = None  # since when there is no connection
        self.back_s: float | None = None  # when the connection came back
        self.away_s = 0.0  # how long there was no connection before back_s
        self.refused: RequestFailed | None = None  # why there was never a connection; then the thread ends
        self._thread = threading.Thread(target=self._follow, name="paceline-top", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _follow(self) -> None:
        while self.refused is None:
            try:
                for snapshot in snapshots(self._server):
                    self._got(snapshot)
            except RequestFailed as error:
                if self.latest is None:
                    self.refused = error
                self.trouble = str(error)
                self.broken_s = self.broken_s or time.monotonic()
                self.version += 1
            time.sleep(RETRY_S)

    def _got(self, snapshot: Snapshot) -> None:
        if self.broken_s is not None:
            self.back_s = time.monotonic()
            self.away_s = self.back_s - self.broken_s
            self.trouble, self.broken_s = "", None
            self.rates.clear()
        self.rates.append(snapshot["gateway"]["tokens_per_s"])
        self.latest = snapshot
        self.version += 1
