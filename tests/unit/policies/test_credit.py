"""What a step tells a policy about the cache is current, whatever the policy asked before."""

from __future__ import annotations

from typing import ClassVar

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.policy.step import Step
from scheduler_svc.policies.batch.decode_first import DecodeFirst
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker


class Curious(DecodeFirst):
    """Asks how much of the first waiting request is cached, before and after the running requests are in the step."""

    answers: ClassVar[list[tuple[int, int]]] = []

    def _run(self, step: Step) -> None:
        first = next(iter(step.waiting()), None)
        before = step.cached_tokens(first) if first else 0
        super()._run(step)
        if first and step.runs_prefills:
            self.answers.append((before, step.cached_tokens(first)))


def test_tokens_that_a_running_prompt_computes_in_the_step_count_as_cached_for_the_next_request() -> None:
    system = LocalSystem(policies=build(choose("", {"batch": f"{__name__}:{Curious.__name__}"})))
    system.attach(ToyWorker(block_size=4, num_blocks=100, max_num_seqs=8, max_batched_tokens=64))
    system.open("s", window=1 << 20)
    sampling = SamplingParams(top_p=1.0, max_tokens=4, ignore_eos=True)
    prompt = list(range(9, 9 + 150))
    system.submit("s", 1, prompt, sampling)
    system.run_for(2)
    system.submit("s", 2, prompt, sampling)
    system.run()
    system.assert_at_rest()
    assert Curious.answers[-1] == (128, 148)
