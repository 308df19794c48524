"""Embedding models behind the real processes: the unmodified openai package, gRPC, kills in the midst, refusals."""

from __future__ import annotations

import base64
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
from tokenizers import Tokenizer

from examples.running_a_batch import run_batch
from paceline.third_party import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc
from paceline.v1 import inference_pb2, inference_pb2_grpc
from services.client import InvalidRequest, PacelineClient
from tests.support import embedding_checkpoints as checkpoints
from tests.support.stack import Stack

MAX_LEN = 400
NAME = "embedder"
WORKER = ["--threads", "1", "--num-blocks", "600", "--max-batched-tokens", "128", "--max-num-seqs", "16"]
TEXTS = ["Once upon a time there was a fox.", "A fox!", "The sun is warm, and the fox sleeps. " * 9]


class Server:
    """A stack with an embedding model, and a client of it."""

    def __init__(self, stack: Stack, pooling: checkpoints.Pooling, **config: Any) -> None:
        self.folder = checkpoints.make(
            "qwen3", stack.folder / NAME, pooling, vocab_size=1024, max_position_embeddings=MAX_LEN, **config
        )
        checkpoints.add_tokenizer(self.folder)
        self.pooling, self.stack = pooling, stack
        stack.model, stack.worker_flags = str(self.folder), WORKER
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self.client = openai.OpenAI(
            base_url=f"{stack.url}/v1", api_key="none", max_retries=0,
            http_client=cast(Any, httpx.Client(trust_env=False, timeout=200)),
        )  # fmt: skip

    def expected(self, given: str | list[int]) -> npt.NDArray[np.float32]:
        tokens = self.tokenizer.encode(given).ids if isinstance(given, str) else given
        return checkpoints.expected(self.folder, tokens, self.pooling)

    def post(self, status: int, path: str = "/v1/embeddings", **body: Any) -> Any:
        answer = httpx.post(f"{self.stack.url}{path}", json=body, trust_env=False, timeout=100)
        assert answer.status_code == status, answer.text
        return answer.json() if status == 200 else answer.json()["error"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    stack = Stack(tmp_path_factory.mktemp("embeddings"))
    try:
        server = Server(stack, "last", is_matryoshka=True)
        stack.up()
        with server.client:
            yield server
    finally:
        stack.down()


def near(vector: Any, wanted: npt.NDArray[np.float32]) -> bool:
    return bool(np.abs(np.asarray(vector, np.float32) - wanted).max() < 1e-4)


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
def test_the_openai_package_gets_transformers_vectors(server: Server, encoding: Any) -> None:
    """By default the package asks for base64, and decodes it. The second time the prefixes are cached."""
    ids = [server.tokenizer.encode(text).ids for text in TEXTS]
    assert all(tokens[-1] == 1 for tokens in ids), "the tokenizer ends a text"
    for given in (TEXTS[0], TEXTS, ids[0], ids, TEXTS):
        options = {} if encoding is None else {"encoding_format": encoding}
        answer = server.client.embeddings.create(model=NAME, input=given, **options)
        asked = given if isinstance(given[0], str | list) and isinstance(given, list) else [given]
        assert [one.index for one in answer.data] == list(range(len(asked)))
        for one, text in zip(answer.data, asked, strict=True):
            vector: Any = one.embedding
            if encoding == "base64":
                vector = np.frombuffer(base64.b64decode(vector), "<f4")
            assert near(vector, server.expected(cast(Any, text)))
        num_tokens = sum(len(one) if isinstance(one, list) else len(server.tokenizer.encode(one).ids) for one in asked)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    assert answer.usage.model_extra is not None
    assert answer.usage.model_extra["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_batch_of_inputs_has_the_same_vectors(server: Server) -> None:
    lines: dict[str, Any] = {
        f"line-{i}": {"model": NAME, "input": [text, "A fox!"]} for i, text in enumerate(TEXTS * 4)
    }
    got = run_batch(server.client, lines | {"bad": {"model": NAME, "input": "x", "dimensions": 0}}, "/v1/embeddings")
    assert got.pop("bad")["status_code"] == 400
    assert got.keys() == lines.keys()
    for name, answer in got.items():
        for one, text in zip(answer["body"]["data"], lines[name]["input"], strict=True):
            assert near(one["embedding"], server.expected(text))
    [batch] = server.client.batches.list(limit=1).data
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(answer["body"]["usage"]["prompt_tokens"] for answer in got.values())
    assert batch.usage.output_tokens == 0


def test_dimensions_cut_and_normalize(server: Server) -> None:
    answer = server.client.embeddings.create(model=NAME, input=TEXTS, dimensions=10)
    for one, text in zip(answer.data, TEXTS, strict=True):
        part = server.expected(text)[:10]
        assert near(one.embedding, part / np.linalg.norm(part))
    for dimensions in (0, 65):
        assert server.post(400, model=NAME, input="x", dimensions=dimensions)["param"] == "dimensions"


def test_truncation_keeps_the_special_tokens(server: Server) -> None:
    ids = server.tokenizer.encode(TEXTS[2]).ids
    for fields, kept in (
        ({}, [ids[0], *ids[-19:]]),
        ({"truncation_side": "left"}, [ids[0], *ids[-19:]]),
        ({"truncation_side": "right"}, [*ids[:19], 1]),
    ):
        shown = server.post(200, input=TEXTS[2], truncate_prompt_tokens=20, **fields)
        assert shown["usage"]["prompt_tokens"] == 20
        assert near(shown["data"][0]["embedding"], server.expected(kept))
    assert server.post(200, input=TEXTS[2] * 9, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == MAX_LEN
    bare = server.tokenizer.encode(TEXTS[1], add_special_tokens=False).ids
    assert near(
        server.post(200, input=TEXTS[1], add_special_tokens=False)["data"][0]["embedding"], server.expected(bare)
    )


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"input": [5] * (MAX_LEN + 1)}, "input", f"maximum context length is {MAX_LEN} tokens"),
        ({"input": [[5], [5] * (MAX_LEN + 1)]}, "input", f"maximum context length is {MAX_LEN} tokens"),
        ({"input": TEXTS[2] * 9}, "input", f"maximum context length is {MAX_LEN} tokens"),
        ({"input": [[5]] * 2049}, "input", "at most 2048 are possible"),
        ({"input": [1024]}, "input", "out of vocabulary"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": [[]]}, "input", "empty"),
        ({}, "input", "input"),
        ({"input": "x", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "too few"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "between 1 and"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"input": "x", "priority": "high"}, "priority", "priority"),
        ({"input": "x", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
    ],
)
def test_bad_input_is_a_400_that_names_the_field(server: Server, body: dict[str, Any], param: str, why: str) -> None:
    error = server.post(400, **body)
    assert (error["param"], why in error["message"]) == (param, True), error


def test_an_input_may_be_as_long_as_the_context(server: Server) -> None:
    full = [5 + i % 900 for i in range(MAX_LEN)]
    assert near(server.post(200, input=full)["data"][0]["embedding"], server.expected(full))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_an_embedding_server_generates_nothing(server: Server, path: str, body: dict[str, Any]) -> None:
    error = server.post(400, path, **body)
    assert "is an embedding model, which generates no text: use /v1/embeddings" in error["message"]


def test_a_server_that_generates_has_no_embeddings(stack: Stack) -> None:
    answer = httpx.post(f"{stack.url}/v1/embeddings", json={"input": "x"}, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (400, "no_embedding_model")


def test_grpc_gives_the_same_vectors(server: Server) -> None:
    wanted, ids = server.expected(TEXTS[0]), server.tokenizer.encode(TEXTS[0]).ids
    with grpc.insecure_channel(f"127.0.0.1:{server.stack.grpc_port}") as channel:
        own = inference_pb2_grpc.InferenceServiceStub(channel)
        for given in ({"text": TEXTS[0]}, {"token_ids": {"ids": ids}}):
            answer = own.Embed(inference_pb2.EmbedRequest(**cast(Any, given), request_id="r1"))
            assert near(answer.embedding, wanted)
            assert (answer.request_id, answer.usage.prompt_tokens) == ("r1", len(ids))
        with PacelineClient(f"127.0.0.1:{server.stack.grpc_port}") as client:
            found = client.embed(TEXTS[0])
            assert near(found.embedding, wanted)
            assert found.usage.prompt_tokens == len(ids)
            with pytest.raises(InvalidRequest, match="dimensions"):
                client.embed(TEXTS[0], dimensions=65)
        cut = own.Embed(inference_pb2.EmbedRequest(text=TEXTS[0], dimensions=7)).embedding
        assert near(cut, wanted[:7] / np.linalg.norm(wanted[:7]))
        engine: Any
        for engine in (
            vllm_engine_pb2_grpc.VllmEngineStub(channel).Embed(
                vllm_engine_pb2.EmbedRequest(tokenized=vllm_engine_pb2.TokenizedInput(input_ids=ids))
            ),
            sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel).Embed(
                sglang_scheduler_pb2.EmbedRequest(tokenized=sglang_scheduler_pb2.TokenizedInput(input_ids=ids))
            ),
        ):
            assert near(engine.embedding, wanted)
            assert (engine.prompt_tokens, engine.embedding_dim) == (len(ids), checkpoints.SIZE)
        for wrong, field in (
            (inference_pb2.EmbedRequest(), "input"),
            (inference_pb2.EmbedRequest(text="x", dimensions=65), "dimensions"),
            (inference_pb2.EmbedRequest(token_ids=inference_pb2.TokenIds(ids=[-1])), "token_ids"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                own.Embed(wrong)
            error = cast(Any, refused.value)
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert dict(error.trailing_metadata())["field"] == field
        with pytest.raises(grpc.RpcError, match="is an embedding model"):
            list(own.Generate(inference_pb2.GenerateRequest(text="x")))
        info = vllm_engine_pb2_grpc.VllmEngineStub(channel).GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        assert (info.is_generation, info.max_req_input_len) == (False, MAX_LEN)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_no_vector_is_lost_when_a_worker_and_the_scheduler_are_killed(
    own_stack: Stack, pooling: checkpoints.Pooling
) -> None:
    server, rng = Server(own_stack, pooling), random.Random(3)
    inputs = [[rng.randrange(10, 1000) for _ in range(rng.randrange(20, MAX_LEN))] for _ in range(400)]
    stack = own_stack.up()
    answers: list[Any] = []

    def ask() -> None:
        answers.append(server.client.embeddings.create(model=NAME, input=inputs))

    def run(until_steps: int) -> None:
        deadline = time.monotonic() + 60
        while (stack.metric("paceline_scheduler_steps_total") or 0) < until_steps:
            assert time.monotonic() < deadline, stack.logs()
            time.sleep(0.01)

    with server.client:
        asking = threading.Thread(target=ask)
        asking.start()
        run(40)
        stack.kill("worker-1")
        stack.start("worker-1")
        run(120)
        stack.kill("scheduler")
        assert not answers, "all was done before the scheduler died"
        stack.start("scheduler")
        asking.join(timeout=150)
    assert answers, stack.logs()
    for one, tokens in zip(answers[0].data, inputs, strict=True):
        assert near(one.embedding, server.expected(tokens))


def test_a_checkpoint_that_cannot_be_pooled_stops_the_worker_with_one_line(own_stack: Stack, tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "model", "cls")
    own_stack.model = str(folder)
    own_stack.start("worker-1")
    assert own_stack.processes["worker-1"].wait(timeout=100) != 0
    assert "pooling with pooling_mode_cls_token is not supported" in own_stack.logs()
