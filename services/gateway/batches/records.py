"""A batch as it is stored and shown, and the table of its statuses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import orjson

from services.gateway.batches.schema import WINDOW_S, BatchRequest
from services.gateway.store.documents import Document, DocumentName

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Event = Literal["valid", "invalid", "cancel", "run", "expire", "lose", "finish"]
# Lines that were not run get an error of this code in the error file.
Unrun = Literal["", "batch_expired", "batch_cancelled", "api_key_revoked", "input_file_lost", "files_limit_exceeded"]
# The statuses are OpenAI's. `run`: every line has a result, or no further lines are run because the key was revoked or
# the owner's files reached their limit. `finish`: the files are written.
TRANSITIONS: dict[tuple[BatchStatus, Event], BatchStatus] = {
    ("validating", "valid"): "in_progress",
    ("validating", "invalid"): "failed",
    ("validating", "cancel"): "cancelling",
    ("validating", "expire"): "finalizing",
    ("in_progress", "run"): "finalizing",
    ("in_progress", "expire"): "finalizing",
    ("in_progress", "lose"): "finalizing",
    ("in_progress", "cancel"): "cancelling",
    ("cancelling", "finish"): "cancelled",
    ("finalizing", "finish"): "completed",
}
ENDED: tuple[BatchStatus, ...] = ("failed", "completed", "expired", "cancelled")
# A batch with lines that were not run for one of these reasons ends with this status, and not with that of the table.
_ENDS: dict[Unrun, BatchStatus] = {"batch_expired": "expired", "input_file_lost": "failed"}
# The field that has the time of a status. `validating` has no field: it begins at `created_at`.
_TIMES: dict[BatchStatus, str] = {
    status: f"{status}_at" for status in (*ENDED, "in_progress", "finalizing", "cancelling")
}
_OUTCOME_FIELDS = ("errors", "output_file_id", "error_file_id", "model", "usage")


class Counts(NamedTuple):
    """Lines of the input file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A stored batch. `model`: the model of the gateway that made the batch. `times`: by the names of their fields.
    `outcome`: _OUTCOME_FIELDS that are known. `ttl_s`: of its output files. `kept_s`: how long the batch is stored
    after its completion window. `unrun`: why some lines were not run. `num_bytes`: size of the results that are in no
    output file yet. It is stored about once a second, so the latest results may be missing."""

    name: DocumentName
    model: str
    request: dict[str, Any]
    created_s: float
    ttl_s: float
    kept_s: float
    status: BatchStatus = "validating"
    counts: Counts = field(default_factory=Counts)
    times: dict[str, int] = field(default_factory=dict)
    outcome: dict[str, Any] = field(default_factory=dict)
    unrun: Unrun = ""
    num_bytes: int = 0
    version: int = 0

    @property
    def expires_s(self) -> float:
        """When the completion window ends."""
        return self.created_s + WINDOW_S

    @property
    def endpoint(self) -> str:
        """The path that runs each line."""
        return str(self.request["endpoint"])

    @property
    def input_file_id(self) -> str:
        """The file of the lines."""
        return str(self.request["input_file_id"])

    @property
    def has_ended(self) -> bool:
        """No gateway works on it any more."""
        return self.status in ENDED

    def may(self, event: Event) -> bool:
        """Whether the event changes the status."""
        return (self.status, event) in TRANSITIONS

    def after(self, event: Event, now_s: float) -> BatchRecord:
        """The batch after an event."""
        status = TRANSITIONS[self.status, event]
        if event == "finish":
            status = _ENDS.get(self.unrun, status)
        return replace(self, status=status, times={**self.times, _TIMES[status]: int(now_s)})

    def shown(self) -> dict[str, Any]:
        """The batch object."""
        return {
            "id": self.name.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "input_file_id": self.input_file_id,
            "completion_window": self.request["completion_window"],
            "status": self.status,
            "created_at": int(self.created_s),
            "expires_at": int(self.expires_s),
            **dict.fromkeys(_TIMES.values()),
            **self.times,
            "request_counts": self.counts._asdict(),
            "metadata": self.request["metadata"],
            **dict.fromkeys(_OUTCOME_FIELDS),
            **self.outcome,
        }

    def document(self) -> Document:
        """The batch as it is stored."""
        data = {
            "request": self.request,
            "ttl_s": self.ttl_s,
            "kept_s": self.kept_s,
            "status": self.status,
            "counts": list(self.counts),
            "times": self.times,
            "outcome": self.outcome,
            "unrun": self.unrun,
        }
        expires_s, text = self.expires_s + self.kept_s, orjson.dumps(data)
        return Document(self.name, self.model, self.created_s, expires_s, self.num_bytes, text, self.version)


def new_batch(name: DocumentName, model: str, request: BatchRequest, now_s: float, ttl_s: float) -> BatchRecord:
    """A batch that a client asks for. `ttl_s`: how long the batch is stored after its window, and its output files
    unless the request says otherwise."""
    expiry = request.output_expires_after
    fields = request.model_dump(exclude={"output_expires_after"})
    return BatchRecord(name, model, fields, now_s, expiry.seconds if expiry is not None else ttl_s, ttl_s)


def stored_batch(document: Document) -> BatchRecord:
    """The batch in a document that BatchRecord.document() made."""
    data = orjson.loads(document.data)
    return BatchRecord(
        document.name,
        document.label,
        created_s=document.created_s,
        num_bytes=document.num_bytes,
        version=document.version,
        counts=Counts(*data.pop("counts")),
        **data,
    )
