"""A policy may do anything wrong: no request is lost, every stream is the undisturbed one, and the error is counted."""

from __future__ import annotations

import dataclasses
import random

import pytest

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.policies.api import Step
from scheduler_svc.policies.capacity.watermark import Watermark
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker, expected_output
from tests.simulation.test_control_plane import Run
from tests.support.hostile import Deed, admits_all, everything_wrong, hostile, writes

# Deeds that count as no error: the policy's view refuses them, or they are allowed.
HARMLESS = (writes, admits_all)


class HostileRun(Run):
    """A seeded run of test_control_plane with one policy that misbehaves."""

    def __init__(self, seed: int, kind: str, hook: str, deed: Deed, rate: float) -> None:
        self.choice = kind, hook, deed, rate
        self.errors: list[Exception] = []
        self.guests: list[object] = []
        super().__init__(seed)

    def attach(self) -> None:
        if self.choice[0] == "preemption":
            self.num_blocks = 40 // self.block_size + 2  # too few for all: some request is preempted
        super().attach()

    def policies(self) -> Policies:
        kind, hook, deed, rate = self.choice
        guest = hostile(kind, hook, deed, random.Random(self.rng.random()), rate)
        self.guests.append(guest)
        return dataclasses.replace(build(choose()), **{kind: guest})

    def change_policies(self) -> None:
        before = self.system.scheduler.policies
        try:
            super().change_policies()
        except Exception:  # the scheduler refuses an order that raises for a waiting request
            assert self.choice[:2] == ("order", "add")
            assert self.system.scheduler.policies is before

    def submit(self) -> None:
        super().submit()
        self.system.scheduler.tick(self.system.now_s)  # at which an order may give up waiting requests
        self.system.poll()

    def policy_failed(self, error: Exception) -> None:
        self.errors.append(error)

    @property
    def num_deeds(self) -> int:
        return sum(guest.deeds for guest in self.guests)  # type: ignore[attr-defined]


def name(deed: Deed) -> str:
    return deed.__name__


@pytest.mark.parametrize(
    ("kind", "hook", "deed"), everything_wrong(), ids=lambda value: getattr(value, "__name__", value)
)
def test_no_request_is_lost(kind: str, hook: str, deed: Deed) -> None:
    deeds = errors = 0
    for seed in range(2, 4):
        run = HostileRun(seed, kind, hook, deed, rate=[0.2, 1.0][seed % 2])
        run.play()
        run.check()
        deeds += run.num_deeds
        errors += len(run.errors)
        assert run.system.scheduler.counters.policy_errors == len(run.errors)
    if deed in HARMLESS:
        assert not errors
    assert deeds


class PausesAll(Watermark):
    def begin(self, step: Step) -> None:
        super().begin(step)
        step.pause(step.running)


def test_a_policy_that_pauses_all_running_requests_stops_none() -> None:
    errors: list[Exception] = []
    policies = dataclasses.replace(build(choose()), capacity=PausesAll())
    system = LocalSystem(policies=policies, on_policy_error=errors.append)
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=8, max_batched_tokens=64))
    client = system.open("s")
    sampling = SamplingParams(top_p=1.0, max_tokens=6, seed=1, ignore_eos=True)
    for handle in range(3):
        system.submit("s", handle, [9 + handle] * 10, sampling)
    system.run()
    for handle in range(3):
        assert client.tokens[handle] == expected_output([9 + handle] * 10, sampling)
    system.assert_at_rest()
    assert any("paused" in str(error) for error in errors)
