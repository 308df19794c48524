"""Requests of the Messages API become chats, and texts become content blocks, however they arrive."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import anthropic.types
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.anthropic.conversion import MessageChat
from services.gateway.anthropic.events import BlockEvents, ContentReader
from services.gateway.anthropic.schema import IGNORED, PASSED_ON, REFUSED, MessagesRequest
from services.gateway.errors import ApiError
from services.gateway.parsing.formats import HERMES
from services.gateway.parsing.reasoning import ThinkingAt
from services.gateway.parsing.reply import ReplyFormat

ASKED: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
REPLY = ReplyFormat(calls=HERMES, known=frozenset({"f"}), thinking=ThinkingAt.MAYBE)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "é"]}}\n</tool_call>'
TEXTS = ["", "Hi.", "<think>Why?</think>", "<think>Why?", " ", CALL, CALL, "\n", "Done", "<tool"]


def chat(**options: Any) -> MessageChat:
    return MessageChat.from_body(ASKED | options, 2048)


def messages_of(*turns: tuple[str, Any], **options: Any) -> list[dict[str, Any]]:
    made = chat(messages=[{"role": role, "content": content} for role, content in turns], **options)
    return made.for_template().messages


def streamed(text: str, cuts: list[int]) -> list[dict[str, Any]]:
    """The blocks that a client makes of the events of a text that comes in pieces."""
    writer = BlockEvents(ContentReader(REPLY, "msg_1"))
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(bounds)]
    raw = b"".join([*map(writer.delta, pieces), writer.last("")]).decode()
    blocks: list[dict[str, Any]] = []
    is_open = False
    for data in (json.loads(event.partition("\ndata: ")[2]) for event in raw.split("\n\n")[:-1]):
        if data["type"] == "content_block_start":
            assert not is_open
            assert data["index"] == len(blocks)
            blocks.append(data["content_block"] | {"json": ""})
            is_open = True
            continue
        assert is_open
        assert data["index"] == len(blocks) - 1
        if data["type"] == "content_block_stop":
            is_open = False
            continue
        delta, block = data["delta"], blocks[-1]
        match delta["type"]:
            case "text_delta":
                block["text"] += delta["text"]
            case "thinking_delta":
                block["thinking"] += delta["thinking"]
            case "input_json_delta":
                block["json"] += delta["partial_json"]
    assert not is_open
    for block in blocks:
        if given := block.pop("json"):
            block["input"] = json.loads(given)
    return blocks


@given(st.lists(st.sampled_from(TEXTS), max_size=5).map("".join), st.lists(st.integers(0, 200), max_size=30))
def test_however_the_text_arrives_the_blocks_are_the_same(text: str, cuts: list[int]) -> None:
    whole = ContentReader(REPLY, "msg_1").whole(text)
    blocks = streamed(text, cuts)

    def told(found: list[dict[str, Any]]) -> tuple[str, str, list[Any]]:
        texts = "".join(block.get("text", "") for block in found)
        thinking = "".join(block.get("thinking", "") for block in found)
        return texts, thinking, [block for block in found if block["type"] == "tool_use"]

    assert told(blocks) == told(whole)
    assert [block["type"] for block in blocks][:1] == [block["type"] for block in whole][:1]


def test_content_in_the_piece_that_ends_a_call_is_a_block_of_its_own() -> None:
    begun, rest = CALL[: CALL.index(": [")], CALL[CALL.index(": [") :]
    call, text = streamed(f"{begun}{rest} Done", [len(begun)])
    assert (call["type"], call["input"]) == ("tool_use", {"a": [1, "é"]})
    assert (text["type"], text["text"]) == ("text", "Done")


def test_a_turn_with_results_of_tools_is_several_messages() -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "42", "is_error": True}
    text = {"type": "text", "text": "and?"}
    made = messages_of(("user", "x"), ("assistant", [thought, call]), ("user", [result, text]), system="Be short.")
    assert made == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
            "reasoning": "hm",
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "42", "tool_call_id": "a"},
        {"role": "user", "content": "and?"},
    ]


def test_turns_of_one_role_are_merged() -> None:
    made = messages_of(("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e"))
    assert [(message["role"], message["content"]) for message in made] == [
        ("user", "a\nb"),
        ("assistant", "c\nd"),
        ("user", "e"),
    ]


def test_the_other_fields_become_fields_of_a_chat() -> None:
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True}]
    made = chat(tools=tools, stop_sequences=["s"], metadata={"user_id": "u"}, cache_salt="salt", top_k=3, seed=4)
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert made.for_template().extras.tools == [{"type": "function", "function": function}]
    assert (made.stop, made.user, made.seed, made.max_tokens) == (["s"], "u", 4, 5)
    assert (made.sampling().numbers, made.metadata().cache_salt, made.metadata().tenant) == ({"top_k": 3}, "salt", "u")
    choices: list[tuple[dict[str, Any], Any, bool]] = [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
    ]
    for given_choice, choice, parallel in choices:
        use = chat(tools=tools, tool_choice=given_choice).tool_use()
        assert (use.choice, use.parallel) == (choice, parallel)
    assert chat(thinking={"type": "disabled"}).for_template().variables == {"enable_thinking": False}
    effort = chat(thinking={"type": "disabled"}, output_config={"effort": "high"}).for_template().variables
    assert effort == {"enable_thinking": False, "reasoning_effort": "high"}


def test_each_field_of_the_client_is_served_refused_or_ignored() -> None:
    known = MessagesRequest.model_fields.keys() | PASSED_ON | REFUSED.keys() | IGNORED.keys()
    headers = {"betas", "workspace_id"}  # the client sends them as headers
    types: Any = anthropic.types
    for params in (
        types.message_create_params.MessageCreateParamsStreaming,
        types.message_count_tokens_params.MessageCountTokensParams,
        types.beta.message_create_params.MessageCreateParamsStreaming,
        types.beta.message_count_tokens_params.MessageCountTokensParams,
    ):
        assert params.__annotations__.keys() - known - headers == set()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("output_config", {"effort": "low"}),
        ("thinking", {"type": "adaptive"}),
        ("metadata", {"user_id": "u"}),
        ("tool_choice", {"type": "auto"}),
        ("cache_control", {"type": "ephemeral", "scope": "global"}),
        ("tools", [{"name": "f", "input_schema": {}, "eager_input_streaming": True, "defer_loading": False}]),
    ],
)
def test_an_unknown_field_inside_an_object_is_refused_with_its_path(field: str, value: Any) -> None:
    def extended(misspelled: Any) -> Any:
        if isinstance(value, list):
            return [{**value[0], "disable_paralel_tool_use": misspelled}]
        return {**value, "disable_paralel_tool_use": misspelled}

    assert chat(**{field: extended(None)})
    path = f"{field}{'.0' if isinstance(value, list) else ''}.disable_paralel_tool_use"
    with pytest.raises(ApiError) as caught:
        chat(**{field: extended(True)})
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, path, "unknown_parameter")


def test_ignored_fields_must_have_their_type() -> None:
    for name, wrong in {"context_management": [], "service_tier": 1, "user_profile_id": {}}.items():
        with pytest.raises(ApiError, match=f"{name}: must be of the type") as caught:
            chat(**{name: wrong})
        assert (caught.value.param, caught.value.code) == (name, "invalid_type")


def test_the_page_has_the_tables() -> None:
    page = (Path(__file__).parents[3] / "docs/anthropic.md").read_text()
    for name, neutral in REFUSED.items():
        values = ", ".join(f"`{json.dumps(value)}`" for value in neutral) or "`null`"
        assert f"| `{name}` | {values} |" in page
    for name, why in IGNORED.items():
        assert f"| `{name}` | {why} |" in page


def test_a_deep_body_raises_at_most_an_api_error() -> None:
    deep: Any = "x"
    for _ in range(1000):
        deep = [{"type": "tool_result", "tool_use_id": "a", "content": deep}]
    thing: Any = {}
    for _ in range(1000):
        thing = {"x": thing}
    calls = [{"type": "tool_use", "id": "a", "name": "f", "input": thing}]
    for options in (
        {"messages": [{"role": "user", "content": deep}]},
        {"system": deep},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": calls}]},
        {"tools": [{"name": "f", "input_schema": {"properties": thing}}], "metadata": thing},
    ):
        with contextlib.suppress(ApiError):
            chat(**options)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(["text", "tool_use", "tool_result", "user", "5m"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "text",
                    "id",
                    "name",
                    "input",
                    "content",
                    "tool_use_id",
                    "thinking",
                    "cache_control",
                    "ttl",
                    "role",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from([*MessagesRequest.model_fields, "seed", "mcp_servers", "x"]), _JSON))
def test_any_body_is_a_chat_or_a_400(body: dict[str, Any]) -> None:
    for asked in (body, ASKED | body):
        failed: ApiError | None = None
        try:
            MessageChat.from_body(asked, 2048)
        except ApiError as error:
            failed = error
        assert failed is None or (failed.status == 400 and failed.message)
