"""A common prefix of requests that arrive together is computed once, even if any of them is cancelled meanwhile.

The toy worker notices every block that is read before it is written."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.inference_pb2 import SessionRequest, Submission
from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.requests.phases import Event, Phase
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker, expected_output
from tests.simulation.test_control_plane import Run


class SharingRun(Run):
    """Bursts of equal beginnings, chunks, pools that run dry, and cancels between an exchange and its answer."""

    tenant_limits = (0,)  # no limit, so that all requests may run together

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.requests_left = self.rng.randrange(10, 40)

    def policies(self) -> Policies:
        preset, watermark = self.rng.choice(["paceline", "vllm-v1", "vllm-v1-priority"]), self.rng.choice([0.0, 0.1])
        return build(choose(preset, {}, {"watermark": watermark, "mode": self.rng.choice(["recompute", "swap"])}))

    def submit(self) -> None:
        rng = self.rng
        family, room = rng.choice(self.families), self.block_size * self.num_blocks
        for _ in range(min(rng.choice([2, 3, 5]), self.requests_left)):
            prompt = family[: rng.randrange(8, 40)] + [rng.randrange(8, 20) for _ in range(rng.randrange(1, 4))]
            prompt = prompt[: room - 12]
            sampling = SamplingParams(top_p=1, max_tokens=rng.randrange(1, 12), seed=1)
            session, handle = rng.choice("ab"), self.requests_left
            self.asked[session, handle] = prompt, sampling
            self.system.submit(session, handle, prompt, sampling, priority=rng.randrange(3))
            self.requests_left -= 1

    def to_cancel(self) -> list[tuple[str, int]]:
        """Of workers with a step that waits for the cache: the running requests, and those that the step admits."""
        workers = self.system.scheduler.workers.values()
        return [(r.session_id, r.handle) for w in workers if w.pending_step is not None for r in w.bound]


def test_every_stream_equals_its_undisturbed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    taken_back = 0
    requeue = Lifecycle.requeue

    def noted(self: Lifecycle, request: Request, event: Event = Event.REJECT) -> None:
        nonlocal taken_back
        taken_back += request.phase is Phase.ALLOCATING
        requeue(self, request, event)

    monkeypatch.setattr(Lifecycle, "requeue", noted)
    for seed in range(60):
        run = SharingRun(seed)
        try:
            run.play()
            run.check()
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    assert taken_back > 5


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_equal_beginnings_are_computed_once(block_size: int) -> None:
    system = LocalSystem(SchedulerConfig(), build(choose("paceline")))
    client = system.open("s")
    end = system.attach(ToyWorker(block_size=block_size, num_blocks=512, max_num_seqs=16, max_batched_tokens=256))
    shared, sampling = list(range(100, 164)), SamplingParams(top_p=1, max_tokens=3, seed=1, ignore_eos=True)
    prompts = {handle: [*shared, handle, handle] for handle in range(1, 9)}
    submissions = [
        Submission(handle=handle, prompt_token_ids=np.array(prompt, np.int32).tobytes(), sampling=sampling)
        for handle, prompt in prompts.items()
    ]
    system.scheduler.session_message("s", SessionRequest(submissions=submissions), 0.0)
    system.poll()
    while not end.plans:
        system.move(*system.moves()[0])
    first = end.plans[0]
    assert np.frombuffer(first.prefill_tokens, np.int32).tolist() == [66, *[2] * 7], "all of it in one step"
    system.run()
    assert client.tokens == {handle: expected_output(prompt, sampling) for handle, prompt in prompts.items()}
    assert {client.endings[handle].cached_tokens for handle in range(2, 9)} == {64}
    system.assert_at_rest()
