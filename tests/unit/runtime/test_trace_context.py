"""W3C's headers traceparent and tracestate."""

from __future__ import annotations

import pytest

from services.runtime.tracing.context import TraceContext, context_of, parse_context

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("value", "sampled"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-00", False),
        (f"00-{TRACE}-{PARENT}-03", True),
        (f"00-{TRACE}-{PARENT}-02", False),
        (f"cc-{TRACE}-{PARENT}-01-more", True),
    ],
)
def test_a_valid_header_names_the_trace_and_the_parent(value: str, sampled: bool) -> None:
    context = TraceContext(TRACE, PARENT, sampled)
    assert parse_context(value) == parse_context(value.encode()) == context


@pytest.mark.parametrize(
    "value",
    [
        "",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}",
    ],
)
def test_a_malformed_header_is_ignored(value: str) -> None:
    assert parse_context(value) is None


def test_several_state_headers_are_one_list() -> None:
    parent = (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())
    state = [(b"tracestate", b"a=1"), (b"host", b"x"), (b"tracestate", b"b=2")]
    assert context_of([*state, parent]) == TraceContext(TRACE, PARENT, True, "a=1,b=2")
    assert context_of(state) is None
    assert context_of([parent, (b"tracestate", b"a=" + b"x" * 511)]) == TraceContext(TRACE, PARENT, True)
