"""Batches with the openai package and real processes: after kill -9 of a gateway each line has one result."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from openai import OpenAI
from openai.types import Batch

from examples.running_a_batch import run_batch
from paceline.v1.admin_pb2 import ExplainRequest
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from tests.support.stack import Stack

pytestmark = pytest.mark.timeout(240)  # a lease of 10 s has to end twice
NUM_LINES = 60
MODEL = "paceline-demo"
COMPLETION: Any = "/v1/completions"
RUNNING = "paceline_scheduler_num_requests_running"
NUM_SLOTS = 4
OFFLINE = "paceline_scheduler_num_offline_requests_running"
ENDED = ("failed", "completed", "expired", "cancelled")


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def lines(num_tokens: int) -> list[dict[str, Any]]:
    """Half of them greedy, half with a seed; the last one is refused by its endpoint."""
    told = []
    for number in range(NUM_LINES):
        draws = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
        body = {"model": MODEL, "prompt": f"Story {number}: ", "max_tokens": num_tokens, "ignore_eos": True, **draws}
        told.append({"custom_id": f"line-{number}", "method": "POST", "url": COMPLETION, "body": body})
    told[-1]["body"]["top_p"] = 2
    return told


def begin(client: OpenAI, told: list[dict[str, Any]]) -> str:
    content = "".join(json.dumps(line) + "\n" for line in told).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=COMPLETION, completion_window="24h").id


def ended(client: OpenAI, batch_id: str) -> Batch:
    deadline_s = time.monotonic() + 100
    while (batch := client.batches.retrieve(batch_id)).status not in ENDED:
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.1)
    return batch


def read(client: OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of an output file by custom id."""
    assert file_id is not None
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in found}
    assert len(by_id) == len(found), "a line is in the file twice"
    return by_id


def texts(client: OpenAI, batch: Batch) -> dict[str, str]:
    served = read(client, batch.output_file_id)
    return {name: line["response"]["body"]["choices"][0]["text"] for name, line in served.items()}


def check_whole(client: OpenAI, batch: Batch, right: dict[str, str]) -> None:
    """Each line is once in the output file or in the error file, and has the right text."""
    assert batch.status == "completed"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (NUM_LINES, NUM_LINES - 1, 1)
    assert texts(client, batch) == right
    failed = read(client, batch.error_file_id)
    assert failed.keys() == {f"line-{NUM_LINES - 1}"}
    assert failed[f"line-{NUM_LINES - 1}"]["response"]["body"]["error"]["param"] == "top_p"


def until_lines_have_run(client: OpenAI, batch_id: str, count: int) -> int:
    """Waits until at least `count` lines have run, and returns how many have."""
    deadline_s = time.monotonic() + 60
    while True:
        counts = client.batches.retrieve(batch_id).request_counts
        if counts is not None and counts.completed >= count:
            assert counts.completed < NUM_LINES - 5, "too late for a kill in the middle"
            return counts.completed
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def right_texts(client: OpenAI, told: list[dict[str, Any]]) -> dict[str, str]:
    """What the endpoint itself answers."""
    return {line["custom_id"]: client.completions.create(**line["body"]).choices[0].text for line in told[:-1]}


