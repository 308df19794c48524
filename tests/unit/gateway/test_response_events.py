"""The events of a response: their numbers and items. They do not depend on how the output is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.responses_api.events import EventWriter, whole_response
from services.gateway.responses_api.pieces import Kind, Outcome, OutputPiece, merged
from services.gateway.responses_api.records import dump_result, load_result, new_record

HEAD: dict[str, Any] = {"id": "resp_1", "created_at": 1, "model": "m", "background": False, "object": "response"}
DONE = Outcome("completed", {"output_tokens": 3})
CUT = Outcome("incomplete", {"output_tokens": 3}, reason="max_output_tokens")
_KINDS: list[Kind] = ["text", "reasoning", "name", "arguments"]


def events_of(pieces: list[OutputPiece], outcome: Outcome = DONE) -> list[dict[str, Any]]:
    writer = EventWriter(HEAD)
    written = writer.begin()
    for piece in pieces:
        written += writer.add(piece)
    written += writer.end(outcome)
    shown = []
    for event in written:
        name, data, *rest = event.decode().split("\n")
        assert rest == ["", ""]
        shown.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + shown[-1]["type"]
    return shown


def test_all_kinds_of_items_in_a_row() -> None:
    pieces = [
        OutputPiece("reasoning", "Hm"),
        OutputPiece("reasoning", "."),
        OutputPiece("text", "I look."),
        OutputPiece("name", "f", call_id="call_1"),
        OutputPiece("arguments", '{"a":'),
        OutputPiece("arguments", "1}"),
        OutputPiece("name", "g", call_id="call_2"),
        OutputPiece("text", "Done."),
    ]
    events = events_of(pieces)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    assert (events[-1]["type"], final["status"], final["usage"]) == ("response.completed", "completed", DONE.usage)
    assert [item["type"] for item in final["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert [item.get("arguments") for item in final["output"]] == [None, None, '{"a":1}', "", None]
    assert [item.get("call_id") for item in final["output"]] == [None, None, "call_1", "call_2", None]
    assert {item["status"] for item in final["output"]} == {"completed"}
    assert len({item["id"] for item in final["output"]}) == 5
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert done == final["output"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert {item["status"] for item in added} == {"in_progress"}


def test_a_response_ends_as_its_outcome_says() -> None:
    cut = events_of([OutputPiece("name", "f", call_id="c"), OutputPiece("arguments", '{"a')], CUT)[-1]
    assert (cut["type"], cut["response"]["incomplete_details"]) == (
        "response.incomplete",
        {"reason": "max_output_tokens"},
    )
    assert cut["response"]["output"][0]["status"] == "incomplete"
    failed = events_of([], Outcome("failed", error={"code": "server_error", "message": "m"}))[-1]
    assert (failed["type"], failed["response"]["output"]) == ("response.failed", [])
    assert failed["response"]["error"] == {"code": "server_error", "message": "m"}
    empty = events_of([])[-1]["response"]["output"]
    assert [item["content"][0]["text"] for item in empty] == [""]
    cancelled = events_of([OutputPiece("text", "a")], Outcome("cancelled"))[-1]
    assert (cancelled["type"], cancelled["response"]["status"]) == ("response.incomplete", "cancelled")


def test_an_error_event_repeats_the_last_sequence_number() -> None:
    writer = EventWriter(HEAD)
    writer.begin()
    [event] = writer.error("service_unavailable", "later")
    data = json.loads(event.decode().split("data: ")[1])
    assert data == {
        "type": "error",
        "sequence_number": 1,
        "code": "service_unavailable",
        "message": "later",
        "param": None,
    }
    [event] = writer.error("service_unavailable", "later", after=7)
    assert json.loads(event.decode().split("data: ")[1])["sequence_number"] == 7, (
        "the client has events from another gateway"
    )


@given(st.lists(st.tuples(st.sampled_from(_KINDS), st.text(min_size=1, max_size=4)), max_size=12))
def test_the_response_is_what_its_events_say(parts: list[tuple[Kind, str]]) -> None:
    pieces: list[OutputPiece] = []
    for kind, text in parts:
        if kind == "arguments" and (not pieces or pieces[-1].kind not in ("name", "arguments")):
            kind = "name"  # arguments follow a name
        pieces.append(
            OutputPiece(kind, text, [{"token": text}] if kind == "text" else (), "c" if kind == "name" else "")
        )
    events = events_of(pieces)
    assert events[-1]["response"] == json.loads(json.dumps(whole_response(HEAD, pieces, DONE)))
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    for index, item in enumerate(events[-1]["response"]["output"]):
        shown = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert shown == texts.get(index, "")
    record = new_record("o", HEAD, [], {}, b"")
    loaded, outcome = load_result(type(record)(**{**_fields(record), "result": dump_result(pieces, DONE)}))
    assert outcome == DONE
    assert events_of(loaded) == events
    entries = [entry for piece in loaded for entry in piece.logprobs]
    assert all(isinstance(entry, orjson.Fragment) for entry in entries), "they are not decoded"
    assert "".join(piece.text for piece in merged(pieces)) == "".join(piece.text for piece in pieces)


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}
