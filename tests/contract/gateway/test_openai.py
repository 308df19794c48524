"""The OpenAI API as its own SDK and its own schema see it."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
from openai.types.chat import ChatCompletionChunk
from openai.types.completion import Completion

from services.gateway.text.tokenizer import TextTokenizer
from tests.contract.gateway.conftest import MODEL, Running, Start
from tests.contract.gateway.fake_scheduler import scripted

CHECKPOINT = Path(__file__).parents[3] / "demo" / "checkpoint"
SPEC = Path(__file__).parents[2] / "support" / "openai-subset.json.gz"
CHAT: list[Any] = [{"role": "user", "content": "hello"}]
USAGE: Any = {"include_usage": True}


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_folder(CHECKPOINT)


async def test_models(running: Running) -> None:
    models = [model async for model in running.openai.models.list()]
    assert [model.id for model in models] == [MODEL]
    assert (await running.openai.models.retrieve(MODEL)).owned_by == "paceline"


@pytest.mark.parametrize("prompt", ["once upon a time", ["a", "b c"], [7, 8, 9], [[7, 8], [9]]])
async def test_completions_stream_what_they_return_whole(running: Running, prompt: Any) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "seed": 3}
    whole = await running.openai.completions.create(**options)
    chunks = [c async for c in await running.lenient.completions.create(**options, stream=True, stream_options=USAGE)]
    for chunk in chunks:
        data: Any = chunk.to_dict()
        for choice in data["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(data)
    texts, reasons = [""] * len(whole.choices), [""] * len(whole.choices)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices] == ["length"] * len(whole.choices)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12 * len(whole.choices)
    assert whole.usage.prompt_tokens_details is not None
    cached = [min(3, len(p) // 4) for p in (s.prompt_token_ids for s in running.scheduler.submissions)]
    assert whole.usage.prompt_tokens_details.cached_tokens == sum(cached[: len(whole.choices)])


async def test_chats_stream_what_they_return_whole(running: Running) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_completion_tokens": 12, "temperature": 0}
    whole = await running.openai.chat.completions.create(**options)
    chunks = [
        chunk
        async for chunk in await running.openai.chat.completions.create(**options, stream=True, stream_options=USAGE)
    ]
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"


async def test_typed_parts_are_the_same_chat(running: Running) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    typed = await running.openai.chat.completions.create(messages=parts, **options)
    plain = await running.openai.chat.completions.create(messages=CHAT, **options)
    assert typed.choices[0].message.content == plain.choices[0].message.content


async def test_continuous_usage_counts_up(running: Running) -> None:
    stream = await running.openai.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=6,
        stream=True,
        stream_options=cast(Any, {"include_usage": True, "continuous_usage_stats": True}),
    )
    usages = [chunk.usage async for chunk in stream]
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert len(counts) == len(usages)
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 6)


async def test_the_end_of_sequence_has_no_text(start: Start, tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("all is well", add_special_tokens=False)
    running = await start(next_token=scripted([*ids, 5]))
    answer = await running.openai.completions.create(model=MODEL, prompt="x", max_tokens=50)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("all is well", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids) + 1
    ignored = await running.openai.completions.create(
        model=MODEL, prompt="x", max_tokens=2 * len(ids) + 2, extra_body={"ignore_eos": True}
    )
    assert (ignored.choices[0].text, ignored.choices[0].finish_reason) == ("all is well" * 2, "length")


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_strings_end_the_request_at_the_scheduler(
    start: Start, tokenizer: TextTokenizer, stream: bool
) -> None:
    ids = tokenizer.encode("one two three four five six", add_special_tokens=False)
    running = await start(next_token=scripted(ids), step_s=0.002)
    options: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 1000, "stop": ["ee fo", "zzz"]}
    if stream:
        chunks = [
            c async for c in await running.lenient.completions.create(**options, stream=True, stream_options=USAGE)
        ]
        text = "".join(c.choices[0].text for c in chunks if c.choices)
        reason, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
    else:
        whole = await running.openai.completions.create(**options)
        text, reason, usage = whole.choices[0].text, whole.choices[0].finish_reason, whole.usage
    assert (text, reason) == ("one two thr", "stop")
    assert usage is not None
    assert usage.completion_tokens < len(ids)
    # The scheduler was told to end the request, and has reported this count.
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == min(3, usage.prompt_tokens)
    assert len(running.scheduler.cancels) == 1
    assert running.scheduler.num_running == 0


async def test_stop_token_ids(start: Start, tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    running = await start(next_token=scripted(ids))
    answer = await running.openai.completions.create(
        model=MODEL, prompt="x", max_tokens=100, extra_body={"stop_token_ids": [ids[1]]}
    )
    assert answer.choices[0].text == tokenizer.detokenizer().push(ids[:1])
    assert answer.choices[0].finish_reason == "stop"


async def test_the_scheduler_gets_what_was_asked_for(running: Running) -> None:
    await running.openai.completions.create(
        model=MODEL,
        prompt=[7, 8],
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        seed=11,
        extra_body={"top_k": 4, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9]},
        extra_headers={"X-Request-ID": "abc"},
    )
    (submission,) = running.scheduler.submissions
    sampling = submission.sampling
    assert submission.request_id == "abc"
    assert (round(sampling.temperature, 3), round(sampling.top_p, 3), sampling.top_k) == (0.5, 0.9, 4)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (11, 5, 2)
    assert sampling.ignore_eos
    assert list(sampling.stop_token_ids) == [9]


async def test_chats_may_use_the_rest_of_the_context(start: Start) -> None:
    running = await start(tokens_per_step=64)
    whole = await running.openai.chat.completions.create(model=MODEL, messages=CHAT, extra_body={"ignore_eos": True})
    assert whole.usage is not None
    assert whole.usage.total_tokens == 2048


async def test_tokens_that_wait_come_in_one_chunk(start: Start) -> None:
    running = await start(tokens_per_step=50)
    stream = await running.lenient.completions.create(model=MODEL, prompt="x", max_tokens=200, stream=True)
    assert len([chunk async for chunk in stream]) <= 5


async def test_tokenize_and_back(running: Running) -> None:
    tokens = (await running.http.post("/tokenize", json={"model": MODEL, "prompt": "all is well"})).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 2048
    text = (await running.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()["prompt"]
    assert text == "<|bos|>all is well"
    chat = (await running.http.post("/tokenize", json={"messages": CHAT})).json()["tokens"]
    for path in ("/tokenize", "/v1/chat/completions"):
        refused = await running.http.post(path, json={"messages": CHAT, "add_special_tokens": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "add_special_tokens")
        assert refused.json()["error"]["message"].startswith("add_special_tokens: is not supported for chats")
    assert chat[:2] == [0, 3]
    answer = await running.http.post("/detokenize", json={"tokens": [5] * (2**17 + 1)})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tokens"
    assert "at most 131072" in answer.json()["error"]["message"]


# -- the published schema


def _nullable(node: dict[str, Any]) -> dict[str, Any]:
    """The document says 3.1 but has 3.0's `nullable` in places, which JSON Schema does not know."""
    return {"anyOf": [node, {"type": "null"}]} if node.get("nullable") is True else node


