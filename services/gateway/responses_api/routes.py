"""The paths of the Responses API."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.access.headers import HEADERS
from services.gateway.engine.idempotency import IDEMPOTENCY_KEY
from services.gateway.errors import ApiError, Gone, invalid
from services.gateway.fields.numbers import flag
from services.gateway.http.connection import CONNECTION
from services.gateway.openai.answers import JsonResponse
from services.gateway.openai.middleware import OtherApi, caller_of
from services.gateway.openai.routes import GENERATION_ERRORS
from services.gateway.openapi.answers import DeletedResponse, ItemPage, ResponseObject
from services.gateway.openapi.description import EVENT_STREAM, described
from services.gateway.responses_api import creation
from services.gateway.responses_api.answers import ResponseEvents
from services.gateway.responses_api.events import EventWriter, item_name
from services.gateway.responses_api.items import Item
from services.gateway.responses_api.long_work import with_bytes
from services.gateway.responses_api.records import ended_response, head_of, items_of
from services.gateway.responses_api.schema import ResponsesRequest
from services.gateway.responses_api.service import ENDPOINT, Responses
from services.gateway.store.records import IN_PROGRESS, StoredResponse

_PATH = "/v1/responses"
_STORED_ERRORS = (400, 401, 404, 429, 500, 503)
_MOST_ITEMS, _FEW_ITEMS = 100, 20  # OpenAI's limit and default
_RETRIEVE_QUERY = {
    "stream": "true: the response as events",
    "starting_after": "with stream=true: only the events after this sequence_number",
}
_ITEMS_QUERY = {
    "after": "the id of the last item of the page before",
    "limit": f"1 to {_MOST_ITEMS}",
    "order": "asc or desc",
}


def responses_api(responses: Responses) -> OtherApi:
    """The API of a gateway. Its routes have the most frequent first."""
    gateway = responses.gateway

    @described(
        body=ResponsesRequest,
        answer=ResponseObject,
        text=EVENT_STREAM,
        errors=GENERATION_ERRORS,
        headers=HEADERS | {IDEMPOTENCY_KEY: "the client's name for the request; the same request is not run twice"},
    )
    async def create(request: Request) -> Response:
        """Answer, or begin to answer in the background."""
        try:
            return await creation.create(responses, request)
        except ApiError as error:
            gateway.refused(ENDPOINT, request.scope["state"]["request_id"], error)
            raise
        except Gone:
            gateway.count_gone()
            raise

    async def found(request: Request) -> StoredResponse:
        return await responses.find(caller_of(request).owner, request.path_params["response_id"])

    @described(answer=ResponseObject, text=EVENT_STREAM, errors=_STORED_ERRORS, query=_RETRIEVE_QUERY)
    async def retrieve(request: Request) -> Response:
        """A stored response, whole or as events."""
        caller, after = caller_of(request), _starting_after(request)
        with gateway.access.quotas.entering(caller.key, new=False):
            record = await found(request)
            if after is not None:
                readable = await responses.readable(record, caller, request.scope[CONNECTION].has_gone)
                return ResponseEvents(readable, after=after, at_once=record.background)
            if record.status == IN_PROGRESS:
                await responses.adopt(record, caller)
        return await _shown(record)

    @described(answer=ResponseObject, errors=_STORED_ERRORS)
    async def cancel(request: Request) -> Response:
        """End a background response."""
        record = await found(request)
        if not record.background:
            # Its first sentence is OpenAI's.
            message = "Cannot cancel a synchronous response."
            raise invalid("response_id", f"{message} Close its connection, or create it with background: true")
        return await _shown(await responses.cancel(record))

    @described(answer=DeletedResponse, errors=_STORED_ERRORS)
    async def delete(request: Request) -> Response:
        """Delete a response, and end its generation."""
        record = await found(request)
        await responses.delete(record)
        return _json({"id": record.id, "object": "response", "deleted": True})

    @described(answer=ItemPage, errors=_STORED_ERRORS, query=_ITEMS_QUERY)
    async def input_items(request: Request) -> Response:
        """The input items of a response, without the responses before it."""
        record = await found(request)
        items = await with_bytes(record.num_bytes, lambda: _numbered(items_of(record), record.id))
        return _json(_page(items, request))

    path = _PATH
    routes = [
        Route(path, create, methods=["POST"]),
        Route(path + "/{response_id}", retrieve, methods=["GET"]),
        Route(path + "/{response_id}", delete, methods=["DELETE"]),
        Route(path + "/{response_id}/cancel", cancel, methods=["POST"]),
        Route(path + "/{response_id}/input_items", input_items, methods=["GET"]),
    ]
    return OtherApi(path, routes, {path: ENDPOINT})


def _json(value: Any) -> JsonResponse:
    return JsonResponse(orjson.dumps(value))


async def _shown(record: StoredResponse) -> JsonResponse:
    if record.status == IN_PROGRESS:
        return _json(EventWriter(head_of(record)).response(IN_PROGRESS))
    return JsonResponse(await with_bytes(record.num_bytes, lambda: orjson.dumps(ended_response(record))))


def _starting_after(request: Request) -> int | None:
    """The number of the last event that the client has, -1 for none; None if the client wants no events. Raises
    ApiError 400."""
    given, stream = request.query_params.get("starting_after"), flag(request.query_params.get("stream", "false"))
    if not isinstance(stream, bool):
        raise invalid("stream", "stream must be true or false")
    if given is None:
        return -1 if stream else None
    if not stream:
        raise invalid("starting_after", "starting_after is only possible with stream=true")
    if not (given.isascii() and given.isdecimal() and len(given) <= 10):
        raise invalid("starting_after", "starting_after must be the sequence_number of an event")
    return int(given)


def _numbered(items: list[Item], response_id: str) -> list[Item]:
    """The items with ids."""
    names = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
    shown = []
    for index, item in enumerate(items):
        more: Item = {"id": item_name(f"{names[item['type']]}_in", response_id, index), "status": "completed"}
        if item["type"] == "reasoning":
            more["summary"] = []
        if item.get("role") == "assistant":
            parts = [{**part, "annotations": [], "logprobs": []} for part in item["content"]]
            more["content"] = parts
        shown.append({**item, **more})
    return shown


def _page(items: list[Item], request: Request) -> dict[str, Any]:
    """The items that the query asks for. Raises ApiError 400."""
    query = request.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", str(_FEW_ITEMS)), query.get("after")
    if order not in ("asc", "desc"):
        raise invalid("order", "order must be asc or desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 4 and 1 <= int(limit) <= _MOST_ITEMS):
        raise invalid("limit", f"limit must be between 1 and {_MOST_ITEMS}")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        positions = [index for index, item in enumerate(items) if item["id"] == after]
        if not positions:
            raise invalid("after", "after: the response has no item of this id")
        items = items[positions[0] + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(items) > len(page),
    }
