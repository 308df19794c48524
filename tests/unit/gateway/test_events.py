"""Server-sent events with characters at which some clients would end a line."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.batches.results import unrun_result
from services.gateway.http.events import escape_separators
from services.gateway.live_view.event_stream import EventStream

TEXTS = st.text(st.sampled_from('a\\"\n\v\f\x1c\x85é\u2027\u2028\u2029\u202a\U0001f600'))


@given(TEXTS)
def test_separators_are_escaped_and_the_json_says_the_same(text: str) -> None:
    written = escape_separators(orjson.dumps({text: [text]})).decode()
    assert len(written.splitlines()) == 1
    assert json.loads(written) == {text: [text]}


async def test_separators_end_no_line_of_the_live_view() -> None:
    class Items:
        async def items(self) -> AsyncGenerator[bytes]:
            yield orjson.dumps("a\u2028b")

        def close(self) -> None:
            pass

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await EventStream(Items()).stream_response(send)
    assert b"".join(message.get("body", b"") for message in sent) == b'data: "a\\u2028b"\n\n'


def test_separators_end_no_line_of_an_error_file() -> None:
    assert len(unrun_result("b", 0, "a\u2028b", "batch_expired").data.decode().splitlines()) == 1
