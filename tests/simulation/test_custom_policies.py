"""The policies of examples/custom_policies: docs/custom-policies.md shows the same code, and it works as described."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.policy.order import PolicyError
from scheduler_svc.policies import registry
from scheduler_svc.policies.registry import build, choose
from simulator.scenario import play
from simulator.scenario_file import Scenario
from tests.simulation.test_control_plane import Run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_policies"
CAPACITY, ORDER = "custom_policies.capacity:ReserveAll", "custom_policies.order:ShortestPromptFirst"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As if pip had installed the package: its entry points are found beside our own."""
    points = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"][registry.GROUP]
    found = [EntryPoint(name, value, registry.GROUP) for name, value in points.items()]
    ours = registry.entry_points(group=registry.GROUP)  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "entry_points", lambda group: [*ours, *found])
    registry.names.cache_clear()
    yield
    registry.names.cache_clear()


def blocks_of(language: str) -> list[str]:
    text = (ROOT / "docs" / "custom-policies.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [code for of, code in blocks if of == language]


def test_the_page_shows_the_code() -> None:
    shown = {}
    for block in blocks_of("python") + blocks_of("toml"):
        name, _, code = block.partition("\n")
        shown[name.removeprefix("# ")] = code
    assert set(shown) == {
        "custom_policies/capacity.py",
        "custom_policies/order.py",
        "custom_policies/placement.py",
        "pyproject.toml",
    }
    for name, code in shown.items():
        assert code == (EXAMPLE / name).read_text(), f"docs/custom-policies.md shows another {name}"
    assert len(shown["custom_policies/capacity.py"].splitlines()) <= 30


def test_the_page_shows_the_output_of_its_scenario(tmp_path: Path) -> None:
    [scenario] = blocks_of("json")
    (tmp_path / "try.json").write_text(scenario)
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "scenario", str(tmp_path / "try.json")],
        env={**os.environ, "PYTHONPATH": f"{EXAMPLE}{os.pathsep}{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    [shown] = [block for block in blocks_of("") if "paceline scenario try.json" in block]
    printed = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
    assert shown == f"$ paceline scenario try.json\n{printed}"


@pytest.mark.usefixtures("_installed")
def test_entry_points_are_found() -> None:
    assert registry.names("capacity")["reserve-all"] == CAPACITY
    assert registry.names("order")["shortest-prompt"] == ORDER
    policies = build(choose("", {"capacity": "reserve-all", "order": "shortest-prompt"}, {"ageing_tokens_per_s": 5}))
    assert type(policies.capacity).__name__ == "ReserveAll"
    assert policies.order.ageing_tokens_per_s == 5  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_installed")
def test_a_foreign_package_cannot_take_the_name_of_a_built_in_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [*registry.entry_points(group=registry.GROUP), EntryPoint("order.fcfs", ORDER, registry.GROUP)]  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry.names.cache_clear()
    assert registry.names("order")["fcfs"] == "scheduler_svc.policies.order.fcfs:FirstComeFirstServed"


@pytest.mark.usefixtures("_installed")
def test_a_broken_package_is_an_error_only_if_its_policy_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [*registry.entry_points(group=registry.GROUP), EntryPoint("order.lost", "lost.module:X", registry.GROUP)]  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry.names.cache_clear()
    # No chosen policy has this option, so all policies are looked at for it.
    build(choose("", {}, {"ageing_tokens_per_s": 1.0}))
    with pytest.raises(PolicyError, match=r"order: lost\.module:X cannot be imported"):
        build(choose("", {"order": "lost"}))


@pytest.mark.parametrize("value", [-1, "100", True, float("nan"), None])
def test_options_are_checked(value: object) -> None:
    with pytest.raises(PolicyError, match=r"^options\.ageing_tokens_per_s: "):
        build(choose("", {"order": ORDER}, {"ageing_tokens_per_s": value}))


class CustomRun(Run):
    """The seeded runs of test_control_plane, all of them with these two policies."""

    def policies(self) -> Policies:
        options = {"ageing_tokens_per_s": self.rng.choice([0.0, 10.0]), "chunked_prefill": True}
        return build(choose(self.rng.choice(["paceline", "vllm-v0"]), {"order": ORDER, "capacity": CAPACITY}, options))


def test_every_stream_equals_its_undisturbed_run() -> None:
    for seed in range(20):
        run = CustomRun(seed)
        run.play()
        run.check()
        assert run.system.scheduler.counters.policy_errors == 0


def random_scenario(seed: int, capacity: str) -> dict[str, Any]:
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 10])
    num_blocks = rng.choice([30, 60, 120]) // block_size + 4
    room = num_blocks * block_size
    requests = []
    for i in range(rng.randrange(3, 25)):
        prompt = rng.randrange(2, max(3, room // 2))
        request = {"id": str(i), "arrive": rng.randrange(30), "prompt_len": prompt}
        request["max_new_tokens"] = rng.randrange(1, max(2, min(30, room - prompt)))
        if rng.random() < 0.5:
            request["prefix"] = {"family": rng.choice("ab"), "len": rng.randrange(prompt)}
        requests.append(request)
    return {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_num_seqs": rng.choice([2, 4, 8]),
        "max_batched_tokens": rng.choice([16, 64, 512]),
        "max_model_len": 4096,
        "preset": {"capacity": capacity, "batch": rng.choice(["two-stage", "decode-first", "prefill-first"])},
        "options": {"chunked_prefill": True, "prefix_aware": rng.random() < 0.7},
        "requests": requests,
    }


def test_reserve_all_decides_as_guaranteed_no_evict() -> None:
    admitted_later = 0
    for seed in range(30):
        outcomes = [
            play(Scenario.model_validate(random_scenario(seed, capacity)))
            for capacity in (CAPACITY, "guaranteed-no-evict")
        ]
        assert outcomes[0].as_json() == outcomes[1].as_json(), f"seed {seed}"
        assert not any(step.preempted for step in outcomes[0].steps)
        admitted_later += any(step.waiting for step in outcomes[0].steps[5:])
    assert admitted_later > 10  # or there was nothing to decide


def test_shortest_prompt_first_until_age_counts() -> None:
    def order(ageing_tokens_per_s: float) -> list[str]:
        policy = build(choose("", {"order": ORDER}, {"ageing_tokens_per_s": ageing_tokens_per_s})).order
        for i, (name, length, arrival_s) in enumerate(
            [("long", 500, 0.0), ("a", 5, 1.0), ("b", 5, 1.0), ("c", 4, 9.0)]
        ):
            policy.add(_view(i, name, length, arrival_s))
        return [request.request_id for request in policy.ordered(10.0)]

    assert order(0) == ["c", "a", "b", "long"]
    assert order(100) == ["a", "b", "long", "c"]


def _view(arrival_index: int, name: str, length: int, arrival_s: float) -> Any:
    from paceline.v1.common_pb2 import SamplingParams
    from scheduler_svc.core.requests.request import Request
    from scheduler_svc.policies.api import RequestView

    prompt = bytes(4 * length)
    sampling = SamplingParams(max_tokens=1)
    return RequestView(
        Request(arrival_index, "", 0, name, prompt, bytearray(), sampling, arrival_s, queue_position=arrival_index)
    )
