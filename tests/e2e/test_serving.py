"""What a user does with a running server: the openai client, gRPC, many at once, bad input."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast

import httpx
import openai
import pytest

from demo import CHECKPOINT
from tests.support import load, reference
from tests.support.stack import Stack

MODEL = "paceline-demo"
VOCAB = 1000


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{stack.url}/v1",
        api_key="none",
        _strict_response_validation=True,
        http_client=cast(Any, httpx.Client(trust_env=False, timeout=200)),
        max_retries=0,
    ) as client:
        yield client


def expected_text(prompt: list[int], max_tokens: int) -> str:
    tokens = reference.greedy(CHECKPOINT, prompt, max_tokens)
    return str(reference.tokenizer(str(CHECKPOINT)).decode(tokens, skip_special_tokens=True))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_completion_equals_transformers(client: openai.OpenAI) -> None:
    text = "Once upon a time"
    prompt = reference.tokenizer(str(CHECKPOINT))(text)["input_ids"]
    answer = client.completions.create(
        model=MODEL, prompt=text, max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == expected_text(prompt, 40)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 40)


def test_chat_streams_the_same_text_as_it_answers(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Repeat after me: blue fox seven"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=60)
    pieces, usage = [], None
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_completion_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
    ):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_beam_search_is_that_of_transformers(client: openai.OpenAI) -> None:
    prompt = reference.tokenizer(str(CHECKPOINT))("Once upon a time there was a")["input_ids"]
    for width, wanted, penalty, early in ((4, 4, 1.0, False), (3, 1, 2.0, "never"), (2, 2, 0.0, True)):
        options = {"use_beam_search": True, "best_of": width, "length_penalty": penalty, "early_stopping": early}
        answer = client.completions.create(model=MODEL, prompt=prompt, n=wanted, max_tokens=24, extra_body=options)
        expected = reference.beam_search(
            CHECKPOINT,
            prompt,
            24,
            num_beams=width,
            num_return_sequences=wanted,
            length_penalty=penalty,
            early_stopping=early,
        )
        decode = reference.tokenizer(str(CHECKPOINT)).decode
        assert [choice.text for choice in answer.choices] == [decode(ids, skip_special_tokens=True) for ids in expected]


def test_samples_of_one_prompt_are_those_of_their_seeds(client: openai.OpenAI) -> None:
    """Samples fork from the first one inside a block, because the prompt does not fill its last block. Each sample is
    the same as alone."""
    options: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 30, "temperature": 1.0}
    together = client.completions.create(**options, n=4, seed=7)
    alone = [client.completions.create(**options, seed=7 + i).choices[0].text for i in range(4)]
    assert [choice.text for choice in together.choices] == alone
    assert len(set(alone)) > 1
    best = client.completions.create(**options, seed=7, extra_body={"best_of": 4})
    assert best.choices[0].text in alone


def test_a_repeated_prompt_is_served_from_the_cache(client: openai.OpenAI) -> None:
    prompt = [random.Random(1).randrange(8, VOCAB) for _ in range(100)]
    first, second = (
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0) for _ in range(2)
    )
    assert second.choices[0].text == first.choices[0].text
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == 99  # all but the last one


def test_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = expected_text([50, 60, 70], 40)
    stop = whole[10:13]
    answer = client.completions.create(
        model=MODEL, prompt=[50, 60, 70], max_tokens=40, temperature=0, stop=stop, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


async def test_seeded_sampling_is_the_same_alone_and_among_32(stack: Stack) -> None:
    options = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    wanted = [load.Wanted(prompt, 24) for prompt in load.random_prompts(32, 3, VOCAB)]
    together = await load.stream_all(stack.url, wanted, **options)
    [alone] = await load.stream_all(stack.url, wanted[5:6], **options)
    assert not together[5].errors
    assert alone.text == together[5].text


async def test_a_third_of_200_requests_at_once_may_be_cancelled(stack: Stack) -> None:
    rng = random.Random(4)
    wanted = [
        load.Wanted(prompt, rng.randrange(1, 60), cancel_after=rng.randrange(1, 20) if rng.random() < 1 / 3 else None)
        for prompt in load.random_prompts(200, 4, VOCAB, longest=60)
    ]
    got = await load.stream_all(stack.url, wanted)
    finished = [(ask, answer) for ask, answer in zip(wanted, got, strict=True) if not answer.cancelled]
    assert len(finished) < 200
    assert not [answer.errors for answer in got if answer.errors]
    one_by_one = [(await load.stream_all(stack.url, [ask]))[0] for ask, _ in finished]
    for (ask, answer), alone in zip(finished, one_by_one, strict=True):
        assert answer.text == alone.text
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == ask.max_tokens
    for ask, answer in finished[:15]:  # the reference is slow; the model tests compare every case with it
        assert answer.text == expected_text(ask.prompt, ask.max_tokens)
    stack.wait_metric("paceline_scheduler_num_requests_running", 0)
    stack.wait_metric("paceline_scheduler_kv_cache_usage_ratio", 0)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [10**6]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [5] * 5000}, 400, None),
        ({"prompt": [5], "max_tokens": 10**6}, 400, "max_tokens"),
        ({"prompt": [5], "max_tokens": -1}, 400, "max_tokens"),
        ({"prompt": [5], "max_tokens": True}, 400, "max_tokens"),
        ({"prompt": [5], "temperature": -0.5}, 400, "temperature"),
        ({"prompt": [5], "temperature": "hot"}, 400, "temperature"),
        ({"prompt": [5], "top_p": 2}, 400, "top_p"),
        ({"prompt": [5], "n": 65}, 400, "n"),
        ({"prompt": [5], "model": "unknown"}, 404, "model"),
    ],
)
def test_bad_requests_name_the_field(stack: Stack, body: dict, status: int, param: str | None) -> None:
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, trust_env=False, timeout=200)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"]
    if param:
        assert error["param"] == param


def test_broken_json_and_huge_bodies_are_refused(stack: Stack) -> None:
    url = f"{stack.url}/v1/completions"
    broken = httpx.post(url, content=b'{"prompt": ', trust_env=False, timeout=200)
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "BadRequestError")
    try:
        huge = httpx.post(url, content=b"x" * (50 * 2**20), trust_env=False, timeout=200)
        assert huge.status_code == 413
    except httpx.NetworkError:
        pass  # the server may close the connection before the client has sent all of the body
    assert httpx.get(f"{stack.url}/health", trust_env=False, timeout=200).status_code == 200


def test_health_ready_and_metrics_answer_head(stack: Stack) -> None:
    with httpx.Client(base_url=stack.url, trust_env=False) as client:
        for path in ("/health", "/ready", "/metrics"):
            assert client.head(path).status_code == 200
            assert client.put(path).headers["allow"] in ("GET, HEAD", "HEAD, GET")
