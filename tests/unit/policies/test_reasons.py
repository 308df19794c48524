"""`paceline explain` tells each reason for which a batch policy rejects a request, also for the requests behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.inference_pb2 import BeamOptions
from scheduler_svc.policies.api import RequestView
from scheduler_svc.policies.registry import build, choose
from simulator.scenario import ScenarioRun
from simulator.scenario_file import Scenario
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker

A = {"id": "a", "prompt_len": 10, "max_new_tokens": 20}
LATE = [{"id": name, "arrive": 2, "prompt_len": 70, "max_new_tokens": 5} for name in "bc"]
CHUNKS = {"chunked_prefill": True}
WAITS = {"batch_wait_iters": 5, "batch_wait_max_tokens_ratio": 1.0}


@pytest.mark.parametrize(
    ("reason", "preset", "fields", "requests"),
    [
        ("interval", "sglang", {"options": {"prefill_decode_interval": 6}}, [A, *LATE]),
        ("prefill", "sglang", {"max_batched_tokens": 20}, [A | {"prompt_len": 100}, *LATE]),
        ("full", "sglang", {"num_blocks": 12}, [A | {"prompt_len": 40, "max_new_tokens": 60}, *LATE]),
        ("batch-wait", "trtllm-no-evict", {"options": WAITS}, [A, *LATE]),
        ("budget", "trtllm-no-evict", {"max_batched_tokens": 20, "options": CHUNKS}, [A | {"prompt_len": 200}, *LATE]),
        (
            "preemption",
            "vllm-v1",
            {"num_blocks": 9},
            [A | {"max_new_tokens": 60}, A | {"id": "x", "max_new_tokens": 60}, *LATE],
        ),
        (
            "preemption",
            "vllm-v0",
            {"num_blocks": 9},
            [A | {"max_new_tokens": 60}, A | {"id": "x", "max_new_tokens": 60}, *LATE],
        ),
        (
            "swapped",
            "vllm-v0",
            {"num_blocks": 9, "num_host_blocks": 20, "options": {"mode": "swap"}},
            [A | {"max_new_tokens": 60}, A | {"id": "x", "max_new_tokens": 50}, *LATE],
        ),
    ],
)
def test_explain_tells_why_a_request_waits(
    reason: str, preset: str, fields: dict[str, Any], requests: list[dict[str, Any]]
) -> None:
    given: dict[str, Any] = {
        "block_size": 10,
        "num_blocks": 50,
        "max_num_seqs": 8,
        "max_batched_tokens": 200,
        "max_model_len": 4096,
        "prefix_caching": False,
        "preset": preset,
        "requests": requests,
    }
    file = Scenario(**given | fields)
    run = ScenarioRun(file, file.policies())
    run.play()
    spans = {r["id"]: run.core.timeline.explain(r["id"], 1e9) or [] for r in requests}
    told = {name: {(s.reason, s.detail) for s in of} for name, of in spans.items()}
    late = told["b"] | told["c"]
    assert any(r == reason or detail.endswith(f"waits for {reason}") for r, detail in late)


def test_a_prompt_that_is_cut_does_not_make_the_batch_full() -> None:
    """The chunk takes the rest of the budget, but the worker has slots for other requests."""
    file = Scenario(
        block_size=10,
        num_blocks=50,
        max_num_seqs=8,
        max_batched_tokens=20,
        max_model_len=4096,
        prefix_caching=False,
        preset="sglang",
        requests=list[Any]([A | {"prompt_len": 100}, A | {"id": "b"}]),
    )
    run = ScenarioRun(file, file.policies())
    run.play()
    spans = run.core.timeline.explain("b", 1e9)
    assert spans is not None
    assert {"prefill", "running"} <= {span.reason for span in spans}
    assert not [span for span in spans if "full" in (span.reason, span.detail.rpartition(" ")[2])]


def test_a_full_batch_does_not_ask_for_the_order_in_every_step() -> None:
    """Some orders sort all waiting requests at each call."""
    policies, times = build(choose("sglang")), 0
    ordered = policies.order.ordered

    def counted(now_s: float) -> Iterator[RequestView]:
        nonlocal times
        times += 1
        return ordered(now_s)

    policies.order.ordered = counted  # type: ignore[method-assign]
    system = LocalSystem(policies=policies)
    system.attach(ToyWorker(block_size=16, num_blocks=16, max_num_seqs=8, max_batched_tokens=64))
    client, sampling = system.open("s"), SamplingParams(top_p=1.0, max_tokens=200, ignore_eos=True)
    for handle in range(5):
        system.submit("s", handle, [9 + handle] * 20, sampling)
        system.run_for(10)
    while 0 not in client.endings:
        system.move(*system.moves()[0])
    assert 0 < times < 50, "of more than 200 steps"
    spans = system.scheduler.timeline.explain("s-4", system.now_s)
    assert spans is not None
    assert "full" in {span.reason for span in spans}


def test_explain_tells_why_a_beam_search_waits() -> None:
    """Its beams are requests of their own, and their ids come from no client."""
    system = LocalSystem()
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=2, max_batched_tokens=64))
    client, sampling = system.open("s"), SamplingParams(top_p=1.0, max_tokens=30, ignore_eos=True)
    for handle in range(4):
        system.submit("s", handle, [9] * 10, sampling)
    system.submit("s", 9, [7] * 10, sampling, beam=BeamOptions(width=3, num_return=1))
    system.run()
    assert len(client.endings) == 5
    spans = system.scheduler.timeline.explain("s-9", system.now_s)
    assert spans is not None
    assert {"waiting", "order", "running", "slots", "ended"} == {span.reason for span in spans}