def validator(schema_name: str) -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    spec = json.loads(gzip.decompress(SPEC.read_bytes()), object_hook=_nullable)
    return jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{schema_name}", "components": spec["components"]}
    )


def errors(schema_name: str, body: Any) -> list[str]:
    return [error.message for error in validator(schema_name).iter_errors(body)]


async def test_answers_are_valid_by_the_published_schema(running: Running) -> None:
    chat = {"model": MODEL, "messages": CHAT, "max_tokens": 4}
    body = (await running.http.post("/v1/chat/completions", json=chat)).json()
    assert errors("CreateChatCompletionResponse", body) == []
    body = (await running.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})).json()
    assert errors("CreateCompletionResponse", body) == []
    assert errors("ListModelsResponse", (await running.http.get("/v1/models")).json()) == []
    assert errors("Model", (await running.http.get(f"/v1/models/{MODEL}")).json()) == []


async def test_chunks_are_valid_by_the_published_schema(running: Running) -> None:
    request = {"messages": CHAT, "max_tokens": 4, "stream": True, "stream_options": USAGE}
    response = await running.http.post("/v1/chat/completions", json=request)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = re.findall(r"^data: (.*)$", response.text, re.MULTILINE)
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        assert errors("CreateChatCompletionStreamResponse", json.loads(event)) == []
