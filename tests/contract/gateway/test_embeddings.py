"""/v1/embeddings and Embed of a gateway in front of an embedding model."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any, cast

import grpc.aio
import httpx
import numpy as np
import pytest
import structlog

from demo import CHECKPOINT
from paceline.third_party import sglang_scheduler_pb2 as sglang
from paceline.third_party import vllm_engine_pb2 as vllm
from paceline.third_party.sglang_scheduler_pb2_grpc import SglangSchedulerStub
from paceline.third_party.vllm_engine_pb2_grpc import VllmEngineStub
from paceline.v1 import common_pb2, inference_pb2
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from services.gateway.embeddings.schema import REFUSED
from tests.contract.gateway.conftest import MODEL, MODEL_INFO, Running, Start, until, until_metrics
from tests.contract.gateway.test_keys import Keys, bearer
from tests.contract.gateway.test_openapi import document, validator
from tests.support.embedding_checkpoints import add_tokenizer

SIZE = 8


def vector(prompt: list[int]) -> np.ndarray:
    return np.array([prompt[i % len(prompt)] + i for i in range(SIZE)], "<f4")


async def embedder(start: Start, settings: dict[str, Any] | None = None, **info: Any) -> Running:
    """A gateway; `info`: fields of EmbeddingInfo."""
    model = common_pb2.ModelInfo()
    model.CopyFrom(MODEL_INFO)
    fields = {"pooling": common_pb2.POOLING_MEAN, "size": SIZE, "normalized": False} | info
    model.embedding.CopyFrom(common_pb2.EmbeddingInfo(**fields))
    running = await start(model=model, settings=settings)
    running.scheduler.vector = lambda prompt: vector(prompt).tobytes()
    return running


async def post(running: Running, body: dict[str, Any], **options: Any) -> httpx.Response:
    return await running.http.post("/v1/embeddings", json=body, **options)


async def test_the_fields_of_an_embedding_request_reach_the_scheduler(start: Start) -> None:
    running = await embedder(start)
    body = {
        "input": [[7, 8], [9]],
        "priority": 2.5,
        "user": "u",
        "cache_salt": "s",
        "deadline_s": 50,
        "request_id": "q",
    }
    answer = (await post(running, body)).json()
    assert answer["id"] == "embd-q"
    assert [one["embedding"] for one in answer["data"]] == [vector(ids).tolist() for ids in ([7, 8], [9])]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 3
    assert answer["timings"]["prompt_n"] + answer["timings"]["cache_n"] == 3
    for submission, ids in zip(running.scheduler.submissions, ([7, 8], [9]), strict=True):
        assert submission.pooling == common_pb2.POOLING_MEAN
        assert submission.sampling == common_pb2.SamplingParams(top_p=1, max_tokens=1)
        assert np.frombuffer(submission.prompt_token_ids, "<i4").tolist() == ids
        assert (submission.priority, submission.tenant, submission.cache_salt) == (2.5, "u", "s")
        assert 0 < submission.deadline_s <= 50
    assert [one.request_id for one in running.scheduler.submissions] == ["q", "q-1"]
    await until_metrics(running, 'paceline_gateway_requests_total{endpoint="embedding",finish_reason="stop"} 2.0')


async def test_a_request_has_its_vector_if_the_scheduler_dies_before_the_ending(start: Start) -> None:
    running = await embedder(start)
    running.scheduler.dies_after_embeddings = True
    assert (await post(running, {"input": [7, 8]})).json()["data"][0]["embedding"] == vector([7, 8]).tolist()
    assert len(running.scheduler.submissions) == 1, "it is not computed again"


async def test_a_request_that_died_without_a_vector_is_submitted_again(start: Start) -> None:
    running = await embedder(start)
    running.scheduler.paused = True

    async def die() -> None:
        await until(lambda: bool(running.scheduler.submissions))
        running.scheduler.break_streams()
        running.scheduler.paused = False

    dying = asyncio.create_task(die())
    assert (await post(running, {"input": [7, 8]})).json()["data"][0]["embedding"] == vector([7, 8]).tolist()
    await dying
    first, again = running.scheduler.submissions
    assert (again.accepted_before, again.pooling, again.prompt_token_ids) == (
        True,
        first.pooling,
        first.prompt_token_ids,
    )


def tokenizer_folder(folder: Path, *, ends_texts: bool, **config: Any) -> Path:
    """The demo's small files, and these keys in tokenizer_config.json."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, folder)
    if ends_texts:
        add_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.parametrize(
    ("config", "ends_texts", "warns"),
    [
        ({"add_eos_token": True}, False, True),
        ({"add_eos_token": True, "eos_token": {"__type": "AddedToken", "content": "<|eos|>"}}, False, True),
        ({"add_eos_token": True}, True, False),
        ({"add_eos_token": False}, False, False),
        ({}, False, False),
    ],
)
async def test_add_eos_token_is_a_warning_if_the_tokenizer_adds_no_eos_token(
    start: Start, tmp_path: Path, config: dict[str, Any], ends_texts: bool, warns: bool
) -> None:
    """Texts become the tokens that transformers makes of them."""
    folder = tokenizer_folder(tmp_path, ends_texts=ends_texts, **config)
    with structlog.testing.capture_logs() as lines:
        running = await embedder(start, {"model": str(folder)})
    warnings = [line for line in lines if "add_eos_token" in line["event"]]
    assert [line["eos_token"] for line in warnings] == ["<|eos|>"] * warns
    await post(running, {"input": "a fox"})
    [submission] = running.scheduler.submissions
    tokens = np.frombuffer(submission.prompt_token_ids, "<i4").tolist()
    transformers = pytest.importorskip("transformers")
    assert tokens == transformers.AutoTokenizer.from_pretrained(folder)("a fox").input_ids
    assert (tokens[-1] == 1) is ends_texts


