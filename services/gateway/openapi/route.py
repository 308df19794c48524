"""The route /openapi.json."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.openapi.description import described
from services.gateway.openapi.document import document

PATH = "/openapi.json"


def openapi_route(routes: Sequence[Route], *, with_keys: bool) -> Route:
    """A route that describes these routes and itself. The first request builds the document, which takes 0.1 s."""
    built: list[bytes] = []

    @described(text="application/json", errors=(401,))
    async def openapi(_: Request) -> Response:
        """This document."""
        if not built:
            built.append(await asyncio.to_thread(build))
        return Response(built[0], media_type="application/json")

    own = Route(PATH, openapi)

    def build() -> bytes:
        value: dict[str, Any] = document(
            [*routes, own], title="Paceline", version=version("paceline"), with_keys=with_keys
        )
        return orjson.dumps(value)

    return own
