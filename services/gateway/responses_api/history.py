"""The conversation before a response: the items of the responses that it continues."""

from __future__ import annotations

from functools import partial

from services.gateway.errors import ApiError, invalid
from services.gateway.responses_api.items import Item, input_items
from services.gateway.responses_api.long_work import with_bytes
from services.gateway.responses_api.records import ended_response, items_of
from services.gateway.store.records import ResponseStore, StoredResponse

_FIELD = "previous_response_id"
MAX_RESPONSES = 512


async def previous_items(store: ResponseStore, owner: str, response_id: str, *, max_bytes: int) -> list[Item]:
    """Input and output items of a response and of all responses before it, the oldest first.

    `max_bytes`: of all their records. Raises ApiError: 404 for a response that this owner does not have, 400 for one
    that is neither completed nor incomplete, and for too long a conversation.
    """
    turns: list[list[Item]] = []
    wanted: str | None = response_id
    num_bytes = 0
    while wanted is not None:
        record = await store.get(owner, wanted)
        if record is None:
            message = f"{_FIELD}: there is no response {wanted[:120]!r} here"
            raise ApiError(404, message, param=_FIELD, code="previous_response_not_found")
        if record.status not in ("completed", "incomplete"):
            raise invalid(_FIELD, f"{_FIELD}: the response {wanted!r} cannot be continued, as it is {record.status}")
        num_bytes += record.num_bytes
        if len(turns) == MAX_RESPONSES or num_bytes > max_bytes:
            limit = f"{MAX_RESPONSES} responses, and {max_bytes} bytes"
            raise invalid(_FIELD, f"{_FIELD}: the conversation is too long; at most {limit} are possible")
        turn, wanted = await with_bytes(record.num_bytes, partial(_turn, record))
        turns.append(turn)
    return [item for turn in reversed(turns) for item in turn]


def _turn(record: StoredResponse) -> tuple[list[Item], str | None]:
    """Input and output items of a response, and the response before it."""
    response = ended_response(record)
    return items_of(record) + (input_items(response["output"]) if response["output"] else []), response[_FIELD]
