"""Pins and resets at any moment change no stream, and every request still ends (docs/design.md, invariants)."""

from __future__ import annotations

import contextlib

import pytest

from cache_svc.core import admin
from cache_svc.core.errors import OpError
from cache_svc.core.tree.nodes import Namespace
from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.policies.presets import PRESETS
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem, WorkerEnd
from simulator.toy_worker import ToyWorker, expected_output
from tests.simulation.test_control_plane import Run
from tests.unit.cache import driver as d


class PinRun(Run):
    pinned = given_up = 0
    tenant_limits = (0,)

    def policies(self) -> Policies:
        """All presets, also those that reserve all blocks that a request may need."""
        preset = self.rng.choice([*PRESETS])
        return build(choose(preset, {}, {"chunked_prefill": True, "watermark": self.rng.choice([0.0, 0.2])}))

    def play(self) -> None:
        move = self.system.move

        def and_pin(kind: str, end: WorkerEnd | None) -> None:
            if self.rng.random() < 0.1:
                self.change_pins()
            before = self.system.cache.counters.pins_given_up
            move(kind, end)
            self.given_up += max(0, self.system.cache.counters.pins_given_up - before)

        self.system.move = and_pin  # type: ignore[method-assign]
        super().play()
        self.system.move = move  # type: ignore[method-assign]
        for name in list(self.system.cache.pins.by_name):
            admin.unpin(self.system.cache, name)
        # The scheduler learns of the change in the exchanges of one more request.
        key, prompt, sampling = ("a", 1000), [9], SamplingParams(top_p=1, max_tokens=1)
        self.asked[key] = prompt, sampling
        self.system.submit(*key, prompt, sampling)
        super().play()

    def change_pins(self) -> None:
        core, dice = self.system.cache, self.rng.random()
        if dice < 0.1:
            admin.forget_unused(core)
        elif dice < 0.3 and core.pins.by_name:
            admin.unpin(core, self.rng.choice(list(core.pins.by_name)))
        elif self.asked:
            prompt, sampling = self.rng.choice(list(self.asked.values()))
            tokens = d.pack([*prompt, *expected_output(prompt, sampling)])
            for tenant in "xyz":  # one of these tenants has sent the request
                namespace = Namespace(cache_salt=self.system.scheduler.namespaces.name(tenant, ""))
                with contextlib.suppress(OpError):
                    admin.pin(core, str(self.rng.random()), tokens, namespace)
                    self.pinned += 1
        core.check_invariants()


@pytest.mark.parametrize("first", [0])
def test_every_stream_equals_its_undisturbed_run(first: int) -> None:
    pinned = given_up = 0
    for seed in range(first, first + 50):
        run = PinRun(seed)
        try:
            run.play()
            run.check()
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        pinned += run.pinned
        given_up += run.given_up
    assert pinned > 100
    assert given_up > 3


@pytest.mark.parametrize("preset", PRESETS)
def test_a_pin_is_given_up_for_requests_that_do_not_fit_beside_it(preset: str) -> None:
    system = LocalSystem(policies=build(choose(preset, {}, {"chunked_prefill": True})))
    system.attach(ToyWorker(block_size=4, num_blocks=24, max_num_seqs=4, max_batched_tokens=64))
    client = system.open("a")
    sampling = SamplingParams(top_p=1, max_tokens=1)
    pinned = list(range(100, 148))
    system.submit("a", 1, pinned, sampling)
    system.run()
    admin.pin(system.cache, "system", d.pack(pinned))
    long = SamplingParams(top_p=1, max_tokens=70, ignore_eos=True, seed=1)  # needs 20 of the 24 blocks; 12 are pinned
    for handle in (2, 3):
        system.submit("a", handle, [9] * 8, long)
    system.run()
    for handle in (2, 3):
        assert client.tokens[handle] == expected_output([9] * 8, long)
    assert system.cache.counters.pins_given_up == 1
