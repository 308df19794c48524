"""The trace id of W3C's traceparent header."""

from __future__ import annotations

import pytest

from services.runtime.logs import trace_id

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    "value", [f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00", f"cc-{TRACE}-{PARENT}-01-more"]
)
def test_a_valid_header_names_the_trace(value: str) -> None:
    assert trace_id(value) == trace_id(value.encode()) == TRACE


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
    assert trace_id(value) == ""