def direct(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same lines with ignore_eos in `extra_body`, as the openai package needs it."""
    moved = [{**line, "body": dict(line["body"])} for line in told]
    for line in moved:
        line["body"]["extra_body"] = {"ignore_eos": line["body"].pop("ignore_eos")}
    return moved


def test_a_batch_of_a_killed_gateway_goes_on_at_another(
    own_stack: Stack, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    own_stack.gateway_flags = ["--response-store", store_url, "--batch-lines", "4"]
    stack = own_stack.up()
    first, second = client_of(stack.url), client_of(stack.start_gateway("gateway-2"))
    told = lines(60)
    right = right_texts(second, direct(told))
    batch_id = begin(first, told)
    until_lines_have_run(second, batch_id, 3)
    stack.kill("gateway")
    check_whole(second, batch := ended(second, batch_id), right)
    assert batch.in_progress_at is not None
    assert batch.completed_at is not None
    stack.wait_metric(RUNNING, 0)


def test_a_batch_of_a_killed_gateway_goes_on_when_the_gateway_is_back(
    own_stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    own_stack.gateway_flags = ["--response-store", f"sqlite:///{tmp_path}/store.db", "--batch-lines", "1"]
    stack = own_stack.up()
    client = client_of(stack.url)
    told = lines(100)  # with one line at a time, many are left when the gateway is back
    right = right_texts(client, direct(told))
    batch_id = begin(client, told)
    num_run = 0
    for _ in range(2):
        num_run = until_lines_have_run(client, batch_id, num_run + 3)
        stack.kill("gateway")
        stack.start("gateway")
        stack.wait_ready()
    check_whole(client, ended(client, batch_id), right)


def decisions_until_running(stack: Stack, name: str) -> int:
    """How often the scheduler decided about a step until the request had a slot."""
    with grpc.insecure_channel(stack.scheduler) as channel:
        told = AdminServiceStub(channel).Explain(ExplainRequest(request_id=name)).explanations
    first = {one.reason: one.first_decision for one in reversed(told)}
    return first["running"] - first["waiting"]


def test_an_online_request_gets_a_slot_within_a_few_steps_while_a_batch_holds_all_slots(
    own_stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the batch goes on, with the same tokens. Each line runs for 150 steps."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    own_stack.gateway_flags = ["--response-store", f"sqlite:///{tmp_path}/store.db"]
    own_stack.worker_flags = ["--threads", "1", "--max-num-seqs", str(NUM_SLOTS)]
    stack = own_stack.up()
    client = client_of(stack.url)
    told = lines(150)[: 3 * NUM_SLOTS + 1]
    right = right_texts(client, direct(told))
    online: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 8, "temperature": 0}
    answer = client.completions.create(**online).choices[0].text
    batch_id = begin(client, told[:-1])

    def ask(name: str) -> None:
        got = client.completions.create(**online, extra_headers={"x-request-id": name})
        assert got.choices[0].text == answer

    for number in (1, NUM_SLOTS):
        stack.wait_metric(OFFLINE, NUM_SLOTS)
        names = [f"online-{number}-{i}" for i in range(number)]
        with ThreadPoolExecutor(number) as threads:
            list(threads.map(ask, names))
        assert max(decisions_until_running(stack, name) for name in names) <= 5
        assert client.batches.retrieve(batch_id).status == "in_progress"
    preempted = stack.metric("paceline_scheduler_preemptions_total")
    assert preempted is not None
    assert preempted >= 2, "else no online request needed a slot of the batch"
    batch = ended(client, batch_id)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert texts(client, batch) == right


def test_the_example_runs_a_batch_of_chats(stack: Stack) -> None:
    client = client_of(stack.url)
    asked: dict[str, dict[str, Any]] = {
        f"chat-{number}": {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Tell me of fox {number}."}],
            "max_tokens": 8,
            "seed": number,
        }
        for number in range(20)
    }
    got = run_batch(client, asked)
    assert got.keys() == asked.keys()
    for name, body in asked.items():
        right = client.chat.completions.create(**body)
        assert got[name]["body"]["choices"][0]["message"]["content"] == right.choices[0].message.content
    [batch] = client.batches.list(limit=1).data
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert batch.usage is not None
    assert batch.usage.output_tokens == sum(one["body"]["usage"]["completion_tokens"] for one in got.values())
    for file_id in (batch.input_file_id, batch.output_file_id):
        assert client.files.delete(file_id or "").deleted
    assert client.batches.retrieve(batch.id).status == "completed"
    with pytest.raises(RuntimeError, match="model"):
        run_batch(client, {"a": {"model": "unknown"}})


def test_other_requests_are_answered_during_a_large_upload(stack: Stack) -> None:
    """180 MB in one request, while another client asks for the models."""
    client, num_answers = client_of(stack.url), 0
    gateway = psutil.Process(stack.processes["gateway"].pid)
    before = most = gateway.memory_info().rss

    content = (b'{"x": "' + b"y" * 4000 + b'"}\n') * 45_000
    made: list[Any] = []
    thread = threading.Thread(
        target=lambda: made.append(client.files.create(file=("large.jsonl", content), purpose="batch"))
    )
    other = client_of(stack.url)
    thread.start()
    while thread.is_alive():
        other.models.list()
        num_answers += 1
        most = max(most, gateway.memory_info().rss)
        time.sleep(0.01)
    thread.join()
    assert made[0].bytes == len(content)
    assert num_answers > 10, "another client got answers during the upload"
    assert most - before < 64 * 2**20, "the file is not held in memory"
    client.files.delete(made[0].id)
