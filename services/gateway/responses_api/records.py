"""A response as it is stored: made from a request, and read back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from services.gateway.responses_api.events import whole_response
from services.gateway.responses_api.items import Item
from services.gateway.responses_api.pieces import Kind, Outcome, OutputPiece
from services.gateway.responses_api.schema import ResponsesRequest
from services.gateway.store.records import StoredResponse

_LETTERS: dict[Kind, str] = {"text": "t", "reasoning": "r", "name": "n", "arguments": "a"}
_KINDS: dict[str, Kind] = {letter: kind for kind, letter in _LETTERS.items()}
# Between the head of a request and its items, so that a look at the response parses only the head. JSON on one line has
# no line break.
_LINE = b"\n"
# Decimal places. More digits of a 32-bit float are noise: 0.7 is stored as 0.699999988.
_DIGITS = 6


def response_head(
    request: ResponsesRequest,
    response_id: str,
    model: str,
    created_s: int,
    *,
    is_stored: bool,
    temperature: float,
    top_p: float,
) -> dict[str, Any]:
    """The fields of the response object that do not change. `temperature` and `top_p`: the ones in force."""
    text, reasoning, choice = request.text, request.reasoning, request.tool_choice
    format_ = text.format.model_dump(by_alias=True, exclude_none=True) if text and text.format else {"type": "text"}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_s,
        "model": model,
        "background": bool(request.background),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "service_tier": "default",
        "store": is_stored,
        "temperature": round(temperature, _DIGITS),
        "text": {"format": format_},
        "tool_choice": choice.model_dump() if choice is not None and not isinstance(choice, str) else choice or "auto",
        "tools": [{"description": None, "strict": None, **tool.model_dump()} for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": round(top_p, _DIGITS),
        "truncation": "disabled",
        "user": request.user,
    }


def new_record(
    owner: str, head: Mapping[str, Any], items: Sequence[Item], chat: Mapping[str, Any], fingerprint: bytes
) -> StoredResponse:
    """The record of a response that begins. `chat`: the chat that generates it, with a seed."""
    request = orjson.dumps(head) + _LINE + orjson.dumps(items)
    return StoredResponse(
        owner,
        head["id"],
        head["model"],
        head["created_at"],
        head["background"],
        fingerprint,
        request,
        orjson.dumps(chat),
    )


def head_of(record: StoredResponse) -> dict[str, Any]:
    """What response_head() made."""
    head: dict[str, Any] = orjson.loads(record.request.partition(_LINE)[0])
    return head


def items_of(record: StoredResponse) -> list[Item]:
    """The request's input items."""
    items: list[Item] = orjson.loads(record.request.partition(_LINE)[2])
    return items


def dump_result(pieces: Sequence[OutputPiece], outcome: Outcome) -> bytes:
    """The output of an ended response as it is stored."""
    # Stored by columns: to decode 100,000 pieces takes 0.5 s as rows, and 10 ms as columns of texts.
    result: dict[str, Any] = {
        "kinds": "".join(_LETTERS[piece.kind] for piece in pieces),
        "texts": [piece.text for piece in pieces],
        "call_ids": [piece.call_id for piece in pieces if piece.kind == "name"],
        "outcome": outcome._asdict(),
    }
    if any(piece.logprobs for piece in pieces):
        result["logprobs"] = [[orjson.dumps(entry).decode() for entry in piece.logprobs] for piece in pieces]
    return orjson.dumps(result)


def load_result(record: StoredResponse) -> tuple[list[OutputPiece], Outcome]:
    """What dump_result() was given, with log probabilities as JSON."""
    result = orjson.loads(record.result)
    call_ids, logprobs = iter(result["call_ids"]), result.get("logprobs", itertools.repeat(()))
    pieces = [
        # Log probabilities are written as they were stored. Each token may have 21 objects, and to decode those of a
        # long output takes seconds.
        OutputPiece(
            kind, text, [*map(orjson.Fragment, scored)] if scored else (), next(call_ids) if kind == "name" else ""
        )
        for kind, text, scored in zip(map(_KINDS.__getitem__, result["kinds"]), result["texts"], logprobs, strict=False)
    ]
    return pieces, Outcome(**result["outcome"])


def ended_response(record: StoredResponse) -> dict[str, Any]:
    """The response object of an ended response."""
    return whole_response(head_of(record), *load_result(record))
