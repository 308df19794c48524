"""The real scheduler and cache cores over a model with few blocks, with steps in flight: swaps, copies and forks.

The pool has blocks for a few sequences, and there is a host tier. So sequences are preempted to host memory and come
back, evicted prefixes are promoted, samples fork, and blocks are copied on write. All of this happens beside steps that
the device has not finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.inference_pb2 import BeamOptions
from paceline.v1.worker_pb2 import StepPlan
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem, WorkerEnd
from tests.support.model_worker import ModelWorker

POOL = {"block_size": 16, "num_blocks": 26, "num_host_blocks": 120, "max_num_seqs": 16, "max_batched_tokens": 128}
SAMPLES = 4


class LaunchingWorker(ModelWorker):
    """Steps are launched, and waited for when their results are due."""

    def run(self, plan: StepPlan) -> Any:
        self.num_steps += 1
        return self.runner.launch(plan)


class LaunchingSystem(LocalSystem):
    def move(self, kind: str, end: WorkerEnd | None) -> None:
        if kind == "result" and end is not None:
            launched: Any = end.results[0]
            end.results[0] = launched.result()
        super().move(kind, end)


def make_prompts(vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(11)
    shared = rng.integers(0, vocab, 40).tolist()
    return [
        *(rng.integers(0, vocab, n).tolist() for n in (9, 33, 64, 70, 100)),
        *(shared + rng.integers(0, vocab, n).tolist() for n in (1, 5, 23)),  # the block where they diverge is copied
    ]


def run_system(
    folder: Path, device: str, preset: str, window: int, prompts: Sequence[list[int]], new_tokens: int, **settings: Any
) -> tuple[LaunchingSystem, dict[int, Any]]:
    """Submits all requests at once, two times. Returns the system, and the tokens or beams of each handle."""
    config = SchedulerConfig(window=window)
    system = LaunchingSystem(config, build(choose(preset, options={"mode": "swap"})))
    system.attach(LaunchingWorker(folder, device, **POOL | settings))
    client = system.open("s", window=1 << 20)
    handles = iter(range(1, 1 << 20))
    greedy = SamplingParams(top_p=1.0, max_tokens=new_tokens, ignore_eos=True)
    for _ in range(2):
        for prompt in prompts:
            system.submit("s", next(handles), prompt, greedy)
        first = next(handles)
        for i in range(SAMPLES):
            sampling = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=new_tokens, ignore_eos=True, seed=i)
            handle = next(handles) if i else first
            system.submit("s", handle, prompts[2], sampling, fork_of=first if i else 0)
        system.submit("s", next(handles), prompts[1], greedy, beam=BeamOptions(width=3))
        system.run()
    system.assert_at_rest()
    assert not any(ending.message for ending in client.endings.values())
    beams = {
        handle: [np.frombuffer(found.token_ids, "<i4").tolist() for found in ending.hypotheses]
        for handle, ending in client.endings.items()
        if ending.hypotheses
    }
    assert len(beams) == 2
    return system, client.tokens | beams


def check_moved(system: LaunchingSystem) -> None:
    """Blocks were swapped in, promoted from host memory and copied, and sequences were forked."""
    counters = system.cache.counters
    assert system.scheduler.counters.swapped_in > 0
    assert counters.swapped_in_blocks > 0
    assert counters.promoted_blocks > 0
    assert counters.forked_sequences > 0
    assert counters.copied_blocks > 0
