"""Decides which requests a gateway serves: finds the key of each, and keeps the quotas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from services.gateway.access.caller import ANYONE, Caller
from services.gateway.access.quotas import Quotas
from services.gateway.errors import ApiError
from services.runtime.keys.keyring import NoCredential, shown_secret
from services.runtime.keys.source import KeySource
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# Balancers and orchestrators ask these without a key. The answers say nothing about requests or tenants.
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
METRICS_PATH = "/metrics"
# The web page consists of static files without data of the server. The page itself asks the user for a key.
PAGE_PATH, ASSETS_PATH = "/", "/assets"
# At most one log line in this time, however many calls have no valid key.
_LOG_EVERY_S = 10.0


class AccessControl:
    """Without keys every caller is ANYONE. The check takes the CPU time of one SHA-256 for each request, and none for
    its output tokens."""

    def __init__(
        self, keys: KeySource | None = None, *, open_metrics: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = keys
        self._open_paths = OPEN_PATHS | {PAGE_PATH} | ({METRICS_PATH} if open_metrics else set())
        self._clock = clock
        self.quotas = Quotas(clock)
        self.num_refused = 0  # calls without a valid key, since the start
        self._num_logged, self._logged_s = 0, -_LOG_EVERY_S

    @property
    def has_keys(self) -> bool:
        """Whether calls need an API key."""
        return self._keys is not None

    def admit(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """The caller of an HTTP request, from its head alone. Raises ApiError 401 and 403."""
        if self._keys is None or path in self._open_paths or path.startswith(f"{ASSETS_PATH}/"):
            return ANYONE
        caller = self.identify(headers)
        if path == METRICS_PATH and not self.may_know_load(caller):
            message = f"the key {caller.owner!r} may not read metrics, which name all tenants (metrics = true)"
            raise ApiError(403, message, code="metrics_not_allowed")
        return caller

    def may_know_load(self, caller: Caller) -> bool:
        """Whether the caller may know the load of all tenants, as the metrics show it. On a path that needs no key,
        the caller has no key, even on a server with keys."""
        if self._keys is None or METRICS_PATH in self._open_paths:
            return True
        return caller.key is not None and (caller.key.metrics or caller.key.admin)

    def identify(self, fields: Iterable[tuple[str | bytes, str | bytes]]) -> Caller:
        """The caller by HTTP headers or gRPC metadata. Raises ApiError 401."""
        if self._keys is None:
            return ANYONE
        try:
            key = self._keys.current.find(shown_secret(fields))
        except NoCredential as error:
            self._count_refused()
            raise ApiError(401, str(error), code="missing_api_key") from None
        if key is None:
            self._count_refused()
            raise ApiError(401, "the API key is not known here", code="invalid_api_key")
        return Caller(key)

    def named(self, owner: str) -> Caller | None:
        """The caller with this owner; None if there is no such key any more."""
        if self._keys is None:
            return ANYONE if not owner else None
        return next((Caller(key) for key in self._keys.current.keys if key.name == owner), None)

    def _count_refused(self) -> None:
        self.num_refused += 1
        now_s = self._clock()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            _log.warning("calls without a valid API key", count=self.num_refused - self._num_logged)
            self._num_logged, self._logged_s = self.num_refused, now_s
