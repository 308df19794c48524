"""The result of each line, and the files that a batch writes at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from typing import Any

import orjson

from services.gateway.batches.calls import LineAnswer
from services.gateway.batches.records import BatchRecord, Unrun
from services.gateway.errors import ApiError
from services.gateway.http.events import escape_separators
from services.gateway.store.documents import ContentPiece, DocumentName, DocumentStore

SERVED, FAILED = 0, 1  # marks of a batch's pieces; each line has one piece, with its number
_READ = 16  # results that are read at once
_UNRUN: dict[Unrun, str] = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed, because the batch was cancelled.",
    "api_key_revoked": "This request was not executed, because the API key that made the batch was removed.",
    "input_file_lost": "This request was not executed, because the input file is gone.",
    "files_limit_exceeded": "This request was not executed, because the files of the API key, with the results of its "
    "running batches, have reached their limit of bytes (--max-files-bytes).",
}


def line_result(batch_id: str, number: int, custom_id: str, request_id: str, answer: LineAnswer) -> ContentPiece:
    """A line of the output file, or of the error file."""
    head = orjson.dumps({"id": _result_id(batch_id, number), "custom_id": custom_id})
    response = orjson.dumps({"status_code": answer.status, "request_id": request_id})
    # The body is JSON already, and may be large.
    data = b'%s,"response":%s,"body":%s},"error":null}\n' % (head[:-1], response[:-1], answer.body)
    return ContentPiece(number, SERVED if answer.status == 200 else FAILED, escape_separators(data))


def unrun_result(batch_id: str, number: int, custom_id: str, why: Unrun) -> ContentPiece:
    """A line of the error file for a request that was not run."""
    error = {"code": why, "message": _UNRUN[why]}
    result = {"id": _result_id(batch_id, number), "custom_id": custom_id, "response": None, "error": error}
    return ContentPiece(number, FAILED, escape_separators(orjson.dumps(result)) + b"\n")


def output_id(batch: BatchRecord, mark: int) -> str:
    """The id of an output file. It follows from the batch, so that two gateways write one file."""
    return "file-" + sha256(f"{batch.name.owner}:{batch.name.id}:{mark}".encode()).hexdigest()[:32]


def _result_id(batch_id: str, number: int) -> str:
    return "batch_req_" + sha256(f"{batch_id}:{number}".encode()).hexdigest()[:32]


class BatchUsage:
    """The tokens of all lines. Counts them while the output file is written."""

    def __init__(self) -> None:
        self._input = self._cached = self._output = self._reasoning = 0

    def add(self, results: Sequence[bytes]) -> None:
        """Add the usage of these lines."""
        for result in results:
            usage = orjson.loads(result)["response"]["body"].get("usage") or {}
            self._input += usage.get("prompt_tokens", usage.get("input_tokens", 0))
            self._output += usage.get("completion_tokens", usage.get("output_tokens", 0))
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            self._cached += details.get("cached_tokens") or 0
            details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
            self._reasoning += details.get("reasoning_tokens") or 0

    def shown(self) -> dict[str, Any]:
        """The usage of the batch object."""
        return {
            "input_tokens": self._input,
            "input_tokens_details": {"cached_tokens": self._cached},
            "output_tokens": self._output,
            "output_tokens_details": {"reasoning_tokens": self._reasoning},
            "total_tokens": self._input + self._output,
        }


async def read_results(
    store: DocumentStore, name: DocumentName, numbers: Sequence[int], usage: BatchUsage | None
) -> AsyncIterator[bytes]:
    """The results of these lines, in chunks. `usage` counts their tokens. Raises ApiError 503 if one is missing."""
    for begin in range(0, len(numbers), _READ):
        some = numbers[begin : begin + _READ]
        found = await store.pieces(name, some)
        if len(found) < len(some):
            raise ApiError(503, f"the store has lost results of {name.id}")
        if usage is not None:
            await asyncio.to_thread(usage.add, found)
        yield b"".join(found)
