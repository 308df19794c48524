"""The demo corpus is reproducible and honestly split, and its tokenizer and chat template do what servers expect."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from demo import corpus
from demo.corpus import TASKS, Example, held_out, is_held_out, training_example

DEMO = Path(corpus.__file__).parent
CHECKPOINT = DEMO / "checkpoint"
UNICODE_TEXTS = (
    "plain text",
    "  spaces   and\ttabs\r\n\n lines ",
    "héllo wörld, naïve café",
    "日本語のテキスト",
    "مرحبا بالعالم",
    "👩‍👩‍👧‍👦 emoji 😀 and e\u0301 combining",
    "\x00\x01\x7f control",
    "0123456789 3.14159 ١٢٣",
)


def train_examples(seed: int, n: int) -> list[Example]:
    rng = random.Random(seed)
    return [training_example(rng, level=i / n) for i in range(n)]


def tool_examples(seed: int, n: int) -> list[Example]:
    """The examples of the second stage that have tools."""
    rng = random.Random(seed)
    return [e for e in (training_example(rng, level=i / n, tools=True) for i in range(n)) if e.tools]


def prompt_key(example: Example) -> tuple[str, ...]:
    return tuple(message["content"] for message in example.messages)


def test_same_seed_gives_the_same_examples() -> None:
    assert train_examples(7, 200) == train_examples(7, 200)
    assert train_examples(7, 200) != train_examples(8, 200)


@pytest.mark.parametrize("task", TASKS)
def test_held_out_is_reproducible_and_well_formed(task: str) -> None:
    examples = held_out(task, 50, seed=3)
    assert examples == held_out(task, 50, seed=3)
    assert examples != held_out(task, 50, seed=4)
    for example in examples:
        assert example.task == task
        assert example.messages[-1]["role"] == ("tool" if task == "result" else "user")
        assert bool(example.tools) == (task in ("tool", "result"))
        assert example.answer == example.answer.strip() != ""


def test_repeat_texts_are_on_their_side_of_the_split() -> None:
    assert all(is_held_out("repeat", example.answer) for example in held_out("repeat", 300))
    assert not any(is_held_out("repeat", e.answer) for e in train_examples(0, 3_000) if e.task == "repeat")


def test_lookup_answers_are_on_their_side_of_the_split() -> None:
    def pair(example: Example) -> str:
        words = example.answer.rstrip(".").split()
        return f"{words[-3]} {words[-1]}"  # "... of KEY is VALUE." and "KEY = VALUE"

    assert all(is_held_out("lookup", pair(example)) for example in held_out("lookup", 300))
    assert not any(is_held_out("lookup", pair(e)) for e in train_examples(0, 3_000) if e.task == "lookup")


def test_add_prompts_are_on_their_side_of_the_split() -> None:
    assert all(is_held_out("add", example.messages[-1]["content"]) for example in held_out("add", 300))
    assert not any(is_held_out("add", e.messages[-1]["content"]) for e in train_examples(0, 3_000) if e.task == "add")


@pytest.mark.parametrize("task", ["tool", "result"])
def test_keys_of_tools_are_on_their_side_of_the_split(task: str) -> None:
    def key_sentences(example: Example) -> list[str]:
        return re.findall(r"The (\w+) (?:in|of) ([\w ]+?) is ", example.answer)

    def pairs(example: Example) -> list[str]:
        if example.task == "result":
            return [" ".join(found) for found in key_sentences(example)]
        return [f"{attribute_of(call)} {key}" for call in calls(example.answer) for key in call["arguments"].values()]

    assert all(is_held_out("tool", pair) for example in held_out(task, 300) for pair in pairs(example))
    trained = [example for example in tool_examples(0, 3_000) if example.task == "result"]
    assert not any(is_held_out("tool", pair) for example in trained for pair in pairs(example))


def calls(text: str) -> list[dict[str, Any]]:
    """The calls in a text of the model."""
    return [json.loads(call) for call in re.findall(r"<tool_call>(.*?)</tool_call>", text)]


def attribute_of(call: Mapping[str, Any]) -> str:
    """What the function tells: the last word of its name."""
    return str(call["name"]).rsplit("_", 1)[-1]


def test_a_call_names_a_function_and_the_parameters_of_the_prompt() -> None:
    for example in [*held_out("tool", 200), *held_out("result", 200), *tool_examples(1, 1_000)]:
        functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in example.tools}
        assert len(functions) == len(example.tools)
        for text in [example.answer, *(message["content"] for message in example.messages)]:
            for call in calls(text):
                assert set(call["arguments"]) == set(functions[call["name"]]["properties"])


def test_no_held_out_prompt_is_ever_trained_on() -> None:
    trained = {prompt_key(example) for example in [*train_examples(0, 3_000), *tool_examples(0, 3_000)]}
    assert not any(prompt_key(example) in trained for task in TASKS for example in held_out(task, 300))


def test_lookup_answer_stands_once_in_the_prompt_at_spread_distances() -> None:
    examples = held_out("lookup", 200)
    for example in examples:
        assert sum(message["content"].count(example.answer) for message in example.messages) == 1
    assert sum(example.distance_words > 100 for example in examples) > 30
    assert sum(example.distance_words < 50 for example in examples) > 30


def test_corpus_needs_only_the_standard_library() -> None:
    allowed = {"__future__", "collections", "dataclasses", "hashlib", "json", "random", "typing", "demo"}
    for name in ("corpus", "smalltalk", "stories", "tools", "words"):
        for node in ast.walk(ast.parse((DEMO / f"{name}.py").read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] in allowed


@pytest.mark.parametrize("text", UNICODE_TEXTS)
def test_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids[0] == tokenizer.token_to_id("<|bos|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_word_splits_alike_with_and_without_a_space_before_it() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    for word in ("mirako", "apple", "flower", "Mira", "7"):
        bare = tokenizer.encode(word, add_special_tokens=False).tokens
        spaced = tokenizer.encode(f" {word}", add_special_tokens=False).tokens
        assert "".join(spaced) == "Ġ" + "".join(bare)
        assert spaced[-1].removeprefix("Ġ") == bare[-1]


def render(
    messages: Sequence[Mapping[str, object]],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
) -> str:
    """The committed chat template, rendered as transformers does for texts without < > & '."""
    environment = pytest.importorskip("jinja2").Environment(trim_blocks=True, lstrip_blocks=True)

    def refuse(message: str) -> None:
        raise ValueError(message)

    template = environment.from_string((CHECKPOINT / "chat_template.jinja").read_text())
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return template.render(
        messages=messages,
        tools=tools,
        bos_token="<|bos|>",
        add_generation_prompt=add_generation_prompt,
        raise_exception=refuse,
    )


