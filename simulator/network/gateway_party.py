"""A gateway as a party of a simulated network: SessionCore, and what its `SchedulerSession` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.v1.inference_pb2 import SessionResponse
from services.gateway.engine.live_request import LiveRequest
from services.gateway.engine.session_core import SessionCore
from services.runtime.fence import StaleScheduler
from simulator.network.network import Network, Party, SimulatedConnection
from simulator.network.parties import RETRY_S, TICK_S, Dial, follow

DRAIN_S = 30.0  # --drain-s: time that a leaving gateway gives its streams


class GatewayParty(Party):
    """`on_news` is called with every request that has got a token or its ending."""

    def __init__(
        self, network: Network, name: str, core: SessionCore, dial: Dial, on_news: Callable[[LiveRequest], None]
    ) -> None:
        super().__init__(network, name)
        self.core = core
        self.has_failed_all = False  # DRAIN_S are over: it has failed every request that was still open
        self._dial = dial
        self._on_news = on_news
        self._leader_term = 0
        self._link: SimulatedConnection | None = None
        self.every(TICK_S, self._tick)
        dial(self)

    def drain(self) -> None:
        """Finish the requests of its clients, and fail those that are still open after DRAIN_S."""
        self.leaving = True
        self.after(DRAIN_S, self._fail_all)

    def _fail_all(self) -> None:
        self.has_failed_all = True
        self._tell(self.core.fail_all("the server is shutting down"))

    def submit(self, **fields: Any) -> LiveRequest:
        request = self.core.submit(now_s=self.network.now_s, **fields)
        self._flush()
        return request

    def cancel(self, request: LiveRequest) -> None:
        self.core.cancel(request)
        self._flush()

    def connected(self, connection: SimulatedConnection) -> None:
        self._link = connection
        self._tell(self.core.connect())
        self._flush()

    def received(self, connection: SimulatedConnection, response: SessionResponse) -> None:
        try:
            news = self.core.receive(response)
        except StaleScheduler:
            connection.close(self)
            self.closed(connection)
            return
        self._leader_term = follow(self, connection, self._leader_term)
        self._tell(news)
        self._flush()

    def closed(self, connection: SimulatedConnection) -> None:
        self._link = None
        self.core.disconnect(self.network.now_s)
        self.after(RETRY_S, lambda: self._dial(self))

    def _tick(self) -> None:
        self._tell(self.core.tick(self.network.now_s))
        self._flush()
        if self.leaving and not self.core.num_live:
            self.on_released()

    def _tell(self, requests: list[LiveRequest]) -> None:
        for request in requests:
            self._on_news(request)

    def _flush(self) -> None:
        while self._link is not None and (message := self.core.take_request()) is not None:
            self._link.send(self, message)
