"""Random scenarios (docs/scenarios.md) from a seed: small pools that force preemption, tight budgets, priorities,
shared prefixes."""

from __future__ import annotations

import random
from typing import Any


def workload(seed: int, preset: str) -> dict[str, Any]:
    """A scenario in which each request alone fits the pool and the model. Everything else is random."""
    rng = random.Random(f"{preset} {seed}")
    block_size = rng.choice([1, 2, 4, 4, 8, 16])
    families = [f"family {i}" for i in range(rng.randint(1, 3))]
    prefixes = {family: rng.randint(1, 6 * block_size) for family in families}
    shares = rng.random() * rng.randint(0, 1)  # half of the scenarios share nothing
    requests: list[dict[str, Any]] = []
    arrive = 0
    longest = rng.choice([8, 24, 60])
    for number in range(rng.randint(1, 14)):
        arrive += rng.choice([0, 0, 0, 1, 2, 7])
        request: dict[str, Any] = {
            "id": str(number),
            "arrive": arrive,
            "prompt_len": rng.randint(1, longest),
            "max_new_tokens": rng.randint(1, rng.choice([3, 30])),
        }
        if rng.random() < shares:
            family = rng.choice(families)
            length = rng.randint(1, prefixes[family])
            request["prefix"] = {"family": family, "len": length}
            request["prompt_len"] = length + rng.choice([0, rng.randint(0, longest)])
        if preset == "vllm-v1-priority":
            request["priority"] = rng.choice([-1, 0, 0, 0.5, 2])
        requests.append(request)
    totals = [request["prompt_len"] + request["max_new_tokens"] for request in requests]
    need_blocks = max(-(-(total - 1) // block_size) for total in totals)
    max_num_seqs = rng.choice([1, 2, 3, 4, 8, 16])
    max_model_len = max(max(totals), 2)
    chunked = rng.random() < 0.75
    options: dict[str, Any] = {"chunked_prefill": chunked}
    # With one slot, vLLM cuts the running prompt to the threshold, though no waiting request can use the rest.
    if rng.random() < 0.3 and max_num_seqs > 1:
        options["long_prefill_token_threshold"] = rng.randint(1, max_model_len)
    # vLLM requires a budget of at least the model's length when prompts are not cut.
    budget = rng.randint(max_num_seqs, max_num_seqs + 40) if chunked else max_model_len + rng.randint(0, 30)
    num_blocks = max(1, need_blocks) + rng.randint(0, rng.choice([1, 4, 4 * need_blocks + 4]))
    watermark = rng.choice([0.0, 0.0, 0.01, 0.1, 0.3])
    # vLLM computes the watermark from a pool with one block more, its null block. Use only a watermark that gives the
    # same number of blocks in vLLM and in Paceline.
    if int(watermark * num_blocks) == int(watermark * (num_blocks + 1)):
        options["watermark"] = watermark
    return {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_num_seqs": max_num_seqs,
        "max_batched_tokens": max(budget, max_num_seqs),
        "max_model_len": max_model_len,
        "prefix_caching": rng.random() < 0.75,
        "preset": preset,
        "options": options,
        "requests": requests,
    }
