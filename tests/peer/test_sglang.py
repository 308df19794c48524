"""Our `sglang` and `sglang-lpm` presets beside SGLang's own scheduler, step by step, on random workloads.

Every step must schedule the same requests with the same numbers of tokens and of cached tokens, retract the same
requests and finish the same requests. One difference is allowed (docs/preset-checks.md): the caches may hold different
blocks after SGLang has evicted, retracted, or replaced blocks that were computed twice. So where the decisions differ,
one of these three must have happened before. The state before the step must differ too: the available blocks, or the
cached tokens of a waiting request. The comparison of that run ends there. A run in which the states agree is compared
to its end.

`make peer-test` runs this; PEER_SGLANG_PYTHON names the interpreter of SGLang's environment (tests/peer/env.sh).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import pytest

from scheduler_svc.core.policy.step import Step as ScheduledStep
from scheduler_svc.policies.capacity.token_ratio import TokenRatio
from simulator.scenario import ScenarioRun, ScenarioStep
from simulator.scenario_file import Scenario
from tests.peer.sglang_workloads import workload

DRIVER = Path(__file__).with_name("sglang_driver.py")
PYTHON = os.environ.get("PEER_SGLANG_PYTHON", "")
SEEDS = range(int(os.environ.get("PEER_SEEDS", "60")))
GROUPS = [
    ("sglang", "uncached"),
    ("sglang", "roomy"),
    ("sglang", "tight"),
    ("sglang-lpm", "roomy"),
    ("sglang-lpm", "tight"),
]

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="PEER_SGLANG_PYTHON is not set: `make peer-test` sets it"),
    pytest.mark.timeout(1800),
]


@dataclass(frozen=True)
class State:
    """What a step's decisions depend on, except the running requests, which follow from earlier steps."""

    available_blocks: int
    matches: dict[str, list[int]]  # of waiting requests: cached tokens, and how many of them are in use


class Watched(TokenRatio):
    """The capacity policy, which also records the state at the beginning of a step."""

    def __init__(self, options: dict[str, Any]) -> None:
        names = ("init_new_token_ratio", "retract_decode_steps")
        super().__init__(**{name: options[name] for name in names if name in options})
        self.states: dict[int, State] = {}
        self.now = 0

    def begin(self, step: ScheduledStep) -> None:
        if not step.preempted:  # otherwise the step is scheduled again
            matches = {
                request.request_id: [step.cached_tokens(request), request.referenced_tokens(step.worker_id)]
                for request in step.waiting()
            }
            self.states.setdefault(self.now, State(step.available_blocks, matches))
        super().begin(step)


class WatchedRun(ScenarioRun):
    def __init__(self, scenario: Scenario) -> None:
        self.watched = Watched(scenario.options)
        super().__init__(scenario, replace(scenario.policies(), capacity=self.watched))

    def _submit(self, step: ScenarioStep) -> None:
        self.watched.now = step.step
        super()._submit(step)


def decided(step: dict[str, Any]) -> dict[str, Any]:
    return {
        "scheduled": sorted((s["id"], s["tokens"], s["cached_tokens"], s["phase"]) for s in step["scheduled"]),
        "preempted": sorted(p["id"] for p in step["preempted"]),
        "finished": sorted(step["finished"]),
    }


@dataclass
class Tally:
    figures: Counter[str] = field(default_factory=Counter)

    def compare(self, scenario: dict[str, Any], theirs: dict[str, Any]) -> None:
        run = WatchedRun(Scenario.model_validate(scenario))
        ours = run.play().as_json()
        causes: set[str] = set()
        for number, (our_step, their_step) in enumerate(zip(ours["steps"], theirs["steps"], strict=False)):
            causes |= {cause for cause in ("deduplicated", "evicted") if their_step[cause]}
            causes |= {"retracted" for _ in their_step["preempted"] if scenario["prefix_caching"]}
            if decided(our_step) != decided(their_step):
                state = State(**their_step["state"])
                excused = causes and run.watched.states[number] != state
                assert excused, (
                    f"step {number}: ours {decided(our_step)}, SGLang {decided(their_step)}; before it: "
                    f"ours {run.watched.states[number]}, SGLang {state}; after {causes}; {json.dumps(scenario)}"
                )
                self.figures["runs compared until the caches differ"] += 1
                return
            self.figures["steps"] += 1
            self.figures["retractions"] += len(our_step["preempted"])
        assert len(ours["steps"]) == len(theirs["steps"]), json.dumps(scenario)
        assert ours["generated_tokens"] == theirs["generated_tokens"]
        self.figures["runs compared to the end"] += 1


class SGLang:
    """Its driver, kept for all scenarios: it takes long to start."""

    def __init__(self, stderr: IO[str]) -> None:
        self._stderr = stderr
        self._driver = subprocess.Popen(
            [PYTHON, str(DRIVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )

    def play(self, scenario: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._driver.stdin, self._driver.stdout
        assert stdin
        assert stdout
        with suppress(BrokenPipeError):  # the driver has died: there will be no answer
            print(json.dumps(scenario), file=stdin, flush=True)
        line = stdout.readline()
        if not line:
            self._stderr.seek(0)
            pytest.fail(f"SGLang's driver died: {self._stderr.read()[-2000:]}")
        outcome: dict[str, Any] = json.loads(line)
        return outcome

    def close(self) -> None:
        self._driver.communicate()


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLang]:
    with (tmp_path_factory.mktemp("sglang") / "stderr").open("w+") as stderr:
        driver = SGLang(stderr)
        yield driver
        driver.close()


@pytest.mark.parametrize(("preset", "kind"), GROUPS)
def test_decides_as_sglang(sglang: SGLang, preset: str, kind: str) -> None:
    tally = Tally()
    for seed in SEEDS:
        scenario = workload(seed, preset, kind)
        tally.compare(scenario, sglang.play(scenario))
    print(f"{preset}, {kind}: {dict(tally.figures)}")
    if kind != "tight":
        assert not tally.figures["runs compared until the caches differ"]
