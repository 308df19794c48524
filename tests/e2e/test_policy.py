"""Changing the policies of a running server, and asking it why a request waited."""

from __future__ import annotations

import asyncio
import random
import re
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.support import load
from tests.support.command import paceline
from tests.support.stack import Stack

VOCAB = 1000
RUNNING, WAITING = "paceline_scheduler_num_requests_running", "paceline_scheduler_num_requests_waiting"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two slots, a small pool and a tenant budget, so that requests wait for one or the other."""
    stack = Stack(tmp_path_factory.mktemp("small"))
    stack.worker_flags = ["--threads", "1", "--max-num-seqs", "2", "--num-blocks", "20"]
    stack.scheduler_flags = ["--tenant-max-running-tokens", "550"]
    try:
        yield stack.up()
    finally:
        stack.down()


def set_policy(stack: Stack, *argv: str) -> str:
    done = paceline(stack, "policy", "set", *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_policies_change_under_streams_in_flight(small: Stack) -> None:
    wanted = [load.Wanted(prompt, 40) for prompt in load.random_prompts(10, 8, VOCAB, longest=60)]
    right = await load.stream_all(small.url, wanted)
    serving = asyncio.create_task(load.stream_all(small.url, wanted))
    for change in (["sglang"], ["trtllm-max-util", "--option", "prefix_aware=false"], ["--order", "lof"], ["paceline"]):
        await asyncio.sleep(0.05)
        said = await asyncio.to_thread(set_policy, small, *change)
        assert said.startswith("in force from the next step on: ")
    for before, after in zip(right, await serving, strict=True):
        assert not before.errors
        assert not after.errors
        assert after.finish_reason == "length"
        assert after.text == before.text
    assert small.metric("paceline_scheduler_policy_errors_total") == 0


def test_get_lists_the_current_policies_and_all_others(small: Stack) -> None:
    set_policy(small, "vllm-v1", "--option", "watermark=0.2", "--capacity", "watermark")
    set_policy(small, "--option", "long_prefill_token_threshold=64")  # the rest stays
    done = paceline(small, "policy", "get")
    assert done.returncode == 0
    first, *rest = done.stdout.splitlines()
    assert first.startswith("in force    no preset: order fcfs, capacity watermark, batch decode-first")
    assert "watermark=0.2" in first
    assert "long_prefill_token_threshold=64" in first
    known = {line.split()[0]: line for line in rest}
    assert list(known) == ["presets", "order", "capacity", "batch", "preemption", "placement"]
    assert "trtllm-no-evict" in known["presets"]
    assert "hrrn" in known["order"]
    set_policy(small, "paceline")
    assert paceline(small, "policy", "get").stdout.startswith("in force    paceline: ")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["vlm"], ["preset: 'vlm'", "vllm-v1", "sglang-lpm"]),
        (["--order", "best"], ["order: 'best'", "fcfs", "lpm"]),
        (["--capacity", "nowhere:Policy"], ["capacity: 'nowhere:Policy' names a module", "--capacity", "watermark"]),
        (["--order", "this:x"], ["order: 'this:x' names a module", "--order", "paceline.policies"]),
        (["--option", "speed=9"], ["options.speed", "ageing_per_s"]),
        (["--option", "watermark=high"], ["options.watermark", "valid number"]),
        (["--option", "watermark"], ["NAME=VALUE"]),
        (["--bogus"], ["--bogus"]),
    ],
)
def test_an_unknown_name_changes_nothing_and_the_error_lists_known_names(
    small: Stack, argv: list[str], words: list[str]
) -> None:
    before = paceline(small, "policy", "get").stdout
    done = paceline(small, "policy", "set", *argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("paceline policy: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr
    assert paceline(small, "policy", "get").stdout == before


async def serve(stack: Stack, requests: list[tuple[str, int, int]]) -> None:
    """`(id, prompt tokens, tokens to generate)`: the requests enter the queue one after the other and then run to their
    ends.

    The worker is stopped until all are in the queue. Otherwise the first request might end before the last one arrives.
    """
    await asyncio.to_thread(stack.wait_metric, RUNNING, 0)
    async with load.client(stack.url) as http:

        async def post(request_id: str, prompt_len: int, max_tokens: int) -> None:
            rng = random.Random(request_id)
            prompt = [rng.randrange(8, VOCAB) for _ in range(prompt_len)]
            body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
            answer = await http.post("/v1/completions", json=body, headers={"X-Request-ID": request_id})
            assert answer.status_code == 200, answer.text

        def num_queued() -> float:
            return (stack.metric(RUNNING) or 0) + (stack.metric(WAITING) or 0)

        tasks: list[asyncio.Task[None]] = []
        worker = stack.processes["worker-1"]
        worker.send_signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(60):
                for request in requests:
                    tasks.append(asyncio.create_task(post(*request)))
                    while await asyncio.to_thread(num_queued) < len(tasks):  # noqa: ASYNC110 - another process's
                        await asyncio.sleep(0.005)
        finally:
            worker.send_signal(signal.SIGCONT)
        await asyncio.gather(*tasks)


def explained(stack: Stack, request_id: str) -> list[list[str]]:
    """Rows of seconds, decisions, worker, reason, detail."""
    done = paceline(stack, "explain", request_id)
    assert done.returncode == 0, done.stderr
    *table, reuse = done.stdout.splitlines()
    title, *rows = [line.strip().split(maxsplit=4) for line in table]
    assert "prompt tokens were cached" in reuse
    assert title == ["seconds", "decisions", "worker", "reason", "detail"]
    reasons = [row[3] for row in rows]
    assert (reasons[0], reasons[-2:]) == ("waiting", ["running", "ended"])
    return rows


async def test_explain_says_why_a_request_waited(small: Stack) -> None:
    await serve(small, [("s1", 5, 140), ("s2", 5, 140), ("s3", 5, 5), ("s4", 5, 5)])
    full = next(row for row in explained(small, "s3") if row[3] == "slots")
    assert full[4] == "all 2 are taken"
    assert "-" in full[1]  # a range of decisions
    behind = [row for row in explained(small, "s4") if row[3] == "order"]
    assert any(row[4] == "behind s3, which waits for slots" for row in behind)
    assert not {row[3] for row in explained(small, "s1")} & {"slots", "order", "capacity"}


async def test_explain_names_blocks_and_budgets(small: Stack) -> None:
    await serve(small, [("b1", 160, 140), ("b2", 200, 10)])
    blocks = next(row for row in explained(small, "b2") if row[3] == "capacity")
    assert re.fullmatch(r"needs 13 blocks, \d+ are available", blocks[4])
    await serve(small, [("t1", 10, 290), ("t2", 10, 290)])
    tenant = next(row for row in explained(small, "t2") if row[3] == "tenant")
    assert tenant[4] == "300 tokens of tenant '' run, its limit is 550"


async def test_explain_takes_the_id_that_the_client_sees(small: Stack) -> None:
    """Two samples of a chat: the answer's id and the X-Request-ID explain both samples, a sample's id explains one."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "n": 2, "max_tokens": 4}
    async with load.client(small.url) as http:
        answer = await http.post("/v1/chat/completions", json=chat, headers={"X-Request-ID": "chat"})
    assert answer.headers["x-request-id"] == "chat"
    by_answer = paceline(small, "explain", answer.json()["id"])
    assert by_answer.returncode == 0, by_answer.stderr
    assert by_answer.stdout == paceline(small, "explain", "chat").stdout
    assert [line for line in by_answer.stdout.splitlines() if line.endswith(":")] == ["chat:", "chat.1:"]
    sample = explained(small, "chat.1")
    assert [row[3] for row in sample][-1] == "ended"


def test_explain_of_an_unknown_request_is_one_line(small: Stack) -> None:
    done = paceline(small, "explain", "unknown")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "request_id: nothing is known (any more) of 'unknown'" in done.stderr
    assert httpx.get(f"{small.url}/ready", trust_env=False, timeout=60).status_code == 200
