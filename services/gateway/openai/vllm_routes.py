"""Paths of vLLM's server beside OpenAI's: /ping, /load, /tokenizer_info."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.errors import ApiError
from services.gateway.openai.answers import JsonResponse
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.middleware import caller_of
from services.gateway.openapi.answers import ServerLoad
from services.gateway.openapi.description import described


def vllm_routes(gateway: Gateway) -> list[Route]:
    """The routes."""

    @described(errors=())
    async def ping(_: Request) -> Response:
        """200 as long as the process serves. SageMaker asks this path."""
        return Response(status_code=200)

    @described(answer=ServerLoad, errors=(401,))
    async def load(request: Request) -> Response:
        """How many online sequences are in flight here: all, or with an API key that may not read metrics, the key's
        own. Offline sequences, such as lines of batches, yield to online ones: they are no load for a balancer."""
        return JsonResponse(orjson.dumps({"server_load": gateway.num_online_for(caller_of(request))}))

    @described(text="application/json", errors=(401, 404))
    async def tokenizer_info(_: Request) -> Response:
        """The checkpoint's tokenizer_config.json. 404 unless the operator allows it: it shows the chat template."""
        if gateway.tokenizer_info is None:
            raise ApiError(404, "/tokenizer_info is off; --enable-tokenizer-info turns it on", code="not_found")
        return JsonResponse(orjson.dumps(gateway.tokenizer_info))

    return [
        Route("/ping", ping, methods=["GET", "POST"]),
        Route("/load", load),
        Route("/tokenizer_info", tokenizer_info),
    ]
