"""Which web pages may change anything here: what the Origin header of a request says.

A page of any origin can make a browser send a "simple request" without asking first (CORS): a POST with a form's
content type, or with none. Its answer is hidden from the page, but the server would have done the work. A browser names
the page's origin in each such request, so a request of a foreign page is refused. Clients that are no browsers send no
origin.

The rules are those of Go's net/http.CrossOriginProtection, without its list of paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.gateway.errors import ApiError

# They change nothing (RFC 9110 §9.2.1). OPTIONS asks what is allowed.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_SITE = (b"same-origin", b"none")  # values of Sec-Fetch-Site; none: the user, and no page
_SHOWN_CHARS = 100


class AllowedOrigins:
    """Which web pages may call the API. `allowed`: origins such as https://page.example, or "*"."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._all = "*" in allowed
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def refusal(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
        """The error for a request that a page of a foreign origin sends. None for any other request, and for a method
        that changes nothing."""
        if self._all or method in _SAFE_METHODS:
            return None
        given = {name: value for name, value in headers if name in (b"origin", b"host", b"sec-fetch-site")}
        origin, site = given.get(b"origin"), given.get(b"sec-fetch-site")
        if (origin is None and site is None) or site in _OWN_SITE or origin in self._allowed:
            return None
        # An older browser sends no Sec-Fetch-Site. Only hosts are compared: behind a proxy that ends TLS, the schemes
        # differ.
        if site is None and origin is not None and origin.partition(b"://")[2] == given.get(b"host", b""):
            return None
        shown = (origin or b"null")[:_SHOWN_CHARS].decode("latin-1")
        message = (
            f"Origin: a page of {shown!r} may not call this server; --allowed-origins of the gateway lists the origins"
        )
        return ApiError(403, message, code="origin_not_allowed")
