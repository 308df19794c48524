"""Turns requests away at the door: where there is no room, the head of a request is all that is looked at."""

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

# So long a place is kept for whose body is on its way; who is later finds one, or not, when it is his turn. Else as
# many clients as there are places, who send a head and no more, would keep out everybody else.
_KEPT_S = 1.0
# With one of the first two it may run already, and then it has a place. The last comes from web pages, whom the browser
# tells what the answer is only where the headers say so that the app adds.
_LET_THROUGH = frozenset({IDEMPOTENCY_KEY.lower().encode(), LAST_EVENT_ID.lower().encode(), b"origin"})


class AdmissionControl:
    """Lets in as many new requests as there is room for, however many come in the same turn of the event loop.

    Between here and its submission to the scheduler a request counts as one that enters: else all that come at the same
    moment would get in, be parsed, and be refused one by one.
    """

    def __init__(self, gateway: Gateway, kinds: Mapping[bytes, Kind]) -> None:
        """`kinds`: of the targets whose requests need room."""
        self._gateway = gateway
        self._kinds = kinds
        self._numbers = count()
        self._entering: OrderedDict[int, float] = OrderedDict()  # when they were let in, the first one first

    def __call__(
        self, target: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> RejectedRequest | AdmissionTicket | None:
        """Of a POST with these headers (names in lower case); None: it is nothing to us."""
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
        # Nothing is kept under this id, so it need not be one that nobody can guess.
        request_id = sanitised_request_id(given.decode("latin-1")) if given else f"{getrandbits(128):032x}"
        return RejectedRequest(error, request_id)

    def _forget_late(self, now_s: float) -> None:
        entering = self._entering
        while entering and now_s - entering[number := next(iter(entering))] > _KEPT_S:
            del entering[number]
