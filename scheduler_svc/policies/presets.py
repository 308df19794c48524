"""Combinations of policies: ours, and some that behave as a known system does. docs/preset-checks.md says how each was
checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PolicySet:
    """One policy of each kind by name ("module:Class" for a user's own), and the options that they share."""

    order: str
    capacity: str
    batch: str
    preemption: str
    options: dict[str, Any] = field(default_factory=dict)
    placement: str = "predicted-time"  # in every preset: the systems that they follow have one worker


DEFAULT = "paceline"

PRESETS: dict[str, PolicySet] = {
    # Prompts in chunks beside decodes. Admits while blocks are left, fairly among tenants and requests. The largest
    # share is preempted first. A preempted request resumes only when there is room to grow.
    "paceline": PolicySet(
        "fair", "watermark", "decode-first", "largest-share", {"watermark": 0.01, "resume_watermark": 0.05}
    ),
    # https://github.com/vllm-project/vllm, the last V0 scheduler: prefill batches, then decode batches.
    "vllm-v0": PolicySet(
        "fcfs",
        "watermark",
        "prefill-first",
        "last-in",
        {
            "watermark": 0.01,
            "chunked_prefill": False,
            "max_prefill_tokens": 0,
            "charges_blocks": False,
            "closes_when_full": False,
            "requeue": "front",
            "mode": "auto",
        },
    ),
    # vLLM V1 with its defaults, and with --scheduling-policy priority.
    "vllm-v1": PolicySet("fcfs", "watermark", "decode-first", "last-in", {"watermark": 0.0, "requeue": "front"}),
    "vllm-v1-priority": PolicySet("priority", "watermark", "decode-first", "lowest-priority", {"watermark": 0.0}),
    # SGLang with its defaults, and with --schedule-policy lpm.
    "sglang": PolicySet("fcfs", "token-ratio", "prefill-first", "fewest-output", {"requeue": "back"}),
    "sglang-lpm": PolicySet("lpm", "token-ratio", "prefill-first", "fewest-output", {"requeue": "back"}),
    # TensorRT-LLM's three capacity schedulers, each with its micro-batch scheduler.
    "trtllm-no-evict": PolicySet("priority", "guaranteed-no-evict", "two-stage", "last-in"),
    "trtllm-max-util": PolicySet("priority", "max-utilization", "two-stage", "last-in"),
    "trtllm-static": PolicySet("priority", "static-batch", "two-stage", "last-in"),
}
