"""Sampling parameters over HTTP and gRPC: what reaches the scheduler, what is refused, how log probabilities look."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from services.client import AsyncPacelineClient, InvalidRequest
from services.gateway.text.tokenizer import TextTokenizer
from tests.contract.gateway.conftest import MODEL, Running, Start
from tests.contract.gateway.fake_scheduler import scripted
from tests.contract.gateway.test_openai import CHAT, CHECKPOINT, errors

ASKED: dict[str, Any] = {
    "min_p": 0.25, "typical_p": 0.5, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -1.5,
    "bad_words": ["fox", [7, 8]], "allowed_token_ids": [9, 3, 3], "logprobs": 2,
}  # fmt: skip


async def test_the_scheduler_gets_the_same_over_http_and_grpc(running: Running) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1, "seed": 1, **ASKED, "logit_bias": {"5": -100, "6": 2.5}}
    assert (await running.http.post("/v1/completions", json=body)).status_code == 200
    chat = {**body, "messages": CHAT, "logprobs": True, "top_logprobs": 2}
    del chat["prompt"]
    assert (await running.http.post("/v1/chat/completions", json=chat)).status_code == 200
    async with AsyncPacelineClient(str(running.addresses.grpc)) as client:
        await client.generate("a", max_tokens=1, seed=1, **ASKED, logit_bias={5: -100, 6: 2.5})
    http, of_chat, grpc = (submission.sampling for submission in running.scheduler.submissions)
    assert http == of_chat == grpc
    assert (http.min_p, http.typical_p, http.repetition_penalty) == (0.25, 0.5, 1.5)
    assert (http.presence_penalty, http.frequency_penalty) == (0.5, -1.5)
    assert dict(http.logit_bias) == {5: -100, 6: 2.5}
    assert np.frombuffer(http.allowed_token_ids, "<i4").tolist() == [3, 9]
    assert np.frombuffer(http.bad_words[-1], "<i4").tolist() == [7, 8]
    assert (http.logprobs, http.num_top_logprobs, http.prompt_logprobs) == (True, 2, False)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("min_p", 1.5, "between 0 and 1"),
        ("typical_p", 0.0, "above 0"),
        ("repetition_penalty", 0.0, "between 0.01 and 100"),
        ("presence_penalty", 2.5, "between -2 and 2"),
        ("frequency_penalty", -3.0, "between -2 and 2"),
        ("logit_bias", {1024: 1.0}, "out of vocabulary: the model has 1024 tokens"),
        ("logit_bias", {-1: 1.0}, "out of vocabulary: the model has 1024 tokens"),
        ("logit_bias", {4: 101.0}, "between -100 and 100"),
        ("bad_words", [""], "1 to 256"),
        ("bad_words", [[1024]], "out of vocabulary: the model has 1024 tokens"),
        ("bad_words", [[1] * 65], "1 to 64 tokens"),
        ("allowed_token_ids", [1024], "out of vocabulary: the model has 1024 tokens"),
        ("allowed_token_ids", [-5], "out of vocabulary: the model has 1024 tokens"),
        ("allowed_token_ids", [5] * 8193, "at most 8192"),
        ("stop_token_ids", [2**30], "out of vocabulary: the model has 1024 tokens"),
        ("logprobs", 21, "between 0 and 20"),
        ("logprobs", -1, "between 0 and 20"),
        ("prompt_logprobs", 21, "between 0 and 20"),
    ],
)
async def test_http_and_grpc_refuse_a_value_out_of_bounds_with_the_limit(
    running: Running, name: str, value: Any, limit: str
) -> None:
    body = {"prompt": "x", name: {str(k): v for k, v in value.items()} if isinstance(value, dict) else value}
    answer = await running.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == name
    assert limit in error["message"]
    async with AsyncPacelineClient(str(running.addresses.grpc)) as client:
        with pytest.raises(InvalidRequest, match=re.escape(limit)) as caught:
            await client.generate("x", **{name: value})
    lists_of_ids = name == "bad_words" and limit == "1 to 64 tokens"  # gRPC has a field of its own for these
    assert caught.value.field == ("sampling.bad_word_ids" if lists_of_ids else f"sampling.{name}")
    assert running.scheduler.submissions == []


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"prompt": [7] * 1000, "n": 4}, 84_000),
        ({"prompt": [[7] * 1000] * 4}, 84_000),
        ({"prompt": [7] * 1000, "n": 3, "best_of": 9}, 0),
    ],
)
async def test_prompt_logprobs_of_all_choices_are_limited(
    running: Running, changes: dict[str, Any], count: int
) -> None:
    body = {"model": MODEL, "max_tokens": 1, "prompt_logprobs": 20, **changes}
    answer = await running.http.post("/v1/completions", json=body)
    assert answer.status_code == (400 if count else 200)
    if count:
        error = answer.json()["error"]
        assert error["param"] == "prompt_logprobs"
        assert str(count) in error["message"]
        assert "65536" in error["message"]
        assert running.scheduler.submissions == []


async def test_an_error_of_a_chat_names_top_logprobs(running: Running) -> None:
    body = {"messages": CHAT, "logprobs": True, "top_logprobs": 21}
    error = (await running.http.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["param"] == "top_logprobs"
    assert "top_logprobs" in error["message"]


@pytest.mark.parametrize("name", ASKED)
async def test_a_beam_search_refuses_sampling_parameters(running: Running, name: str) -> None:
    body = {"model": MODEL, "prompt": "a", "use_beam_search": True, name: ASKED[name]}
    answer = await running.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


async def test_log_probabilities_of_completions(start: Start) -> None:
    tokenizer = TextTokenizer.from_folder(CHECKPOINT)
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    running = await start(next_token=scripted(ids))
    options: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": len(ids), "seed": 2}
    whole = (await running.openai.completions.create(**options, logprobs=2)).choices[0]
    assert whole.logprobs is not None
    pieces = [tokenizer.token_bytes(token).decode() for token in ids]
    assert whole.logprobs.tokens == pieces
    assert "".join(pieces) == whole.text == "one two three"
    assert whole.logprobs.token_logprobs == [-2.0] * len(ids)
    assert whole.logprobs.text_offset == [len("".join(pieces[:i])) for i in range(len(ids))]
    top = whole.logprobs.top_logprobs
    assert top is not None
    assert [entry[piece] for entry, piece in zip(top, pieces, strict=True)] == [-2.0] * len(ids)
    assert all(len(entry) == 2 for entry in top)
    # A stream has the same values.
    streamed: dict[str, list[Any]] = {}
    async for chunk in await running.lenient.completions.create(**options, logprobs=2, stream=True):
        for name, values in (chunk.choices[0].logprobs or whole.logprobs.model_construct()).to_dict().items():
            streamed.setdefault(name, []).extend(values)
    assert streamed == whole.logprobs.to_dict()
    plain = await running.openai.completions.create(**options, logprobs=0)
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.top_logprobs == [{piece: -2.0} for piece in pieces]
    assert (await running.openai.completions.create(**options)).choices[0].logprobs is None


async def test_log_probabilities_of_chats(running: Running) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 6, "seed": 3, "n": 2}
    whole = await running.openai.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    contents = [choice.logprobs.content for choice in whole.choices if choice.logprobs is not None]
    assert [len(content or []) for content in contents] == [6, 6]
    first = (contents[0] or [])[0]
    assert (first.logprob, len(first.top_logprobs)) == (-3.0, 3)
    assert first.top_logprobs[0].token == first.token
    assert b"".join(bytes(token.bytes or []) for token in contents[0] or []).decode(errors="replace")
    streamed: list[list[Any]] = [[], []]
    async for chunk in await running.openai.chat.completions.create(
        **options, logprobs=True, top_logprobs=3, stream=True
    ):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                streamed[choice.index] += choice.logprobs.content or []
    assert [[token.to_dict() for token in part] for part in streamed] == [
        [token.to_dict() for token in content or []] for content in contents
    ]


async def test_answers_with_log_probabilities_are_valid_by_the_published_schema(running: Running) -> None:
    chat = {"messages": CHAT, "max_tokens": 4, "logprobs": True, "top_logprobs": 1}
    body = (await running.http.post("/v1/chat/completions", json=chat)).json()
    assert errors("CreateChatCompletionResponse", body) == []
    response = await running.http.post("/v1/chat/completions", json=chat | {"stream": True})
    for event in re.findall(r"^data: (\{.*)$", response.text, re.MULTILINE):
        assert errors("CreateChatCompletionStreamResponse", json.loads(event)) == []
    completion = {"prompt": "x", "max_tokens": 4, "logprobs": 3}
    body = (await running.http.post("/v1/completions", json=completion)).json()
    assert errors("CreateCompletionResponse", body) == []


async def test_a_stop_string_cuts_log_probabilities_too(start: Start) -> None:
    ids = TextTokenizer.from_folder(CHECKPOINT).encode("one two three four", add_special_tokens=False)
    running = await start(next_token=scripted(ids), tokens_per_step=20)
    options: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 500, "stop": ["o thr"], "logprobs": 1}
    answer = await running.openai.completions.create(**options)
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert len(answer.choices[0].logprobs.tokens or []) == answer.usage.completion_tokens < len(ids)


async def test_a_stop_string_may_be_part_of_the_text(start: Start) -> None:
    ids = TextTokenizer.from_folder(CHECKPOINT).encode("one two three four", add_special_tokens=False)
    running = await start(next_token=scripted(ids))
    body: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 500, "stop": ["o thr"]}
    for include, text in ((False, "one tw"), (True, "one two thr")):
        answer = await running.http.post("/v1/completions", json={**body, "include_stop_str_in_output": include})
        assert answer.json()["choices"][0]["text"] == text


async def test_a_stream_begins_with_the_first_token_even_without_text(start: Start) -> None:
    """The output has only end tokens. They have no text, but each gets an event."""
    running = await start(next_token=scripted([5] * 300), step_s=0.02)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 0}
    async with running.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.aiter_lines()
        events = [json.loads(line[6:]) async for line in take_events(lines, 3)]
        assert running.scheduler.num_running == 1
    assert [event["choices"][0]["text"] for event in events] == ["", "", ""]
    assert all(event["choices"][0]["logprobs"]["tokens"] for event in events)


async def take_events(lines: AsyncIterator[str], count: int) -> AsyncIterator[str]:
    async for line in lines:
        if line.startswith("data: "):
            yield line
            count -= 1
            if not count:
                return


async def test_a_seed_of_minus_one_means_a_random_seed(running: Running) -> None:
    for _ in range(2):
        await running.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "seed": -1, "max_tokens": 2})
    first, second = running.scheduler.submissions
    assert first.sampling.seed != second.sampling.seed


async def test_the_best_of_several_shows_log_probabilities_only_when_asked(running: Running) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 4, "best_of": 2}
    assert (await running.openai.completions.create(**options)).choices[0].logprobs is None
    assert (await running.openai.completions.create(**options, logprobs=1)).choices[0].logprobs is not None


async def test_log_probabilities_over_grpc(running: Running) -> None:
    async with AsyncPacelineClient(str(running.addresses.grpc)) as client:
        result = await client.generate("x", max_tokens=5, seed=4, logprobs=2)
        assert [token.logprob for token in result.logprobs] == [-4.0] * 5
        assert [token.top[0] for token in result.logprobs] == [(token, -4.0) for token in result.token_ids]
        assert [len(token.top) for token in result.logprobs] == [2] * 5
        assert (await client.generate("x", max_tokens=5)).logprobs == ()


async def test_log_probabilities_survive_a_restart_of_the_scheduler(start: Start) -> None:
    running = await start(step_s=0.005)
    async with AsyncPacelineClient(str(running.addresses.grpc)) as client:
        pieces = []
        async for piece in client.stream("x", max_tokens=300, seed=4, logprobs=1, ignore_eos=True):
            pieces.append(piece)
            if len(pieces) == 5:
                running.scheduler.break_streams()
    assert len(running.scheduler.submissions) == 2
    assert sum(len(piece.logprobs) for piece in pieces) == sum(len(piece.token_ids) for piece in pieces) == 300
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)


PROMPT = [7, 8, 9, 7, 300]


async def test_log_probabilities_of_prompts_have_the_shape_of_vllm(running: Running) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "n": 2, "prompt_logprobs": 2}
    answer = (await running.http.post("/v1/completions", json=body)).json()
    text = TextTokenizer.from_folder(CHECKPOINT).token_bytes
    for choice in answer["choices"]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        assert len(rest) == 4
        for i, entries in enumerate(rest, start=1):
            own = entries[str(PROMPT[i])]
            assert (own["logprob"], own["rank"]) == (-i / 8, i)
            assert own["decoded_token"] == text(PROMPT[i]).decode()
            assert {str(i), str(i + 1)} <= entries.keys()
            assert entries[str(i + 1)]["rank"] == 2
    assert errors("CreateCompletionResponse", answer) == []
    asked = [s.sampling.prompt_logprobs for s in running.scheduler.submissions]
    assert asked == [True, False], "one prompt is scored once"
    chat = await running.http.post(
        "/v1/chat/completions", json={"messages": CHAT, "max_tokens": 2, "prompt_logprobs": 0}
    )
    assert len(chat.json()["prompt_logprobs"]) == chat.json()["usage"]["prompt_tokens"]
    single = {"prompt": [7], "max_tokens": 1, "prompt_logprobs": 1}
    assert (await running.http.post("/v1/completions", json=single)).json()["choices"][0]["prompt_logprobs"] == [None]
    plain = (await running.http.post("/v1/completions", json={"prompt": [7, 8], "max_tokens": 1})).json()
    assert plain["choices"][0]["prompt_logprobs"] is None


async def test_log_probabilities_of_prompts_over_grpc_come_first_and_once(start: Start) -> None:
    running = await start(step_s=0.005)
    async with AsyncPacelineClient(str(running.addresses.grpc)) as client:
        pieces = []
        async for piece in client.stream(token_ids=PROMPT, max_tokens=300, prompt_logprobs=2, ignore_eos=True):
            pieces.append(piece)
            if len(pieces) == 3:
                running.scheduler.break_streams()
    first, *others = pieces
    assert [token.logprob for token in first.prompt_logprobs] == [-1 / 8, -2 / 8, -3 / 8, -4 / 8]
    assert first.prompt_logprobs[2].top == ((3, 0.0), (4, -0.25))
    assert first.token_ids
    assert not any(piece.prompt_logprobs for piece in others)
    assert [s.sampling.prompt_logprobs for s in running.scheduler.submissions] == [True, False], (
        "the prompt is scored once"
    )