def test_chat_template_renders() -> None:
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    assert config["chat_template"] == (CHECKPOINT / "chat_template.jinja").read_text()
    hello = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hello "}]
    assert render(hello) == "<|bos|><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>"
    answered = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    assert render(answered, False) == "<|bos|><|user|>Hi<|end|><|assistant|>Hello!<|end|>"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert render(parts) == "<|bos|><|user|>Hi<|end|><|assistant|>"
    with pytest.raises(ValueError, match="roles"):
        render([{"role": "function", "content": "x"}])


def test_chat_template_renders_tools() -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "get_weather", "parameters": city}},
        {"type": "function", "function": {"name": "now"}},
    ]
    asked = [{"role": "user", "content": "Weather in Oslo?"}]
    told = "<|bos|><|system|>Tools: get_weather(city) now()<|end|><|user|>Weather in Oslo?<|end|><|assistant|>"
    assert render(asked, tools=tools) == told
    system = {"role": "system", "content": "Be brief."}
    assert "<|system|>Be brief. Tools: get_weather(city) now()<|end|><|user|>" in render([system, *asked], tools=tools)
    for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}'):
        call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        for content in (None, ""):
            called = {"role": "assistant", "content": content, "tool_calls": [call, call]}
            result = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
            written = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
            assert render([*asked, called, result], tools=tools) == (
                f"{told}{written}\n{written}<|end|><|user|><tool_response>sunny</tool_response><|end|><|assistant|>"
            )


def test_training_encodes_as_the_chat_template_does() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from demo.chat import encode

    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    for example in [e for e in [*train_examples(1, 200), *tool_examples(1, 200)] if e.messages]:
        text = render([*example.messages, {"role": "assistant", "content": example.answer}], False, example.tools)
        assert encode(tokenizer, example).ids == tokenizer.encode(text, add_special_tokens=False).ids
