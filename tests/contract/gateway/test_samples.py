"""Several samples of one prompt; tenants, priorities, deadlines and cache fields of a request; beam search."""

from __future__ import annotations

import json
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from paceline.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from services.client import AsyncPacelineClient, Retention
from services.gateway.text.tokenizer import TextTokenizer
from tests.contract.gateway.conftest import MODEL, Running, Start
from tests.contract.gateway.test_openai import CHECKPOINT

CHAT: list[Any] = [{"role": "user", "content": "hello"}]


async def test_n_samples_fork_from_the_first(running: Running) -> None:
    answer = await running.openai.chat.completions.create(
        model=MODEL, messages=CHAT, n=3, seed=2**64 - 1, max_tokens=5, extra_headers={"X-Request-ID": "abc"}
    )
    first, *others = running.scheduler.submissions
    assert [s.request_id for s in (first, *others)] == ["abc", "abc.1", "abc.2"]
    assert [s.sampling.seed for s in (first, *others)] == [2**64 - 1, 0, 1]
    assert first.fork_of == 0
    assert [s.fork_of for s in others] == [first.handle] * 2
    assert {s.prompt_token_ids for s in others} == {first.prompt_token_ids}
    assert not any(s.sampling.logprobs for s in (first, *others))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(first.prompt_token_ids) // 4, "the prompt counts once"
    assert answer.usage.completion_tokens == 15


@pytest.mark.parametrize("stream", [False, True])
async def test_all_sequences_have_the_id_of_the_answer(running: Running, stream: bool) -> None:
    """`paceline explain` finds the samples by this id, and by the X-Request-ID of the answer."""
    for path, prompt in (("completions", {"prompt": ["a", "b"]}), ("chat/completions", {"messages": CHAT})):
        running.scheduler.submissions.clear()
        body = {"model": MODEL, "n": 2, "max_tokens": 3, "stream": stream} | prompt
        answer = await running.http.post(f"/v1/{path}", json=body, headers={"X-Request-ID": "abc"})
        data = answer.text.splitlines()[0].removeprefix("data: ") if stream else answer.text
        answer_id = json.loads(data)["id"]
        assert answer_id == ("chatcmpl-abc" if "messages" in body else "cmpl-abc")
        assert {s.answer_id for s in running.scheduler.submissions} == {answer_id}
        suffixes = ["", ".1"] if "messages" in body else ["", ".1", "-1", "-1.1"]
        assert [s.request_id for s in running.scheduler.submissions] == [f"abc{suffix}" for suffix in suffixes]
        assert answer.headers["x-request-id"] == "abc"


async def test_samples_of_several_prompts_stream_what_they_return_whole(running: Running) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": ["a", "b c"], "n": 2, "seed": 3, "max_tokens": 6}
    whole = await running.openai.completions.create(**options)
    texts = [""] * 4
    async for chunk in await running.lenient.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    handles = [s.handle for s in running.scheduler.submissions]
    assert [s.fork_of for s in running.scheduler.submissions[:4]] == [0, handles[0], 0, handles[2]]


async def test_best_of_answers_with_the_likeliest_and_counts_all(running: Running) -> None:
    """The larger the seed's last digit, the lower are the fake scheduler's log probabilities."""
    options: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 4}
    answer = await running.openai.completions.create(**options, seed=8, best_of=4, n=2)
    alone = [await running.openai.completions.create(**options, seed=seed) for seed in (10, 11)]
    assert [choice.text for choice in answer.choices] == [other.choices[0].text for other in alone]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert all(s.sampling.logprobs for s in running.scheduler.submissions[:4])


async def test_the_best_of_several_cannot_be_streamed(running: Running) -> None:
    body = {"model": MODEL, "prompt": "x", "best_of": 2, "stream": True}
    answer = await running.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "best_of"


async def test_priority_tenant_and_deadline_reach_the_scheduler(running: Running) -> None:
    metadata = {"priority": 2.5, "tenant": "team", "deadline_s": 30.0}
    await running.openai.completions.create(model=MODEL, prompt="a", max_tokens=1, extra_body=metadata)
    await running.openai.completions.create(model=MODEL, prompt="a", max_tokens=1, user="someone")
    async with grpc.aio.insecure_channel(str(running.addresses.grpc)) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(text="a", priority=-1, tenant="other", deadline_s=5)
        request.sampling.max_tokens = 1
        assert [response async for response in stub.Generate(request)]
    seen = [(s.priority, s.tenant, s.deadline_s) for s in running.scheduler.submissions]
    assert seen == [(2.5, "team", 30.0), (0.0, "someone", 0.0), (-1.0, "other", 5.0)]


