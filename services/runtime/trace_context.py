"""The trace id of a client's W3C trace context, which ties the log lines of all services to the client's trace."""

from __future__ import annotations

import re

TRACEPARENT = "traceparent"
# https://www.w3.org/TR/trace-context/#traceparent-header: version, trace id, parent id, flags. A later version may add
# fields.
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def trace_id(value: str | bytes) -> str:
    """The trace id of a `traceparent` header; empty for a malformed one, which a server has to ignore (W3C)."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None or (match[1] == "00" and match[3]):
        return ""
    return match[2]
