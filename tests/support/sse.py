"""Server-sent events, as a client parses them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest


class Event(NamedTuple):
    id: str
    data: str


def parse_events(lines: Iterable[str]) -> Iterator[Event]:
    """The complete events: an event without its empty line has not arrived. An answer that is no stream is one
    event."""
    fields: dict[str, str] = {}
    lines = list(lines)
    if len(lines) == 1:
        yield Event("", lines[0])
        return
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            assert name in ("id", "data"), line
            assert name not in fields, fields
            fields[name] = value
        elif fields:
            yield Event(fields.get("id", ""), fields["data"])
            fields = {}


@dataclass
class Told:
    """What a client knows after some events, independent of how the text was divided into events."""

    texts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, dict[int, dict[str, str]]] = field(default_factory=dict)  # by choice and call
    reasons: dict[int, list[str]] = field(default_factory=dict)
    roles: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    rest: list[Any] = field(default_factory=list)
    heads: set[tuple[Any, ...]] = field(default_factory=set)
    num_typed: int = 0  # events of the Responses API


def told(events: Iterable[Event]) -> Told:
    known = Told()
    for event in events:
        if event.data == "[DONE]":
            known.rest.append("done")
            continue
        data = json.loads(event.data)
        if "choices" not in data:
            _read_typed(known, data)
            continue
        known.heads.add((data["id"], data["created"], data["model"], data["object"]))
        if not data["choices"]:
            known.rest.append(data["usage"])
        for choice in data["choices"]:
            index, delta = choice["index"], choice.get("delta", {})
            text = choice["text"] if "text" in choice else delta.get("content")
            known.texts[index] = known.texts.get(index, "") + (text or "")
            for part in delta.get("tool_calls", ()):
                _add_part(known.calls.setdefault(index, {}).setdefault(part["index"], {}), part)
            known.roles[index] = known.roles.get(index, 0) + ("role" in delta)
            known.reasons.setdefault(index, []).extend([choice["finish_reason"]] * bool(choice["finish_reason"]))
            known.logprobs.setdefault(index, []).extend(_entries(choice["logprobs"]))
    return known


def _add_part(call: dict[str, str], part: dict[str, Any]) -> None:
    assert "id" not in call or "id" not in part, f"the id of a call came twice: {call}, {part}"
    call |= {"id": part["id"]} if "id" in part else {}
    for name, text in part["function"].items():
        call[name] = call.get(name, "") + text


def _read_typed(known: Told, data: dict[str, Any]) -> None:
    """An event of the Responses API (with the next number), or of Anthropic's messages."""
    if "sequence_number" in data:
        assert data["sequence_number"] == known.num_typed, f"event {data} instead of number {known.num_typed}"
        known.num_typed += 1
    match data["type"]:
        case "response.output_text.delta":
            known.texts[data["output_index"]] = known.texts.get(data["output_index"], "") + data["delta"]
        case "response.completed" | "response.incomplete":
            whole = data["response"]
            known.rest += [whole["status"], whole["usage"]["output_tokens"], len(whole["output"])]
        case "content_block_delta":
            text = data["delta"].get("text") or data["delta"].get("partial_json", "")
            known.texts[data["index"]] = known.texts.get(data["index"], "") + text
        case "message_delta":
            known.rest += [data["delta"]["stop_reason"], data["usage"]["output_tokens"]]


def _entries(logprobs: Any) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(*(logprobs[name] for name in sorted(logprobs)), strict=True))


def alike(one: Any, other: Any) -> bool:
    """Whether two values are equal, except the last bits of log probabilities, which depend on the batch."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == (pytest.approx(other, abs=1e-4) if isinstance(one, float) else other))