async def test_cache_salt_and_retention_reach_the_scheduler(running: Running) -> None:
    kept = {"cache_salt": "pepper", "cache_retention": [{"end": 8, "priority": 90}, {"start": 8, "priority": 0}]}
    await running.openai.completions.create(model=MODEL, prompt="a", max_tokens=1, extra_body=kept)
    async with AsyncPacelineClient(str(running.addresses.grpc)) as client:
        await client.generate("a", max_tokens=1, cache_salt="salt", cache_retention=[Retention(5, duration_ms=100)])
    seen = [
        (s.cache_salt, [(r.start, r.end, r.priority, r.duration_ms) for r in s.cache_retention])
        for s in running.scheduler.submissions
    ]
    assert seen == [("pepper", [(0, 8, 90, 0), (8, 0, 0, 0)]), ("salt", [(0, 0, 5, 100)])]


def hypotheses(*outputs: list[int]) -> inference_pb2.Ending:
    ending = inference_pb2.Ending(reason=common_pb2.FINISH_REASON_STOP, cached_tokens=2)
    for i, tokens in enumerate(outputs):
        reason = common_pb2.FINISH_REASON_LENGTH if i else common_pb2.FINISH_REASON_STOP
        ending.hypotheses.add(token_ids=np.array(tokens, "<i4").tobytes(), score=-0.5 - i, reason=reason)
    return ending


async def test_beam_search_over_http_and_grpc(start: Start) -> None:
    running = await start()
    tokenizer = TextTokenizer.from_folder(CHECKPOINT)
    outputs = [tokenizer.encode(text, add_special_tokens=False) for text in ("one two", "three")]
    running.scheduler.reject = lambda submission: hypotheses(*outputs)
    extra = {"use_beam_search": True, "best_of": 3, "length_penalty": 0.5, "early_stopping": "never"}
    answer = await running.openai.completions.create(model=MODEL, prompt="a", max_tokens=9, n=2, extra_body=extra)
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [
        ("one two", "stop"),
        ("three", "length"),
    ]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(map(len, outputs))
    expected = inference_pb2.BeamOptions(
        width=3, num_return=2, length_penalty=0.5, early_stopping=inference_pb2.EARLY_STOPPING_NEVER
    )
    async with grpc.aio.insecure_channel(str(running.addresses.grpc)) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(text="a", beam=expected)
        (response,) = [response async for response in stub.Generate(request)]
    assert [found.text for found in response.hypotheses] == ["one two", "three"]
    assert [found.score for found in response.hypotheses] == [-0.5, -1.5]
    assert (response.text, list(response.token_ids)) == ("one two", outputs[0])
    assert response.finish_reason == common_pb2.FINISH_REASON_STOP
    assert [submission.beam for submission in running.scheduler.submissions] == [expected, expected]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"stream": True}, "stream"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_k": 5}, "top_k"),
        ({"stop": ["x"]}, "stop"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"n": 4, "best_of": 3}, "best_of"),
        ({"use_beam_search": False, "length_penalty": 0.5}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
)
async def test_fields_that_beam_search_does_not_support_are_refused(
    running: Running, body: dict[str, Any], field: str
) -> None:
    whole = {"model": MODEL, "prompt": "a", "use_beam_search": True, **body}
    answer = await running.http.post("/v1/completions", json=whole)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("beam", "field"),
    [
        (inference_pb2.BeamOptions(), "beam.width"),
        (inference_pb2.BeamOptions(width=65), "beam.width"),
        (inference_pb2.BeamOptions(width=2, num_return=3), "beam.num_return"),
        (inference_pb2.BeamOptions(width=2, length_penalty=float("nan")), "length_penalty"),
        (inference_pb2.BeamOptions(width=2, early_stopping=9), "early_stopping"),  # type: ignore[arg-type]
    ],
)
async def test_bad_beam_options_over_grpc_are_refused_by_name(
    running: Running, beam: inference_pb2.BeamOptions, field: str
) -> None:
    async with grpc.aio.insecure_channel(str(running.addresses.grpc)) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [response async for response in stub.Generate(inference_pb2.GenerateRequest(text="a", beam=beam))]
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert field in (caught.value.details() or "")