async def test_a_vector_of_another_size_is_an_error(start: Start) -> None:
    running = await embedder(start)
    running.scheduler.vector = lambda prompt: vector(prompt).tobytes()[:-4]
    answer = await post(running, {"input": [7]})
    assert (answer.status_code, "7 of 8 elements" in answer.text) == (500, True)


@pytest.mark.parametrize(
    ("info", "dimensions", "status"),
    [
        ({}, 4, 400),
        ({"is_matryoshka": True}, 4, 200),
        ({"is_matryoshka": True}, 9, 400),
        ({"is_matryoshka": True, "matryoshka_dimensions": [2, 4]}, 4, 200),
        ({"is_matryoshka": True, "matryoshka_dimensions": [2, 4]}, 3, 400),
        ({"is_matryoshka": True, "matryoshka_dimensions": [2, 16]}, 16, 400),  # the checkpoint is wrong
        ({"is_matryoshka": True, "normalized": True}, 4, 200),
    ],
)
async def test_dimensions(start: Start, info: dict[str, Any], dimensions: int, status: int) -> None:
    answer = await post(await embedder(start, **info), {"input": [7, 8], "dimensions": dimensions})
    assert answer.status_code == status
    if status == 400:
        assert (answer.json()["error"]["param"], answer.json()["error"]["reason"]) == (
            "dimensions",
            "unsupported_value",
        )
        return
    part = vector([7, 8])[:dimensions]
    wanted = part / np.linalg.norm(part) if info.get("normalized") else part
    assert answer.json()["data"][0]["embedding"] == pytest.approx(wanted.tolist(), rel=1e-6)


async def test_the_answer_matches_the_openapi_document(start: Start) -> None:
    running = await embedder(start)
    operation = (api := await document(running))["paths"]["/v1/embeddings"]["post"]
    body_schema = operation["requestBody"]["content"]["application/json"]["schema"]
    answers = operation["responses"]["200"]["content"]["application/json"]["schema"]
    for body in ({"input": "hello"}, {"input": ["b", "c"], "encoding_format": "base64"}, {"input": [[7]]}):
        validator(api, body_schema).validate(body)
        answer = await post(running, cast(dict[str, Any], body))
        assert answer.status_code == 200, answer.text
        validator(api, answers).validate(answer.json())
    strict = await running.openai.embeddings.create(model=MODEL, input="hello", encoding_format="float")
    assert len(strict.data[0].embedding) == SIZE


@pytest.mark.parametrize(("settings", "status"), [({}, 200), ({"max_body_bytes": 2**20}, 413)])
async def test_2048_inputs_of_a_page_each_fit_into_a_body(start: Start, settings: dict[str, Any], status: int) -> None:
    """OpenAI takes 300,000 tokens in a request, which are 1.3 MB of English."""
    running = await embedder(start, settings)
    answer = await post(running, {"input": [[7] * 300] * 2048})  # 1.8 MB
    assert answer.status_code == status, answer.text


async def test_more_inputs_than_fit_at_once_name_the_field(start: Start) -> None:
    running = await embedder(start, {"max_live_requests": 3})
    assert (await post(running, {"input": [[7]] * 3})).status_code == 200
    error = (await post(running, {"input": [[7]] * 4})).json()["error"]
    assert (error["param"], "at most 3" in error["message"]) == ("input", True)


@pytest.mark.parametrize("name", REFUSED)
async def test_fields_that_would_change_vectors_are_refused_by_name(start: Start, name: str) -> None:
    running = await embedder(start)
    error = (await post(running, {"input": "x", name: "other"})).json()["error"]
    assert (error["param"], error["reason"]) == (name, "unsupported_value")
    for neutral in (None, *REFUSED[name]):
        assert (await post(running, {"input": "x", name: neutral})).status_code == 200


