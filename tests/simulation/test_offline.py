"""Offline requests among online ones, under seeded interleavings and faults: no request loses a token, and no online
request yields to an offline one."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.requests.request import Request
from tests.simulation.test_control_plane import Run

NUM_SEEDS = 60


class OfflineRun(Run):
    """Half of the requests are offline. Pools are small and slots are few, so that the classes compete."""

    def submit(self) -> None:
        rng, room = self.rng, self.block_size * self.num_blocks
        length = rng.randrange(1, min(30, room - 2))
        shared = rng.choice(self.families)[: rng.randrange(length + 1)]
        prompt = (shared + [rng.randrange(8, 1000) for _ in range(length)])[:length]
        session, first = rng.choice("ab"), self.requests_left
        fields = {"tenant": rng.choice("xy"), "lora": rng.choice(["", "", "a", "b"]), "offline": rng.random() < 0.5}
        max_tokens = rng.randrange(1, min(40, room - length + 2))
        for seed in range(rng.choice([1, 1, 3])):
            if not (handle := self.requests_left):
                return
            sampling = SamplingParams(top_p=1, max_tokens=max_tokens, seed=seed, ignore_eos=rng.random() < 0.3)
            sampling.top_k = self.period()
            self.asked[session, handle] = prompt, sampling
            self.system.submit(session, handle, prompt, sampling, fork_of=first if handle != first else 0, **fields)
            self.requests_left -= 1

    def tend(self) -> None:
        super().tend()
        scheduler = self.system.scheduler
        assert not any(request.metadata.offline for request in scheduler.queue.online)
        assert all(request.metadata.offline for request in scheduler.queue.offline)
        for worker in scheduler.workers.values():
            assert worker.batch.offline == {slot for slot, one in worker.batch.running.items() if one.metadata.offline}
            assert not any(request.metadata.offline for request in worker.host.swapped.values())


def test_every_stream_equals_its_undisturbed_run_with_offline_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    preempt = Lifecycle.preempt

    def noted(self: Lifecycle, request: Request, requeue: str, mode: str, why: str) -> None:
        seen[f"{'offline' if request.metadata.offline else 'online'}: {why}"] += 1
        preempt(self, request, requeue, mode, why)

    monkeypatch.setattr(Lifecycle, "preempt", noted)
    for seed in range(NUM_SEEDS):
        run = OfflineRun(seed)
        try:
            run.play()
            run.check()
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        counters = run.system.scheduler.counters
        seen.update({"requeued": counters.requeued, "restored": counters.restored})
    assert seen["online: preempted for online requests"] == 0
    assert seen["offline: preempted for online requests"] > 50
    assert seen["offline: preempted to free blocks for running sequences"] > 10
    assert min(seen["requeued"], seen["restored"]) > 10
