"""Every field of vLLM's request classes is served, refused by name, or ignored on purpose, and the docs say which."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.gateway.embeddings.schema import EmbeddingRequest
from services.gateway.errors import ApiError
from services.gateway.fields.messages import ChatMessage
from services.gateway.fields.other_servers import IGNORED, IGNORED_INSIDE, REFUSED, REFUSED_IN_MESSAGES, RENAMED
from services.gateway.openai import schema
from services.gateway.openai.structured import JsonSchema, ResponseFormat, StructuredOutputs
from tests.unit.gateway.test_request import CHAT, COMPLETION

ROOT = Path(__file__).parents[3]
# Of vLLM 0.32.0. tests/peer/test_vllm_fields.py compares the file with vLLM.
THEIRS: dict[str, list[str]] = json.loads((ROOT / "tests" / "support" / "vllm_fields.json").read_text())
DOCS = (ROOT / "docs" / "unserved-fields.md").read_text()
OURS: list[tuple[str, Any, str]] = [
    ("ChatCompletionRequest", schema.ChatRequest, ""),
    ("CompletionRequest", schema.CompletionRequest, ""),
    ("TokenizeChatRequest", schema.TokenizeRequest, ""),
    ("TokenizeCompletionRequest", schema.TokenizeRequest, ""),
    ("DetokenizeRequest", schema.DetokenizeRequest, ""),
    ("StreamOptions", schema.StreamOptions, "stream_options."),
    ("ResponseFormat", ResponseFormat, "response_format."),
    ("JsonSchemaResponseFormat", JsonSchema, "response_format.json_schema."),
    ("messages", ChatMessage, "messages."),
]

# The requests of docs/unserved-fields.md, by their names there, each with the least body.
REQUESTS: dict[str, tuple[type[schema.RequestBody], dict[str, Any]]] = {
    "completions": (schema.CompletionRequest, COMPLETION),
    "chats": (schema.ChatRequest, CHAT),
    "`/tokenize`": (schema.TokenizeRequest, {"prompt": "x"}),
}


@pytest.mark.parametrize(("theirs", "ours", "path"), OURS, ids=[theirs for theirs, _, _ in OURS])
def test_no_field_of_vllm_passes_unread(theirs: str, ours: Any, path: str) -> None:
    served = {field.alias or name for name, field in ours.model_fields.items()}
    known = {*REFUSED, *RENAMED, *IGNORED} if not path else set()
    known |= set(REFUSED_IN_MESSAGES) if path == "messages." else set()
    known |= {name.removeprefix(path) for name in IGNORED_INSIDE if path and name.startswith(path)}
    assert set(THEIRS[theirs]) <= served | known


def openai_fields(name: str) -> set[str]:
    """The fields of a schema in OpenAI's specification and of the schemas that it includes."""
    schemas = json.loads(gzip.decompress((ROOT / "tests/support/openai-subset.json.gz").read_bytes()))["components"]

    def fields(part: dict[str, Any]) -> set[str]:
        if "$ref" in part:
            part = schemas["schemas"][part["$ref"].rpartition("/")[2]]
        return set(part.get("properties", ())).union(*(fields(one) for one in part.get("allOf", part.get("anyOf", ()))))

    return fields(schemas["schemas"][name])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("CreateChatCompletionRequest", schema.ChatRequest),
        ("CreateCompletionRequest", schema.CompletionRequest),
        ("CreateEmbeddingRequest", EmbeddingRequest),
        ("ChatCompletionStreamOptions", schema.StreamOptions),
    ],
)
def test_every_field_of_openai_is_known(theirs: str, ours: Any) -> None:
    known = openai_fields(theirs)
    assert len(known) > 1
    assert known <= set(ours.model_fields) | {*REFUSED, *IGNORED}


@pytest.mark.parametrize("path", ["temperatur", "stream_options.usage", "response_format.strict"])
def test_a_field_that_no_server_has_is_refused_as_by_openai(path: str) -> None:
    name, _, inner = path.partition(".")
    value: Any = {inner: 1, **({"type": "text"} if name == "response_format" else {})} if inner else 0.5
    for of, body in ((schema.CompletionRequest, COMPLETION), (schema.ChatRequest, CHAT)):
        with pytest.raises(ApiError) as caught:
            schema.parse(of, body | {"stream": True, name: value}, 99)
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, path, "unknown_parameter")
        assert caught.value.message == f"Unknown parameter: '{path}'"
        schema.parse(of, body | {name: None}, 99)
    for other, needed in ((schema.TokenizeRequest, "prompt"), (EmbeddingRequest, "input")):
        with pytest.raises(ApiError, match="Unknown parameter: 'temperatur'"):
            schema.parse(other, {needed: "x", "temperatur": 1}, 99)


def test_an_error_names_at_most_ten_fields() -> None:
    unknown = {f"f{n}" + "x" * 200: 1 for n in range(12)}
    with pytest.raises(ApiError, match=r"'f9x{98}'; and 2 more$"):
        schema.parse(schema.ChatRequest, CHAT | unknown, 99)


def test_structured_outputs_refuse_every_name_that_is_not_served() -> None:
    served = {field.alias or name for name, field in StructuredOutputs.model_fields.items()}
    for name in set(THEIRS["StructuredOutputsParams"]) - served:
        with pytest.raises(ApiError) as caught:
            schema.parse(schema.CompletionRequest, COMPLETION | {"structured_outputs": {"regex": "a", name: "x"}}, 99)
        assert caught.value.param == f"structured_outputs.{name}"


@pytest.mark.parametrize("name", REFUSED_IN_MESSAGES)
def test_fields_of_messages_that_would_change_the_answer_are_refused(name: str) -> None:
    message = {"role": "assistant", "content": "x", name: {"id": "a"}}
    with pytest.raises(ApiError, match=f"{name} is not supported in a message"):
        schema.parse(schema.ChatRequest, {"messages": [message]}, 99)
    schema.parse(schema.ChatRequest, {"messages": [message | {name: None}]}, 99)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_fields_are_named(name: str) -> None:
    refusing = [(of, body) for of, body in REQUESTS.values() if name not in of.model_fields]
    assert refusing, "every request serves it"
    for of, body in refusing:
        with pytest.raises(ApiError) as caught:
            schema.parse(of, body | {name: {"a": 1}}, 99)
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, name, "unsupported_value")
        for neutral in REFUSED[name]:
            schema.parse(of, body | {name: neutral}, 99)


def refused_by(name: str) -> str:
    """The requests that refuse a field of REFUSED or of `messages`, by their names in the docs."""
    in_messages = name.startswith("messages.")
    refusing = [
        title
        for title, (of, _) in REQUESTS.items()
        if ("messages" in of.model_fields if in_messages else name not in of.model_fields)
    ]
    return "all" if len(refusing) == len(REQUESTS) else ", ".join(refusing)


def table(title: str) -> dict[str, str]:
    """Of the table below a heading of the docs page: the first column, mapped to the other columns."""
    part = DOCS.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.*?) \|$", part, re.MULTILINE)
    return dict(rows)


def test_the_docs_show_the_refused_renamed_and_ignored_fields() -> None:
    neutral = REFUSED | dict.fromkeys((f"messages.{name}" for name in REFUSED_IN_MESSAGES), ())
    assert table("Refused") == {
        name: f"{', '.join(f'`{json.dumps(value)}`' for value in values) or '`null`'} | {refused_by(name)}"
        for name, values in neutral.items()
    }
    assert table("Other names") == {name: f"`{ours}`" for name, ours in RENAMED.items()}
    assert table("Ignored on purpose") == IGNORED | IGNORED_INSIDE
