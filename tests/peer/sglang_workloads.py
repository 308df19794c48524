"""Random scenarios (docs/scenarios.md) from a seed, for SGLang's presets: tight pools, shared prefixes."""

from __future__ import annotations

import random
from typing import Any


def workload(seed: int, preset: str, kind: str) -> dict[str, Any]:
    """A random workload. The kinds: "uncached" has no prefix cache and a pool that forces retraction; "roomy" has a
    cache and room for all computed blocks; "tight" has a cache and a pool that forces eviction and retraction.

    No request is longer than SGLang's limit, because SGLang would cut a longer one.
    """
    rng = random.Random(f"{preset} {kind} {seed}")
    block_size = rng.choice([1, 1, 2, 4, 8, 16])
    families = {f"family {i}": rng.randint(1, 80) for i in range(rng.randint(1, 3))}
    sharing = 0.0 if kind == "uncached" else rng.choice([0.3, 0.8, 1.0])
    bold = kind != "roomy" and rng.random() < 0.5  # SGLang admits more than fits, and has to retract
    longest_prompt = rng.choice([4, 8, 24] if bold else [8, 24, 60, 120])
    longest_output = rng.choice([30, 90, 150] if bold else [3, 30, 90])
    gaps = [0, 0, 0, 0, 1, 3] if bold else [0, 0, 0, 1, 2, 7, 25]
    in_step = bold and rng.random() < 0.5  # equal prompt lengths: all need their next blocks in one step
    if in_step:
        gaps = [0]
    prompt_len = rng.randint(1, longest_prompt)
    requests: list[dict[str, Any]] = []
    arrive = 0
    for number in range(rng.randint(1, 20)):
        arrive += rng.choice(gaps)
        request: dict[str, Any] = {
            "id": str(number),
            "arrive": arrive,
            "prompt_len": prompt_len if in_step else rng.randint(1, longest_prompt),
            "max_new_tokens": rng.randint(1, longest_output),
        }
        if rng.random() < sharing:
            family = rng.choice(list(families))
            length = rng.randint(1, families[family])
            request["prefix"] = {"family": family, "len": length}
            request["prompt_len"] = length + rng.choice([0, rng.randint(0, longest_prompt)])
        requests.append(request)
    max_num_seqs = rng.choice([3, 8, 16] if bold else [1, 2, 3, 4, 8, 16])
    # A prompt in whole blocks, the output, a block to spare and one token more.
    need_blocks = max(
        -(-r["prompt_len"] // block_size) + -(-(r["max_new_tokens"] + 1) // block_size) + 1 for r in requests
    )
    total_blocks = sum(-(-(r["prompt_len"] + r["max_new_tokens"]) // block_size) + 2 for r in requests)
    num_blocks = need_blocks + rng.randint(0, rng.choice([1, 4, 2 * need_blocks]))
    chunked = rng.random() < 0.7
    options: dict[str, Any] = {"chunked_prefill": chunked}
    if not chunked or rng.random() < 0.3:
        options["max_prefill_tokens"] = rng.randint(1, 2 * longest_prompt)
    if bold:
        options["init_new_token_ratio"] = rng.choice([0.01, 0.05, 0.2])
        options["retract_decode_steps"] = rng.choice([1, 5, 20])
    if rng.random() < 0.2:
        options["prefill_decode_interval"] = rng.randint(1, 4)
    whole_budget = sum(r["prompt_len"] + r["max_new_tokens"] for r in requests)
    chunk = -(-max(max_num_seqs, rng.randint(1, 60)) // block_size) * block_size  # SGLang wants whole blocks
    return {
        "block_size": block_size,
        "num_blocks": 2 * total_blocks if kind == "roomy" else num_blocks,
        "max_num_seqs": max_num_seqs,
        "max_batched_tokens": chunk if chunked else whole_budget + max_num_seqs,
        "max_model_len": max(2, *(r["prompt_len"] + r["max_new_tokens"] for r in requests)),
        "prefix_caching": kind != "uncached",
        "preset": preset,
        "options": options,
        "requests": requests,
    }
