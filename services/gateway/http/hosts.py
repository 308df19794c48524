"""The names under which clients may address the server: what the Host header of a request may say.

The owner of a web page can make the page's own name resolve to 127.0.0.1 (DNS rebinding). The browser then takes a
server on loopback for the page's own, and lets the page read its answers. But the Host header has the page's name. So a
server that is bound to loopback answers only to names of loopback, unless the operator allows others.

Starlette's TrustedHostMiddleware compares names, too. But it knows no ranges of addresses, answers in plain text
without a request id, and parses every header again.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache

from services.gateway.errors import ApiError
from services.runtime.tls.exposed import is_loopback

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]*)?", re.IGNORECASE)
_LOOPBACK_NAMES = ("localhost", "*.localhost")
_SHOWN_CHARS = 100
# Results that are kept: clients use few names, and an attacker's names must not fill the memory.
_KEPT = 256


class AllowedHosts:
    """Which Host headers the server answers. `allowed`: names, addresses (IPv6 in brackets), "*.example.com", "*"; in
    lower case. If `allowed` is empty, a server bound to loopback answers to names and addresses of loopback, and any
    other server to every name."""

    def __init__(self, allowed: Sequence[str], bound_to: str) -> None:
        self._is_default = not allowed
        if not allowed:
            allowed = (*_LOOPBACK_NAMES, bound_to.lower()) if is_loopback(bound_to) else ("*",)
        self._all = "*" in allowed
        self._names = frozenset(allowed)
        self._endings = tuple(entry[1:] for entry in allowed if entry.startswith("*."))
        self._allows_name = lru_cache(_KEPT)(self._is_allowed)

    def refusal(self, headers: Sequence[tuple[bytes, bytes]], *, by_address: bool = False) -> ApiError | None:
        """The error for a request with these headers, None if it is allowed. A request without a Host header comes from
        no browser, and is allowed. `by_address`: every IP address is allowed, too, because no page can use an IP
        address as its own name."""
        if self._all:
            return None
        for name, value in headers:
            if name == b"host" and not self._allows_name(value) and not (by_address and _is_address(value)):
                shown = value[:_SHOWN_CHARS].decode("latin-1")
                message = (
                    f"Host: {shown!r} is not a name of this server; --allowed-hosts of the gateway lists its names"
                )
                return ApiError(403, message, code="host_not_allowed")
        return None

    def _is_allowed(self, value: bytes) -> bool:
        found = _HOST.fullmatch(value.decode("latin-1"))
        if found is None:
            return False
        host = found[1].lower().removesuffix(".")
        if host in self._names or host.endswith(self._endings):
            return True
        return self._is_default and is_loopback(host)


def _is_address(value: bytes) -> bool:
    found = _HOST.fullmatch(value.decode("latin-1"))
    try:
        return found is not None and bool(ipaddress.ip_address(found[1].strip("[]")))
    except ValueError:
        return False
