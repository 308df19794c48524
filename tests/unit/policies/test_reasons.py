"""Each way in which a batch policy keeps the queue waiting is told by `paceline explain`, also of who stands behind."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.scenario import Run, Scenario

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
def test_why_it_waits(reason: str, preset: str, fields: dict[str, Any], requests: list[dict[str, Any]]) -> None:
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
    run = Run(file, file.policies())
    run.play()
    spans = {r["id"]: run.core.journal.explain(r["id"]) or [] for r in requests}
    told = {name: {(s.reason, s.detail) for s in of} for name, of in spans.items()}
    heads = {name for name, of in told.items() if any(r == reason and detail for r, detail in of)}
    assert heads
    behind = {name for name, of in told.items() if any(d.endswith(f"waits for {reason}") for _, d in of)}
    assert behind or {"b", "c"} <= heads