async def test_an_idempotency_key_gives_the_same_answer_without_more_work(start: Start) -> None:
    running = await embedder(start)
    first, again = [await post(running, {"input": [7]}, headers={"idempotency-key": "k"}) for _ in range(2)]
    assert first.json()["data"] == again.json()["data"]
    assert first.json()["id"] == again.json()["id"]
    assert len(running.scheduler.submissions) == 1
    other = await post(running, {"input": [8]}, headers={"idempotency-key": "k"})
    assert other.status_code == 422


async def test_keys_and_their_tenants_hold_over_http_and_grpc(start: Start, tmp_path: Any) -> None:
    keys = Keys(tmp_path / "keys.toml")
    secret = keys.add("a")
    running = await embedder(start, {"keys_file": str(keys.path)})
    assert (await post(running, {"input": [7]})).status_code == 401
    assert (await post(running, {"input": [7]}, headers=bearer(secret))).status_code == 200
    named = await post(running, {"input": [7], "tenant": "other"}, headers=bearer(secret))
    assert (named.status_code, named.json()["error"]["param"]) == (403, "tenant")
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        request = inference_pb2.EmbedRequest(token_ids=inference_pb2.TokenIds(ids=[7]))
        call = InferenceServiceStub(channel).Embed(request)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        shown = [("authorization", f"Bearer {secret}")]
        answer = await InferenceServiceStub(channel).Embed(request, metadata=shown)
        assert list(answer.embedding) == vector([7]).tolist()
        request.tenant = "other"
        call = InferenceServiceStub(channel).Embed(request, metadata=shown)
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_grpc_refuses_wrong_embed_requests_by_field(start: Start) -> None:
    running = await embedder(start)
    too_long = inference_pb2.TokenIds(ids=[7] * (MODEL_INFO.max_model_len + 1))
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        own, engine, scheduler = InferenceServiceStub(channel), VllmEngineStub(channel), SglangSchedulerStub(channel)
        calls: list[tuple[Any, str, str]] = [
            (own.Embed(inference_pb2.EmbedRequest(text="")), "text", "empty"),
            (own.Embed(inference_pb2.EmbedRequest(text="x", dimensions=2)), "dimensions", "Matryoshka"),
            (own.Embed(inference_pb2.EmbedRequest(token_ids=too_long)), "token_ids", "maximum"),
            (engine.Embed(vllm.EmbedRequest()), "tokenized.input_ids", "empty"),
            (scheduler.Embed(sglang.EmbedRequest()), "tokenized.input_ids", "empty"),
            (scheduler.Embed(sglang.EmbedRequest(is_cross_encoder=True)), "is_cross_encoder", "is_cross_encoder"),
            (scheduler.Embed(sglang.EmbedRequest(data_parallel_rank=3)), "data_parallel_rank", "must be 0, not 3"),
            (own.Generate(inference_pb2.GenerateRequest(text="x")), "model", "embedding model"),
        ]
        for call, field, why in calls:
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, field
            assert why in await call.details(), field
            assert dict(await call.trailing_metadata())["field"] == field


async def test_an_abort_ends_an_embed(start: Start) -> None:
    running = await embedder(start)
    running.scheduler.paused = True
    tokenized = {"input_ids": [7, 8]}
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        engine, scheduler = VllmEngineStub(channel), SglangSchedulerStub(channel)
        call: Any = engine.Embed(vllm.EmbedRequest(request_id="a", tokenized=cast(Any, tokenized)))
        await until(lambda: len(running.scheduler.submissions) == 1)
        assert (await engine.GetServerInfo(vllm.GetServerInfoRequest())).active_requests == 1
        await engine.Abort(vllm.AbortRequest(request_ids=["other", "a"]))
        assert await call.code() is grpc.StatusCode.CANCELLED
        assert "aborted" in (await call.details() or "")
        call = scheduler.Embed(sglang.EmbedRequest(request_id="a", tokenized=cast(Any, tokenized)))
        await until(lambda: len(running.scheduler.submissions) == 2)
        assert (await scheduler.Abort(sglang.AbortRequest(request_id="a"))).success
        assert await call.code() is grpc.StatusCode.CANCELLED
        assert not (await scheduler.Abort(sglang.AbortRequest(request_id="a"))).success
        assert (await engine.GetServerInfo(vllm.GetServerInfoRequest())).active_requests == 0
    running.scheduler.paused = False
    await until(lambda: not running.scheduler.num_running)


async def test_a_model_that_generates_has_no_embeddings_over_grpc(running: Running) -> None:
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        for call in (
            InferenceServiceStub(channel).Embed(inference_pb2.EmbedRequest(text="x")),
            VllmEngineStub(channel).Embed(vllm.EmbedRequest()),
            SglangSchedulerStub(channel).Embed(sglang.EmbedRequest()),
        ):
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "makes no embeddings" in (await call.details() or "")
