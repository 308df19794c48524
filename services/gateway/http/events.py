"""Server-sent events, as messages for ASGI's `send`."""

from __future__ import annotations

from starlette.types import Message

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def events_message(events: bytes, *, more_body: bool = True) -> Message:
    """Whole events with JSON as data. `more_body`: others follow."""
    return {"type": "http.response.body", "body": escape_separators(events), "more_body": more_body}


def escape_separators(lines: bytes) -> bytes:
    """Lines of JSON in UTF-8, with U+0085, U+2028 and U+2029 in their strings escaped.

    Such characters end no line of server-sent events or of JSONL, and JSON may have them unescaped. But Python's
    `str.splitlines` ends lines at them, so clients that read with it, or with httpx' `iter_lines`, would get half of
    the JSON.
    """
    if lines.isascii():
        return lines
    for character in "\x85\u2028\u2029":
        lines = lines.replace(character.encode(), b"\\u%04x" % ord(character))
    return lines
