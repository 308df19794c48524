"""The real scheduler and cache cores with toy workers, under seeded interleavings and faults: the invariants of
docs/design.md.

The toy worker notices every wrong block. These tests check that each request gets the tokens of an undisturbed run.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest

from paceline.v1.common_pb2 import FinishReason, SamplingParams
from paceline.v1.inference_pb2 import BeamOptions, EarlyStopping
from scheduler_svc.core.lifecycle.beam_groups import make_search
from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.presets import PRESETS
from scheduler_svc.policies.registry import KINDS, build, choose, names
from simulator.system import LocalSystem, raise_policy_error
from simulator.toy_worker import EOS, ToyWorker, expected_hypotheses, expected_output, toy_logprob

NUM_SEEDS = 50  # many more, with all services and their networks: test_world.py
MAX_MOVES = 50_000


class Run:
    """One seeded run: random requests over shared prefixes, cancels, worker kills, cache restarts."""

    # Up to 5 healthy workers are killed. With a lower limit an innocent request could be found poisoned.
    poison_failures = 9
    tenant_limits: tuple[int, ...] = (0, 0, 10, 40, 100)
    speculation: ClassVar[dict[str, Any]] = {}  # settings of speculative decoding

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.placements = random.Random(f"placement {seed}")
        self.block_size = self.rng.choice([1, 2, 4, 8, 16])
        self.num_blocks = self.rng.choice([40, 80, 200, 1000]) // self.block_size + 2
        config = SchedulerConfig(
            window=self.rng.choice([1, 2, 3]),
            prefix_caching=self.rng.random() < 0.9,
            poison_failures=self.poison_failures,
            tenant_max_running_tokens=random.Random(f"limit {seed}").choice(self.tenant_limits),
            **self.speculation,
        )
        self.system = LocalSystem(config, self.policies(), self.policy_failed)
        self.families = [[self.rng.randrange(8, 100) for _ in range(40)] for _ in range(3)]
        self.asked: dict[tuple[str, int], tuple[list[int], SamplingParams]] = {}
        self.searches: dict[tuple[str, int], tuple[list[int], SamplingParams, BeamOptions]] = {}
        self.cancelled: set[tuple[str, int]] = set()
        self.faults_left = 5
        self.requeued = 0  # with a lost worker
        self.requests_left = self.rng.randrange(1, 30)
        for _ in range(self.rng.randrange(1, 3)):
            self.attach()
        for session in "ab":
            self.system.open(session, self.rng.choice([1, 2, 64]))

    def policies(self) -> Policies:
        """Any preset, or any combination of policies."""
        rng = self.rng
        preset = rng.choice([*PRESETS])
        kinds = [kind for kind in KINDS if kind != "placement"]
        overrides = {kind: rng.choice(sorted(names(kind))) for kind in kinds if rng.random() < 0.3}
        overrides["placement"] = self.placements.choice(sorted(names("placement")))
        options = {
            "chunked_prefill": rng.random() < 0.5,
            "charges_blocks": rng.random() < 0.5,
            "closes_when_full": rng.random() < 0.5,
            "max_prefill_tokens": rng.choice([0, 5, 16384]),
            "watermark": rng.choice([0.0, 0.01, 0.2]),
            "chunking": rng.choice(["first-come", "equal-progress"]),
            "chunk_unit_tokens": rng.choice([0, 1, 4]),
            "long_prefill_token_threshold": rng.choice([0, 3]),
            "requeue": rng.choice(["arrival", "front", "back"]),
            "prefill_decode_interval": rng.choice([0, 2]),
            "batch_wait_iters": rng.choice([0, 3]),
            "batch_wait_max_tokens_ratio": 0.5,
            "ageing_per_s": rng.choice([0.0, 0.1]),
            "mode": rng.choice(["recompute", "swap", "swap", "auto"]),
        }
        return build(choose(preset, overrides, options))

    def change_policies(self) -> None:
        self.system.scheduler.set_policies(self.policies())
        self.system.poll()

    def policy_failed(self, error: Exception) -> None:
        raise_policy_error(error)

    def attach(self) -> None:
        worker = ToyWorker(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_seqs=self.rng.choice([2, 4, 8]),
            max_batched_tokens=self.rng.choice([8, 16, 64]),
            num_host_blocks=self.rng.choice([0, self.num_blocks // 4, self.num_blocks, 4 * self.num_blocks]),
        )
        worker.registration.max_loras = self.rng.choice([1, 2, 9])
        self.system.attach(worker)

    def submit(self) -> None:
        rng, room = self.rng, self.block_size * self.num_blocks
        length = rng.randrange(1, min(30, room - 2))
        shared = rng.choice(self.families)[: rng.randrange(length + 1)]
        prompt = (shared + [rng.randrange(8, 1000) for _ in range(length)])[:length]
        session, first = rng.choice("ab"), self.requests_left
        fields = {"priority": rng.randrange(3), "tenant": rng.choice("xyz"), "lora": rng.choice(["", *"abc"])}
        max_tokens = rng.randrange(
            1, min(40, room - length + 2)
        )  # prompt and output exceed the pool by at most one token: the KV of the last token is never stored
        ignore_eos = rng.random() < 0.3
        if rng.random() < 0.1:
            sampling = SamplingParams(top_p=1, max_tokens=min(max_tokens, 10), ignore_eos=ignore_eos)
            width = rng.randrange(1, 5)
            num_return, early = rng.randrange(1, width + 1), rng.choice(EarlyStopping.values())
            beam = BeamOptions(width=width, num_return=num_return, early_stopping=early)
            self.searches[session, first] = prompt, sampling, beam
            self.system.submit(session, first, prompt, sampling, beam=beam, **fields)
            self.requests_left -= 1
            return
        for _ in range(rng.choice([1, 1, 1, 2, 4])):  # several samples of one prompt fork from the first one
            seed = rng.randrange(5)
            sampling = SamplingParams(top_p=1, max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
            sampling.logprobs = rng.random() < 0.2
            sampling.prompt_logprobs = rng.random() < 0.2
            sampling.top_k = self.period()
            handle = self.requests_left
            self.asked[session, handle] = prompt, sampling
            self.system.submit(session, handle, prompt, sampling, fork_of=first if handle != first else 0, **fields)
            self.requests_left -= 1
            if not self.requests_left:
                return

    def period(self) -> int:
        """After how many tokens the text of the next request repeats itself; 0: never."""
        return 0

    def to_cancel(self) -> list[tuple[str, int]]:
        """The requests of which one may be cancelled now."""
        return [*self.asked, *self.searches] if self.rng.random() < 0.1 else []

    def fault(self) -> None:
        self.faults_left -= 1
        if self.rng.random() < 0.4:
            if self.system.has_cache:
                self.lose_cache()
            return
        counters = self.system.scheduler.counters
        before = counters.requeued
        self.system.kill(self.rng.choice(self.system.workers))
        self.requeued += counters.requeued - before
        if not self.system.workers or self.rng.random() < 0.5:
            self.attach()

    def lose_cache(self) -> None:
        """Neither the loss of the cache nor its return, at once or later, changes which requests run."""
        scheduler, before = self.system.scheduler, self.running()
        requeued = scheduler.counters.requeued
        self.system.lose_cache()
        assert self.running() == before
        assert scheduler.counters.requeued == requeued
        if self.rng.random() < 0.5:
            self.connect_cache()

    def connect_cache(self) -> None:
        before = self.running()
        self.system.connect_cache()
        assert self.running() == before

    def running(self) -> list[tuple[int, int, int, bytes]]:
        """Each running sequence and parked beam: worker, slot, sequence and device blocks."""
        for worker in self.system.scheduler.workers.values():
            worker.batch.slots.complete_tables()
        return [
            (worker.id, request.held.slot, request.held.sequence, request.held.block_table.tobytes())
            for worker in self.system.scheduler.workers.values()
            for request in [*worker.batch.running.values(), *worker.parked.values()]
        ]

    def tend(self) -> None:
        """Before each move."""
        for worker in self.system.scheduler.workers.values():
            bound = Counter(request.metadata.lora for request in worker.bound if request.metadata.lora)
            assert worker.adapters.num_bound == bound
            assert len(bound) <= worker.registration.max_loras

    def play(self) -> None:
        for _ in range(MAX_MOVES):
            dice = self.rng.random()
            self.tend()
            moves = self.system.moves()
            if self.requests_left and dice < 0.05:
                self.submit()
            elif self.faults_left and dice < 0.053:
                self.fault()
            elif dice < 0.056:
                self.change_policies()
            elif not self.system.has_cache and (dice < 0.1 or not moves):
                self.connect_cache()
            elif dice > 0.9 and (keys := self.to_cancel()):
                key = self.rng.choice(keys)
                self.cancelled.add(key)
                self.system.cancel(*key)
            elif moves:
                self.system.move(*self.rng.choice(moves))
            elif not self.requests_left:
                return
        raise AssertionError("does not come to rest")

    def check(self) -> None:
        core = self.system.scheduler
        assert not core.life.budgets.online.tenant_tokens
        assert not core.life.budgets.offline.tenant_tokens
        assert not core.timeline._live
        for (session, handle), (prompt, sampling) in self.asked.items():
            client = self.system.clients[session]
            got, right = client.tokens.get(handle, []), expected_output(prompt, sampling)
            scores = [toy_logprob([*prompt, *got[: i + 1]]) for i in range(len(got))]
            assert client.scores.get(handle, []) == (scores if sampling.logprobs else [])
            reason = client.endings[handle].reason
            if reason == FinishReason.FINISH_REASON_ABORT:
                assert (session, handle) in self.cancelled
                assert got == right[: len(got)]
            else:
                assert reason in (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH)
                assert got == right
                wanted = range(1, len(prompt)) if sampling.prompt_logprobs else ()
                prompt_scores = {i: toy_logprob(prompt[: i + 1]) for i in wanted}
                assert client.prompt_scores.get(handle, {}) == prompt_scores
        for (session, handle), (prompt, sampling, beam) in self.searches.items():
            client = self.system.clients[session]
            ending = client.endings[handle]
            assert handle not in client.tokens
            if ending.reason == FinishReason.FINISH_REASON_ABORT:
                assert (session, handle) in self.cancelled
                continue
            found = [(np.frombuffer(h.token_ids, np.int32).tolist(), h.score) for h in ending.hypotheses]
            best = expected_hypotheses(prompt, make_search(beam, sampling, [EOS]))
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in best]
            assert [score for _, score in found] == pytest.approx([score for _, score in best])
        counters = self.system.scheduler.counters
        assert (counters.requeued, counters.refused_restores) == (self.requeued, 0), "a lost cache requeues no request"
        self.system.assert_at_rest()


class SwapRun(Run):
    """Pools that are too small for the running sequences, and host blocks for preempted ones."""

    def __init__(self, seed: int) -> None:
        self.preset = random.Random(seed).choice(
            ["vllm-v0", "vllm-v1", "vllm-v1-priority", "paceline", "trtllm-max-util"]
        )
        super().__init__(seed)

    def policies(self) -> Policies:
        requeue = self.rng.choice(["arrival", "front", "back"])
        options = {"mode": self.rng.choice(["swap", "swap", "auto"]), "requeue": requeue, "chunked_prefill": True}
        return build(choose(self.preset, {}, {**options, "watermark": 0.0, "resume_watermark": 0.0}))

    def attach(self) -> None:
        self.num_blocks = min(self.num_blocks, 80 // self.block_size + 1)
        worker = ToyWorker(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_seqs=8,
            max_batched_tokens=64,
            num_host_blocks=self.rng.choice([self.num_blocks // 2, self.num_blocks, 4 * self.num_blocks]),
        )
        worker.registration.max_loras = self.rng.choice([1, 2, 9])
        self.system.attach(worker)

    def fault(self) -> None:
        """Like the base class, or drains a worker."""
        if self.rng.random() < 0.6:
            super().fault()
        else:
            self.faults_left -= 1
            self.system.scheduler.worker_drain(self.rng.choice(self.system.workers).id)
            self.system.poll()
        if all(worker.draining for worker in self.system.scheduler.workers.values()):
            self.attach()


@pytest.mark.parametrize("first", [0])
def test_every_stream_equals_its_undisturbed_run_also_swapped(first: int) -> None:
    swapped = 0
    for seed in range(first, first + 50):
        run = SwapRun(seed)
        try:
            run.play()
            run.check()
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        swapped += run.system.scheduler.counters.swapped_in
    assert swapped > 50


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 50))
def test_every_stream_equals_its_undisturbed_run(first: int) -> None:
    for seed in range(first, first + 50):
        run = Run(seed)
        try:
            run.play()
            run.check()
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def test_the_seeds_cover_every_event() -> None:
    """Preemption, swaps, hits, evictions, lost workers, lost caches: all happened, or the test above shows little."""
    preempted = requeued = hits = evicted = forked = swapped_out = swapped_in = demoted = promoted = restored = 0
    for seed in range(NUM_SEEDS):
        run = Run(seed)
        run.play()
        preempted += run.system.scheduler.counters.preempted
        requeued += run.system.scheduler.counters.requeued
        restored += run.system.scheduler.counters.restored
        hits += run.system.cache.counters.prefix_hit_tokens
        evicted += run.system.cache.counters.evicted_blocks
        forked += run.system.cache.counters.forked_sequences
        swapped_out += run.system.scheduler.counters.swapped_out
        swapped_in += run.system.cache.counters.swapped_in_blocks
        demoted += run.system.cache.counters.demoted_blocks
        promoted += run.system.cache.counters.promoted_blocks
    assert min(preempted, requeued, hits, evicted, forked, swapped_out, swapped_in, demoted, promoted, restored) > 10


def test_same_seed_same_decisions() -> None:
    first, second = Run(21), Run(21)
    first.play()
    second.play()
    assert first.system.scheduler.counters.restored > 0
    assert first.system.scheduler.counters == second.system.scheduler.counters
    assert first.system.cache.counters == second.system.cache.counters
