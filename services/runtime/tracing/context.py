"""The trace that a client's request belongs to (W3C trace context), bound to the current task."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from services.runtime.logs import bind_trace_id

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
# https://www.w3.org/TR/trace-context/#traceparent-header: version, trace id, parent id, flags. A later version may add
# fields.
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_STATE_CHARS = 512  # the standard's minimum that must be propagated
_SAMPLED = 1  # bit of the flags


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of another process: the parent of what this process does for the request. Ids are hexadecimal digits."""

    trace_id: str  # 32
    span_id: str  # 16
    sampled: bool  # whether its spans are recorded
    state: str = ""  # of the tracing systems on the way, as the header tracestate has it


_current: ContextVar[TraceContext | None] = ContextVar("trace_context", default=None)


def parse_context(traceparent: str | bytes, tracestate: str | bytes = "") -> TraceContext | None:
    """The context in the two headers. None for a malformed `traceparent`, which a server has to ignore (W3C)."""
    match = _TRACEPARENT.fullmatch(_text(traceparent).strip())
    if match is None or (match[1] == "00" and match[5]):
        return None
    state = _text(tracestate).strip()
    sampled = bool(int(match[4], 16) & _SAMPLED)
    return TraceContext(match[2], match[3], sampled, state if len(state) <= _MAX_STATE_CHARS else "")


def context_of(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """The context in the headers of a request. Their names are in lower case. Several `tracestate` are one list."""
    parent, state = b"", b""
    for name, value in headers:
        if name == b"traceparent":
            parent = value
        elif name == b"tracestate":
            state = state + b"," + value if state else value
    return parse_context(parent, state) if parent else None


def bind_context(context: TraceContext | None) -> None:
    """Set the context of the current task and the tasks it starts, and put its trace id on their log lines."""
    _current.set(context)
    bind_trace_id("" if context is None else context.trace_id)


def current_context() -> TraceContext | None:
    """The context that bind_context() has set."""
    return _current.get()


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
