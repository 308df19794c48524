"""Embedding models under the real scheduler and cache cores give transformers' vectors, also when a service is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.v1.common_pb2 import POOLING_LAST, POOLING_MEAN, POOLING_UNSPECIFIED, FinishReason, SamplingParams
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.presets import PRESETS
from scheduler_svc.policies.registry import build, choose
from simulator.system import Client, LocalSystem
from tests.simulation.test_models import prompts
from tests.support import embedding_checkpoints as checkpoints
from tests.support.embedding_checkpoints import Pooling
from tests.support.model_worker import ModelWorker

POOLINGS = {"last": POOLING_LAST, "mean": POOLING_MEAN}
ONE = SamplingParams(top_p=1, max_tokens=1)
MIXED = prompts(0, [1, 3, 17, 40, 64, 90])
STOP, ERROR = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_ERROR


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, Pooling], Path]:
    folder = tmp_path_factory.mktemp("embedding-models")
    pairs: list[tuple[str, Pooling]] = [("llama", "last"), ("llama", "mean"), ("qwen3", "last"), ("mistral", "mean")]
    return {(one, kind): checkpoints.make(one, folder / f"{one}-{kind}", kind) for one, kind in pairs}


def submit(system: LocalSystem, asked: list[list[int]], pooling: Pooling, first: int = 0) -> None:
    for i, prompt in enumerate(asked, first):
        system.submit("s", i, prompt, ONE, pooling=POOLINGS[pooling])


def check(client: Client, path: Path, asked: list[list[int]], pooling: Pooling, first: int = 0) -> None:
    for i, prompt in enumerate(asked, first):
        assert client.endings[i].reason == STOP, client.endings[i]
        vector = np.frombuffer(client.embeddings[i], "<f4")
        assert np.abs(vector - checkpoints.expected(path, prompt, pooling)).max() < 1e-4, i
    assert not client.tokens


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_those_of_transformers_under_every_preset(
    models: dict[tuple[str, Pooling], Path], pooling: Pooling, preset: str
) -> None:
    """Inputs come in chunks, and the pool holds 160 of their 215 tokens. The second time, `last` finds cached prefixes,
    and `mean` uses none."""
    path = models["llama", pooling]
    system = LocalSystem(SchedulerConfig(), build(choose(preset)))
    system.attach(ModelWorker(path, block_size=4, num_blocks=40, max_batched_tokens=20, max_num_seqs=16))
    client = system.open("s")
    for wave in range(2):
        submit(system, MIXED, pooling, 100 * wave)
        system.run()
        check(client, path, MIXED, pooling, 100 * wave)
    system.assert_at_rest()
    cached = [client.endings[100 + i].cached_tokens for i in range(len(MIXED))]
    assert all(count < len(prompt) for count, prompt in zip(cached, MIXED, strict=True)), "the last token is computed"
    assert bool(sum(cached)) == (pooling == "last")


@pytest.mark.parametrize(("family", "pooling"), [("qwen3", "last"), ("mistral", "mean")])
def test_inputs_that_share_a_prefix_in_one_step_get_the_right_vectors(
    models: dict[tuple[str, Pooling], Path], family: str, pooling: Pooling
) -> None:
    path, asked = models[family, pooling], [[*MIXED[4], i] for i in (5, 6, 7)] + [MIXED[4]] * 2
    system = LocalSystem()
    system.attach(ModelWorker(path, block_size=4, num_blocks=400, max_num_seqs=16))
    client = system.open("s")
    submit(system, asked, pooling)
    system.run()
    check(client, path, asked, pooling)
    system.assert_at_rest()
    assert (system.cache.counters.prefix_hit_tokens > 0) == (pooling == "last")


@pytest.mark.parametrize("loss", ["worker", "cache", "both"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_lost_worker_or_cache_changes_no_vector(
    models: dict[tuple[str, Pooling], Path], pooling: Pooling, loss: str
) -> None:
    """The loss comes after 0, 3, 6, … 57 moves: also between two chunks, and before a vector has left the worker."""
    path, asked = models["llama", pooling], [MIXED[3], MIXED[5]]
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 60, "max_batched_tokens": 16, "max_num_seqs": 8}
    worker, in_the_midst = ModelWorker(path, **settings), 0
    for num_moves in range(0, 60, 3):
        system = LocalSystem()
        end = system.attach(worker)
        client = system.open("s")
        submit(system, asked, pooling)
        system.run_for(num_moves)
        in_the_midst += bool(system.scheduler.workers[end.id].in_flight)
        if loss in ("cache", "both"):
            system.restart_cache()
        if loss in ("worker", "both"):
            system.kill(end)
            system.attach(worker)
        system.run()
        check(client, path, asked, pooling)
        system.assert_at_rest()
    assert in_the_midst > 3


@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_input_may_have_as_many_tokens_as_the_model_and_no_more(
    models: dict[tuple[str, Pooling], Path], pooling: Pooling
) -> None:
    path, [full] = models["llama", pooling], prompts(5, [100])
    system = LocalSystem()
    system.attach(ModelWorker(path, max_model_len=100, block_size=4, num_blocks=25, max_num_seqs=4))
    client = system.open("s")
    submit(system, [full, [*full, 4]], pooling)
    system.run()
    check(client, path, [full], pooling)
    assert (client.endings[1].reason, client.endings[1].field) == (ERROR, "prompt_token_ids")
    assert "101 tokens exceed the model's length of 100" in client.endings[1].message


@pytest.mark.parametrize("known_before", [False, True])
def test_an_embedding_model_generates_nothing_and_pools_in_one_way(
    models: dict[tuple[str, Pooling], Path], known_before: bool
) -> None:
    """Also if the request came before the first worker."""
    system = LocalSystem()
    worker = ModelWorker(models["llama", "last"], num_blocks=100)
    if known_before:
        system.attach(worker)
    client = system.open("s")
    for handle, pooling in enumerate((POOLING_UNSPECIFIED, POOLING_MEAN, POOLING_LAST)):
        system.submit("s", handle, MIXED[1], ONE, pooling=pooling)
    if not known_before:
        system.attach(worker)
    system.run()
    assert [client.endings[i].field for i in range(3)] == ["model", "pooling", ""]
    assert "is an embedding model, which generates no text" in client.endings[0].message
    check(client, models["llama", "last"], [MIXED[1]], "last", 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": SamplingParams(top_p=1, max_tokens=2)},
        {"sampling": SamplingParams(top_p=1, max_tokens=1, logprobs=True)},
        {"sampling": SamplingParams(top_p=1, max_tokens=1, prompt_logprobs=True)},
        {"sampling": SamplingParams(top_p=1, max_tokens=1, grammar="x")},
        {"output_token_ids": bytes(4)},
        {"fork_of": 9},
        {"beam": {"width": 1}},
        {"pooling": 3},
    ],
)
def test_a_request_for_a_vector_asks_for_nothing_else(changes: dict[str, Any]) -> None:
    system = LocalSystem()
    client = system.open("s")
    fields: dict[str, Any] = {"sampling": ONE, "pooling": POOLING_LAST} | changes
    sampling = fields.pop("sampling")
    system.submit("s", 1, MIXED[1], sampling, **fields)
    system.run()
    assert (client.endings[1].reason, client.endings[1].field) == (ERROR, "pooling")
