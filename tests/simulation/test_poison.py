"""Requests that make their steps fail, or kill their workers, among others that do not.

The first token marks a poisoned request. It breaks its step whenever the worker computes a certain position. Only the
poisoned request may fail; every other request gets exactly the tokens of an undisturbed run.
"""

from __future__ import annotations

import pytest

from paceline.v1.common_pb2 import FinishReason, SamplingParams
from paceline.v1.inference_pb2 import BeamOptions
from scheduler_svc.core.rejection import CODE_INTERNAL
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem
from simulator.toy_worker import StepRaised, ToySequence, ToyWorker, WorkerDied, expected_output
from tests.simulation.test_control_plane import Run

RAISES, KILLS = 3, 4  # first tokens; those of other requests are larger


class PoisonedWorker(ToyWorker):
    """A poisoned request generates some tokens before it breaks a step. Its second token is their number plus 8."""

    def _compute(self, sequence: ToySequence, num_tokens: int, filled: dict[int, int]) -> int | None:
        kind = sequence.tokens[0]
        if kind in (RAISES, KILLS):
            end = sequence.num_computed + num_tokens
            if end >= sequence.num_prompt + sequence.tokens[1] - 8:
                raise StepRaised("ValueError: planted") if kind == RAISES else WorkerDied
        return super()._compute(sequence, num_tokens, filled)


class PoisonRun(Run):
    """Like Run, but only poison kills workers, and they come back. Caches are lost as in Run."""

    poison_failures = 2

    def __init__(self, seed: int) -> None:
        self.poisoned: dict[tuple[str, int], tuple[list[int], SamplingParams, int]] = {}
        super().__init__(seed)
        self.num_workers = len(self.system.workers)

    def attach(self) -> None:
        worker = PoisonedWorker(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_seqs=self.rng.choice([2, 8, 16]),
            max_batched_tokens=self.rng.choice([8, 16, 64]),
            num_host_blocks=self.rng.choice([0, self.num_blocks]),
        )
        worker.registration.max_loras = 9
        self.system.attach(worker)

    def tend(self) -> None:
        missing = len(self.system.workers) < self.num_workers
        if missing and (self.rng.random() < 0.2 or not self.system.moves()):
            self.attach()

    def fault(self) -> None:
        self.faults_left -= 1
        if self.system.has_cache:
            self.system.lose_cache()

    def submit(self) -> None:
        rng, room = self.rng, self.block_size * self.num_blocks
        if rng.random() < 0.8 or room < 30:
            super().submit()
            return
        after = rng.choice([0, 0, 1, 2, 5])
        prompt = [rng.choice([RAISES, KILLS]), 8 + after, *(rng.randrange(8, 100) for _ in range(rng.randrange(12)))]
        sampling = SamplingParams(top_p=1, max_tokens=after + rng.randrange(1, 5), seed=1, ignore_eos=True)
        session, handle = rng.choice("ab"), self.requests_left
        fields = {"priority": rng.randrange(3), "tenant": rng.choice("xyz")}
        if rng.random() < 0.3:
            prompt[1], after = 8, 0
            fields["beam"] = BeamOptions(width=rng.randrange(1, 4), num_return=1)
            sampling = SamplingParams(top_p=1, max_tokens=4)
        self.poisoned[session, handle] = prompt, sampling, after
        self.system.submit(session, handle, prompt, sampling, **fields)
        self.requests_left -= 1

    def check(self) -> None:
        counters = self.system.scheduler.counters
        assert counters.poisoned == len(self.poisoned)
        assert counters.failures <= len(self.poisoned) * 4
        for (session, handle), (prompt, sampling, after) in self.poisoned.items():
            client = self.system.clients[session]
            ending, got = client.endings[handle], client.tokens.get(handle, [])
            assert (ending.reason, ending.code) == (FinishReason.FINISH_REASON_ERROR, CODE_INTERNAL)
            assert "was the only request in" in ending.message
            # The last tokens may have been in transit when the worker died.
            assert got == expected_output(prompt, sampling)[: len(got)]
            assert len(got) <= after
        self.requeued = counters.requeued
        super().check()


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_poison_fails_alone_and_every_other_stream_equals_its_undisturbed_run(first: int) -> None:
    poisoned = retried = 0
    for seed in range(first, first + 20):
        run = PoisonRun(seed)
        try:
            run.play()
            run.check()
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        poisoned += len(run.poisoned)
        retried += run.system.scheduler.counters.retried
    assert poisoned > 20
    assert retried > 40


@pytest.mark.parametrize("preset", ["paceline", "vllm-v0", "sglang", "trtllm-static"])
@pytest.mark.parametrize("kind", [RAISES, KILLS])
def test_one_poison_among_many(preset: str, kind: int) -> None:
    """Sixteen streams and one poisoned request on one worker. The rule of suspects.py limits the failures."""
    system = LocalSystem(SchedulerConfig(), build(choose(preset, {}, {"chunked_prefill": True})))
    client = system.open("s")

    def attach() -> None:
        system.attach(PoisonedWorker(block_size=4, num_blocks=400, max_num_seqs=32, max_batched_tokens=512))

    attach()
    sampling = SamplingParams(top_p=1, max_tokens=20, seed=1, ignore_eos=True)
    prompts = {handle: [100 + handle, *range(20, 30)] for handle in range(1, 17)}
    for handle, prompt in prompts.items():
        system.submit("s", handle, prompt, sampling)
    system.submit("s", 99, [kind, 8 + 5, 40, 41], sampling)
    while 99 not in client.endings:
        if not system.workers:
            attach()
        system.move(*system.moves()[0])
    if not system.workers:
        attach()
    system.run()
    counters = system.scheduler.counters
    assert client.endings[99].code == CODE_INTERNAL
    assert {handle: client.tokens[handle] for handle in prompts} == {
        handle: expected_output(prompt, sampling) for handle, prompt in prompts.items()
    }
    # One failure of all seventeen, one of a group of four, and two alone; fewer if fewer requests ran together.
    assert (counters.poisoned, counters.failures <= 4) == (1, True)
    spans = system.scheduler.timeline.explain("s-99", system.now_s)
    assert spans is not None
    assert any("it was in that step and is retried separately" in span.detail for span in spans)
    assert any("separately" in span.detail for span in spans if span.reason == "running")
    assert "was the only request in 2 failed steps in a row" in spans[-1].detail
    system.assert_at_rest()
