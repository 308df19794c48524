"""Our presets `vllm-v1` and `vllm-v1-priority` against vLLM's own Scheduler, step by step: `make peer-test`.

Both sides play the same random scenarios, and every step has to agree on the scheduled requests, their tokens, how
many of them are cached, and the preempted, finished and waiting requests. A comparison ends before the first step of a
kind in `DIFFERENCES`: from there on the two have different caches or queues. docs/preset-checks.md says why.

Each scenario is played twice: unchanged, and with both sides reusing a block only after it is written.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from simulator.scenario import play
from simulator.scenario_file import Scenario
from tests.peer.workloads import workload

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-peers" / "vllm" / "bin" / "python"
SEEDS = 250
PRESETS = ("vllm-v1", "vllm-v1-priority")

# As tests/peer/vllm_watch.py names them.
DIFFERENCES = (
    "evicts_match",
    "stores_twice",
    "evicts_then_preempts",
    "keeps_chunk_short",
    "stores_unwritten",
    "stops_at_itself",
)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM's environment is missing: make peer-test makes it"),
]


@dataclass(frozen=True)
class Case:
    seed: int
    preset: str
    store_after_step: bool

    def __str__(self) -> str:
        return f"{self.preset}-{'stored-after-step' if self.store_after_step else 'as-it-is'}-{self.seed}"

    @property
    def scenario(self) -> dict[str, Any]:
        return workload(self.seed, self.preset)


CASES = [Case(seed, preset, after) for after in (False, True) for preset in PRESETS for seed in range(SEEDS)]


@pytest.fixture(scope="module")
def theirs() -> dict[Case, dict[str, Any]]:
    """What vLLM did, all cases in one process: it takes long to import."""
    lines = [json.dumps(case.scenario | {"store_after_step": case.store_after_step}) for case in CASES]
    driver = Path(__file__).with_name("vllm_driver.py")
    run = subprocess.run([PYTHON, driver], input="\n".join(lines), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(zip(CASES, map(json.loads, run.stdout.splitlines()), strict=True))


def end_of_comparison(outcome: dict[str, Any]) -> int:
    return min((outcome[name] for name in DIFFERENCES if name in outcome), default=outcome["num_steps"])


def seen(step: dict[str, Any]) -> dict[str, Any]:
    """What of a step is compared. (Not the phase: vLLM knows none.)"""
    return {
        "scheduled": sorted((row["id"], row["tokens"], row["cached_tokens"]) for row in step["scheduled"]),
        "preempted": sorted(victim["id"] for victim in step["preempted"]),
        "finished": sorted(step["finished"]),
        "waiting": step["waiting"],
        "running": step["running"],
        "free_blocks": step["free_blocks"],
        "cached_blocks": step["cached_blocks"],
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_step_equals_the_step_of_vllm(case: Case, theirs: dict[Case, dict[str, Any]]) -> None:
    scenario = case.scenario
    if case.store_after_step:
        scenario["options"] = scenario.get("options", {}) | {"share_in_step": False}
    ours = play(Scenario(**scenario)).as_json()
    peer = theirs[case]
    assert "stuck" not in peer
    end = end_of_comparison(peer)
    for number, (our_step, peer_step) in enumerate(zip(ours["steps"][:end], peer["steps"][:end], strict=True)):
        assert seen(our_step) == seen(peer_step), f"step {number} of {json.dumps(case.scenario)}"
    if end == peer["num_steps"]:
        assert ours["num_steps"] == end
        assert ours["generated_tokens"] == peer["generated_tokens"]


def test_enough_steps_are_compared(theirs: dict[Case, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    """Most steps are compared, and they contain every kind of decision in which schedulers differ."""
    figures: Counter[str] = Counter()
    for outcome in theirs.values():
        end = end_of_comparison(outcome)
        figures["steps"] += outcome["num_steps"]
        figures["compared"] += end
        figures["cut short"] += end < outcome["num_steps"]
        for step in outcome["steps"][:end]:
            figures["preempted"] += len(step["preempted"])
            figures["cache hits"] += sum(row["cached_tokens"] > 0 for row in step["scheduled"])
            figures["rows"] += len(step["scheduled"])
    for case, outcome in theirs.items():
        shared = outcome.get("shares_unwritten")
        figures["shared in a step"] += shared is not None and shared < end_of_comparison(outcome)
        if case.store_after_step:
            assert shared is None
    with capsys.disabled():
        print(f"\n{len(theirs)} scenarios: " + ", ".join(f"{name} {n}" for name, n in figures.items()))
    assert figures["compared"] > 0.75 * figures["steps"]
    assert figures["preempted"] > 300
    assert figures["cache hits"] > 300
    assert figures["shared in a step"] > 10
