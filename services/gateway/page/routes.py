"""GET / and GET /assets/…: the page's files. scripts/page.py builds them into static/, which the
repository contains, so serving them needs no build step."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.access.control import ASSETS_PATH, PAGE_PATH
from services.gateway.errors import ApiError
from services.gateway.openai.middleware import OtherApi
from services.gateway.openapi.description import described

_STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Only the page's own files, no inline script, and no frame around the page. Images may be data: URLs, as in chats.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
# A file below /assets/ has a hash of its content in its name.
_FOREVER, _ASK_AGAIN = "public, max-age=31536000, immutable", "no-cache"


def page_api() -> OtherApi:
    """The routes. They are open without an API key: they show nothing, and the page asks for a key."""

    @described(text="text/html", errors=(403,))
    async def page(request: Request) -> Response:
        """The page: the live view, requests and a playground."""
        return _response(_files()["index.html"], ".html", _ASK_AGAIN)

    @described(text="application/octet-stream", errors=(403, 404))
    async def asset(request: Request) -> Response:
        """A script, style or image of the page."""
        name = request.path_params["name"]
        content = _files().get(f"assets/{name}")
        if content is None:
            raise ApiError(404, f"the page has no file {name[:128]!r}", code="not_found")
        return _response(content, Path(name).suffix, _FOREVER)

    return OtherApi(ASSETS_PATH, [Route(PAGE_PATH, page), Route(f"{ASSETS_PATH}/{{name}}", asset)], {})


def _response(content: bytes, suffix: str, cache_control: str) -> Response:
    return Response(content, headers={**_HEADERS, "content-type": _TYPES[suffix], "cache-control": cache_control})


@cache
def _files() -> dict[str, bytes]:
    """All files by their path below static/, about 90 kB. They are in memory, so a name that a client sends
    never reaches the file system."""
    paths = (path for path in _STATIC.rglob("*") if path.suffix in _TYPES)
    return {path.relative_to(_STATIC).as_posix(): path.read_bytes() for path in paths}
