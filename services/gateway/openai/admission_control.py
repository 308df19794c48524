"""Rejects requests above the gateway's limits at their head, before the body is read."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from random import getrandbits

from services.gateway.engine.idempotency import IDEMPOTENCY_KEY
from services.gateway.http.connection import AdmissionTicket, RejectedRequest
from services.gateway.openai.event_ids import LAST_EVENT_ID
from services.gateway.openai.format import Kind
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.middleware import sanitised_request_id

# A request keeps its queue position for 1 s while its body arrives. After that it competes again. Otherwise clients
# that send only a head could take all positions.
_KEPT_S = 1.0
# A request with one of the first two headers may already run, and then it needs no position. An `origin` header means a
# web page, and a browser shows the page an error only with the CORS headers that the app adds.
_LET_THROUGH = frozenset({IDEMPOTENCY_KEY.lower().encode(), LAST_EVENT_ID.lower().encode(), b"origin"})


class AdmissionControl:
    """Admits as many new requests as there are free positions, also when many come in one event-loop turn.

    A request counts as entering from its admission until its submission to the scheduler. Otherwise all requests of one
    moment would be admitted, parsed, and refused one by one.
    """

    def __init__(self, gateway: Gateway, kinds: Mapping[bytes, Kind]) -> None:
        """`kinds`: the targets that need a queue position for each request."""
        self._gateway = gateway
        self._kinds = kinds
        self._numbers = count()
        self._entering: OrderedDict[int, float] = OrderedDict()  # time of admission, oldest first

    def __call__(
        self, target: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> RejectedRequest | AdmissionTicket | None:
        """Decide about a POST with these headers (names in lower case). None: admission does not apply."""
        kind = self._kinds.get(target)
        if kind is None:
            return None
        given = b""
        for name, value in headers:
            if value and name in _LET_THROUGH:
                return None
            if name == b"x-request-id":
                given = given or value
        gateway, now_s = self._gateway, time.monotonic()
        self._forget_late(now_s)
        if not (gateway.parse_limiter.is_full or gateway.session.is_full(len(self._entering))):
            number = next(self._numbers)
            self._entering[number] = now_s
            return AdmissionTicket(partial(self._entering.pop, number, None))
        gateway.metrics.refused(kind)
        error = gateway.session.refusal("the server has no room for more requests")
        # No answer is stored under this id, so the id may be guessable.
        request_id = sanitised_request_id(given.decode("latin-1")) if given else f"{getrandbits(128):032x}"
        return RejectedRequest(error, request_id)

    def _forget_late(self, now_s: float) -> None:
        entering = self._entering
        while entering and now_s - entering[number := next(iter(entering))] > _KEPT_S:
            del entering[number]
