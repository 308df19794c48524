"""Workers that come, go, and drain while the system serves."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path

from tests.support import load
from tests.support.command import paceline
from tests.support.stack import Stack

VOCAB = 1000


async def undisturbed(stack: Stack, wanted: list[load.Wanted]) -> list[str]:
    """The texts when no worker comes or goes. (test_serving.py compares such texts with transformers.)"""
    got = await load.stream_all(stack.url, wanted)
    assert not [answer.errors for answer in got if answer.errors]
    return [answer.text for answer in got]


async def test_a_second_worker_joins_works_and_drains(own_stack: Stack) -> None:
    stack = await asyncio.to_thread(own_stack.up)
    wanted = [load.Wanted(prompt, 150) for prompt in load.random_prompts(24, 5, VOCAB)]
    right = await undisturbed(stack, wanted)
    serving = asyncio.create_task(load.stream_all(stack.url, wanted))
    await asyncio.to_thread(stack.start, "worker-2")
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_workers", 2)
    more = asyncio.create_task(load.stream_all(stack.url, wanted))
    async with load.client(stack.url) as http:
        body = {"prompt": [5], "max_tokens": 3}
        await http.post("/v1/completions", json=body, headers={"X-Request-ID": "placed"})
    told = paceline(stack, "explain", "placed").stdout
    assert re.search(
        r"running +on worker \d: predicted: first token after [\d.]+ s, cost [\d.]+ s; worker \d:", told
    ), told
    process = stack.processes["worker-2"]
    await asyncio.to_thread(stack.kill, "worker-2", signal.SIGINT)
    assert process.returncode == 0
    for text, got in zip(right + right, [*await serving, *await more], strict=True):
        assert not got.errors
        assert got.text == text
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_workers", 1)


async def test_a_full_queue_answers_429_with_retry_after(own_stack: Stack) -> None:
    own_stack.scheduler_flags = ["--max-queued-requests", "2"]
    own_stack.worker_flags = ["--max-num-seqs", "1", "--threads", "1"]
    stack = await asyncio.to_thread(own_stack.up)
    async with load.client(stack.url) as http:
        body = {"prompt": [5], "max_tokens": 300, "ignore_eos": True, "temperature": 0}
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(12)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert all(float(answer.headers["retry-after"]) > 0 for answer in refused)
    assert sum(answer.status_code == 200 for answer in answers) == 12 - len(refused)


async def test_streams_pause_while_a_worker_is_killed_and_started_again(own_stack: Stack) -> None:
    stack = await asyncio.to_thread(own_stack.up)
    wanted = [load.Wanted(prompt, 400) for prompt in load.random_prompts(16, 6, VOCAB)]
    right = await undisturbed(stack, wanted)
    serving = asyncio.create_task(load.stream_all(stack.url, wanted))
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_requests_running", len(wanted))
    await asyncio.to_thread(stack.kill, "worker-1")
    assert not serving.done()
    await asyncio.sleep(0.3)
    await asyncio.to_thread(stack.start, "worker-1")
    for text, got in zip(right, await serving, strict=True):
        assert not got.errors
        assert got.finish_reason == "length"
        assert got.text == text
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_requests_running", 0)


async def test_random_weights_from_a_config_alone(own_stack: Stack, tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 500,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    own_stack.model = str(tmp_path)
    own_stack.worker_flags = ["--load-format", "dummy", "--threads", "1"]
    stack = await asyncio.to_thread(own_stack.up)
    [got] = await load.stream_all(stack.url, [load.Wanted([5, 6, 7], 9)])
    assert not got.errors
    assert len(got.text.split()) == 9
    async with load.client(stack.url) as http:
        refused = await http.post("/v1/completions", json={"prompt": "hello"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
