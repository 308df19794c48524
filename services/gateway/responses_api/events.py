"""The output items of a response, and the events that tell how they grow, as functions of its pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import orjson

from services.gateway.responses_api.pieces import Logprob, Outcome, OutputPiece, merged

_TERMINAL = {"completed": "response.completed", "failed": "response.failed"}


class EventWriter:
    """Writes a response's events, numbered from 0. `head`: the fields of the response object that never change.
    `only_output`: writes no event, for the response object alone.

    An ended response that was cancelled has the event `response.incomplete`: OpenAI's clients know no other for it.
    """

    def __init__(self, head: Mapping[str, Any], *, only_output: bool = False) -> None:
        self._head = head
        self._only_output = only_output
        self._id: str = head["id"]
        self._number = 0
        self._written: list[bytes] = []
        self.output: list[dict[str, Any]] = []  # items, the last one perhaps unfinished
        self._kind = ""  # of the last piece of the open item; "": no item is open
        self._text: list[str] = []  # of the open item
        self._logprobs: list[Logprob] = []

    def begin(self) -> list[bytes]:
        """The events before the output."""
        shown = self.response("in_progress")
        self._event("response.created", response=shown)
        self._event("response.in_progress", response=shown)
        return self._take()

    def add(self, piece: OutputPiece) -> list[bytes]:
        """The events of one more piece."""
        kind = "arguments" if piece.kind == "name" else piece.kind
        if kind != self._kind or piece.kind == "name":
            self._close("completed")
            self._open(kind, piece)
        if piece.kind != "name":
            self._text.append(piece.text)
            self._logprobs += piece.logprobs
            self._delta(piece)
        return self._take()

    def end(self, outcome: Outcome, after: int = -1) -> list[bytes]:
        """The last events. `after`: the number of the last event that the client has. If another gateway has cancelled
        the response, the store has no output of it, so `after` may be above the numbers here. The very last event then
        follows `after`.
        """
        if not self.output and outcome.status in ("completed", "incomplete"):
            self._open("text", OutputPiece("text", ""))  # clients expect a message
        self._close("completed" if outcome.status == "completed" else "incomplete")
        name = _TERMINAL.get(outcome.status, "response.incomplete")
        if outcome.status == "cancelled":
            self._number = max(self._number, after + 1)
        self._event(name, response=self.response(outcome.status, outcome))
        return self._take()

    def response(self, status: str, outcome: Outcome | None = None) -> dict[str, Any]:
        """The response object."""
        reason = outcome.reason if outcome is not None else None
        return {
            **self._head,
            "status": status,
            "error": outcome.error if outcome is not None else None,
            "incomplete_details": {"reason": reason} if reason else None,
            "output": list(self.output),
            "usage": outcome.usage if outcome is not None else None,
            "timings": outcome.timings if outcome is not None else None,
        }

    def error(self, code: str | None, message: str, after: int = -1) -> list[bytes]:
        """The event of a break: the stream ends here, and the response may go on. The error repeats the number of the
        last event, so that a client that resumes after the error loses no event. `after`: the number of the client's
        last event, which may be larger than the numbers of this gateway. Then the error has that number, so that the
        client gets no event twice."""
        self._number = max(0, self._number - 1, after)
        self._event("error", code=code, message=message, param=None)
        return self._take()

    def _take(self) -> list[bytes]:
        written, self._written = self._written, []
        return written

    def _event(self, type_: str, **fields: Any) -> None:
        if self._only_output:
            return
        data = orjson.dumps({"type": type_, "sequence_number": self._number, **fields})
        self._written.append(b"event: %b\ndata: %b\n\n" % (type_.encode(), data))
        self._number += 1

    def _open(self, kind: str, piece: OutputPiece) -> None:
        self._kind, self._text, self._logprobs = kind, [], []
        index = len(self.output)
        item = self._new_item(kind, index, piece)
        self.output.append(item)
        self._event("response.output_item.added", output_index=index, item=item)
        if kind != "arguments":
            part = _part(kind, "", [])
            self._event(
                "response.content_part.added", item_id=item["id"], output_index=index, content_index=0, part=part
            )

    def _new_item(self, kind: str, index: int, piece: OutputPiece) -> dict[str, Any]:
        if kind == "text":
            item_id = item_name("msg", self._id, index)
            return {"id": item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        if kind == "reasoning":
            item_id = item_name("rs", self._id, index)
            return {"id": item_id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        return {
            "id": item_name("fc", self._id, index),
            "type": "function_call",
            "status": "in_progress",
            "call_id": piece.call_id,
            "name": piece.text,
            "arguments": "",
        }

    def _delta(self, piece: OutputPiece) -> None:
        item = self.output[-1]
        where = {"item_id": item["id"], "output_index": len(self.output) - 1}
        if self._kind == "arguments":
            self._event("response.function_call_arguments.delta", **where, delta=piece.text)
        elif self._kind == "reasoning":
            self._event("response.reasoning_text.delta", **where, content_index=0, delta=piece.text)
        else:
            self._event(
                "response.output_text.delta", **where, content_index=0, delta=piece.text, logprobs=piece.logprobs
            )

    def _close(self, status: str) -> None:
        """Finish the open item."""
        if not self._kind:
            return
        index, text, kind = len(self.output) - 1, "".join(self._text), self._kind
        item = dict(self.output[index], status=status)
        where = {"item_id": item["id"], "output_index": index}
        if kind == "arguments":
            item["arguments"] = text
            self._event("response.function_call_arguments.done", **where, name=item["name"], arguments=text)
        else:
            part = _part(kind, text, self._logprobs)
            item["content"] = [part]
            where["content_index"] = 0
            if kind == "reasoning":
                self._event("response.reasoning_text.done", **where, text=text)
            else:
                self._event("response.output_text.done", **where, text=text, logprobs=self._logprobs)
            self._event("response.content_part.done", **where, part=part)
        self.output[index] = item
        self._event("response.output_item.done", output_index=index, item=item)
        self._kind = ""


def item_name(prefix: str, response_id: str, index: int) -> str:
    """The id of an item, the same at every gateway."""
    return f"{prefix}_{sha256(f'{prefix} {response_id} {index}'.encode()).hexdigest()[:32]}"


def _part(kind: str, text: str, logprobs: list[Logprob]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def whole_response(head: Mapping[str, Any], pieces: Iterable[OutputPiece], outcome: Outcome) -> dict[str, Any]:
    """The response object of an ended response."""
    writer = EventWriter(head, only_output=True)
    for piece in merged(pieces):
        writer.add(piece)
    writer.end(outcome)
    return writer.response(outcome.status, outcome)
