"""`paceline scenario`: bad input is one line that names the field, and exit status 2; never a traceback."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.policies.api import CapacityPolicy, RequestView, Step, Verdict
from services.cli.main import main

NAN, INF = float("nan"), float("inf")


def scenario(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "block_size": 10,
        "num_blocks": 20,
        "num_host_blocks": 0,
        "max_num_seqs": 2,
        "max_batched_tokens": 64,
        "max_model_len": 100,
        "prefix_caching": True,
        "preset": "trtllm-no-evict",
        "options": {"chunked_prefill": True, "chunk_unit_tokens": 10, "watermark": 0.01},
        "requests": [
            {"id": "a", "arrive": 0, "prompt_len": 10, "max_new_tokens": 8},
            {"id": "b", "arrive": 3, "prompt": [5, 6], "max_new_tokens": 4, "priority": 0.6, "lora": None},
            {"id": "c", "prefix": {"family": "f", "len": 5}, "prompt_len": 6, "max_new_tokens": 2, "tenant": "x"},
        ],
    }
    return good | changes


def request(**changes: Any) -> dict[str, Any]:
    """A scenario with these changes in its second request. The value None removes a key."""
    good = scenario()
    second = good["requests"][1] | changes
    good["requests"][1] = {key: value for key, value in second.items() if value is not None}
    return good


def run(path: Path, *flags: str) -> int:
    try:
        return main(["scenario", str(path), *flags])
    except SystemExit as end:
        return int(str(end.code))


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, *flags: str) -> str:
    path = tmp_path / "scenario.json"
    path.write_text(text)
    assert run(path, *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("paceline scenario: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_the_valid_scenario_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(scenario()))
    assert run(path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["generated_tokens"] == {"a": 8, "b": 4, "c": 2}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        *(
            (scenario(**{name: value}), name)
            for name in ("block_size", "num_blocks", "max_num_seqs", "max_batched_tokens", "max_model_len")
            for value in list[Any]((0, -1, 1.5, True, "10", None, NAN, INF, 10**30, [], {}))
        ),
        *((scenario(num_host_blocks=value), "num_host_blocks") for value in (-1, 1.5, True, "10", None, 10**30)),
        (scenario(prefix_caching=1), "prefix_caching"),
        (scenario(colour="blue"), "colour"),
        (scenario(requests=[]), "requests"),
        (scenario(requests={}), "requests"),
        (scenario(requests=[5]), "requests.0"),
        (scenario(preset="vllm"), "preset"),
        (scenario(preset=5), "preset"),
        (scenario(preset=["fcfs"]), "preset"),
        (scenario(preset={"order": 5}), "preset.order"),
        (scenario(preset={"mood": "x"}), "preset.mood"),
        (scenario(preset={"order": "best"}), "order"),
        (scenario(preset={"capacity": "no.such.module:Class"}), "capacity"),
        (scenario(preset={"capacity": "json:dumps"}), "capacity"),
        (scenario(options=5), "options"),
        (scenario(options={"speed": 9}), "options.speed"),
        (scenario(options={"chunked_prefill": 1}), "options.chunked_prefill"),
        (scenario(options={"chunked_prefill": "yes"}), "options.chunked_prefill"),
        (scenario(options={"chunk_unit_tokens": -1}), "options.chunk_unit_tokens"),
        (scenario(options={"chunk_unit_tokens": True}), "options.chunk_unit_tokens"),
        (scenario(options={"chunk_unit_tokens": 10**30}), "options.chunk_unit_tokens"),
        (scenario(options={"chunking": "sometimes"}), "options.chunking"),
        (scenario(options={"watermark": 1}), "options.watermark"),  # also an option of a policy that is not chosen here
        (scenario(options={"watermark": NAN}, preset="vllm-v1"), "options.watermark"),
        (scenario(options={"init_new_token_ratio": 0.0}, preset="sglang"), "options.init_new_token_ratio"),
        (scenario(options={"ratio_decay_steps": 0}, preset="sglang"), "options.ratio_decay_steps"),
        (scenario(options={"tenant_weights": {"a": 0}}, preset={"order": "fair"}), "options.tenant_weights"),
        *(
            (request(**{name: value}), f"requests.1.{name}")
            for name, value in [
                ("id", 5),
                ("id", ""),
                ("arrive", -1),
                ("arrive", 10**12),
                ("arrive", 0.5),
                ("prompt", "5 6"),
                ("prompt", [5, -1]),
                ("prompt", [5, 2**31]),
                ("prompt", [5, True]),
                ("max_new_tokens", 0),
                ("max_new_tokens", 10**12),
                ("max_new_tokens", True),
                ("priority", "high"),
                ("priority", NAN),
                ("priority", -INF),
                ("tenant", 5),
                ("lora", 5),
                ("speed", 5),
            ]
        ),
        (request(max_new_tokens=None), "requests.1.max_new_tokens"),
        (request(prompt=None), "requests.1: exactly one of prompt and prompt_len"),
        (request(prompt=[]), "requests.1: prompt"),
        (request(prompt_len=5), "requests.1: exactly one of prompt and prompt_len"),
        (request(prompt=None, prompt_len=-5), "requests.1.prompt_len"),
        (request(prefix={"family": "f", "len": 1}), "requests.1: prefix"),
        (request(prompt=None, prompt_len=4, prefix={"family": "f", "len": 5}), "requests.1: prefix.len 5"),
        (request(prompt=None, prompt_len=4, prefix={"family": "f", "len": -1}), "requests.1.prefix.len"),
        (request(prompt=None, prompt_len=4, prefix={"family": "f"}), "requests.1.prefix.len"),
        (request(prompt=None, prompt_len=4, prefix="f"), "requests.1.prefix"),
        (request(id="a"), "requests.1.id"),
        (scenario(requests=[{"id": str(i), "prompt_len": 10**7, "max_new_tokens": 1} for i in range(2)]), "prompt_len"),
    ],
)
def test_bad_input_names_the_field(
    values: dict[str, Any], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(tmp_path, capsys, json.dumps(values))
    assert f"paceline scenario: {field}" in line or f": {field} " in line


SWAPPING = {
    **{"block_size": 4, "num_blocks": 8, "max_num_seqs": 4, "max_batched_tokens": 64, "max_model_len": 100},
    "preset": "vllm-v0",
    "options": {"mode": "swap"},
    "requests": [{"id": str(i), "arrive": 2 * (i > 1), "prompt_len": 8, "max_new_tokens": 12} for i in range(3)],
}


@pytest.mark.parametrize(("host_blocks", "modes"), [(20, {"swap"}), (1, {"recompute"}), (4, {"swap", "recompute"})])
def test_preempted_requests_are_swapped_as_long_as_there_are_host_blocks(
    host_blocks: int, modes: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps({**SWAPPING, "num_host_blocks": host_blocks}))
    assert run(path, "--json") == 0
    outcome = json.loads(capsys.readouterr().out)
    assert {entry["mode"] for step in outcome["steps"] for entry in step["preempted"]} == modes
    assert outcome["generated_tokens"] == {"0": 12, "1": 12, "2": 12}
    scheduled = [entry for step in outcome["steps"] for entry in step["scheduled"]]
    prompts = [entry["id"] for entry in scheduled if entry["phase"] == "prefill"]
    assert (len(prompts) == 3) == (modes == {"swap"})  # the swapped request continues decoding


def played(tmp_path: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> dict[str, Any]:
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(scenario(**changes)))
    assert run(path, "--json") == 0
    outcome: dict[str, Any] = json.loads(capsys.readouterr().out)
    return outcome


def test_a_request_right_after_an_empty_step_is_not_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = played(
        tmp_path,
        capsys,
        max_num_seqs=1,
        preset={"order": "priority", "capacity": "max-utilization", "batch": "prefill-first"},
        options={},
        requests=[
            {"id": "a", "prompt_len": 7, "max_new_tokens": 10},
            {"id": "b", "arrive": 3, "prompt_len": 7, "max_new_tokens": 4, "priority": 1.0},
            {"id": "c", "arrive": 4, "prompt_len": 5, "max_new_tokens": 3},
        ],
    )
    empty = outcome["steps"][3]  # "a" is preempted for "b", and no request runs
    assert (empty["scheduled"], [p["id"] for p in empty["preempted"]]) == ([], ["a"])
    assert sorted(name for step in outcome["steps"] for name in step["finished"]) == ["a", "b", "c"]
    assert outcome["generated_tokens"] == {"a": 10, "b": 4, "c": 3}


class ShortOnes(CapacityPolicy):
    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        return Verdict.ADMIT if request.num_tokens < 9 else Verdict.STOP


def test_requests_that_can_never_run_do_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    never = [{"id": f"n{i}", "prompt_len": 9, "max_new_tokens": 2} for i in range(4)]
    fits = {"id": "fits", "arrive": 1, "prompt_len": 3, "max_new_tokens": 2}
    preset = {"order": "fcfs", "capacity": f"{__name__}:ShortOnes", "batch": "decode-first", "preemption": "last-in"}
    outcome = played(tmp_path, capsys, block_size=4, num_blocks=6, preset=preset, requests=[*never, fits])
    assert "stuck" not in outcome
    rejected = {r["id"]: r["reason"] for step in outcome["steps"] for r in step["rejected"]}
    assert sorted(rejected) == ["n0", "n1", "n2", "n3"]
    assert "capacity: no progress is possible for this request under the policies in force: needs 3" in rejected["n0"]
    assert outcome["generated_tokens"]["fits"] == 2


@pytest.mark.parametrize("name", sorted(scenario()))
def test_a_missing_field_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = scenario()
    del values[name]
    if name in ("num_host_blocks", "prefix_caching", "preset", "options"):
        path = tmp_path / "scenario.json"
        path.write_text(json.dumps(values))
        assert run(path) == 0
    else:
        assert f": {name}: " in refused(tmp_path, capsys, json.dumps(values))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[1]", "valid dictionary"),
        ("null", "valid dictionary"),
        ("9" * 5000, "no JSON"),
        ("[" * 200_000, "nested too deeply"),
        (json.dumps(scenario())[:-1], "no JSON"),
        (json.dumps(scenario(**{"new\nline": 1})), "new line"),
    ],
)
def test_a_file_that_is_not_a_scenario_is_refused(
    text: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert word in refused(tmp_path, capsys, text)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin1.json").write_bytes(b'{"\xe9": 1}')
    for name, word in (("absent.json", "No such file"), (".", "directory"), ("latin1.json", "no JSON")):
        assert run(tmp_path / name) == 2
        line = capsys.readouterr().err
        assert word in line
        assert line.count("\n") == 1


def test_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = json.dumps(scenario())
    assert "preset: 'x' is none of paceline, " in refused(tmp_path, capsys, good, "--preset", "x")
    assert "preset" in refused(tmp_path, capsys, good, "--preset", "")
    assert "--bogus" in refused(tmp_path, capsys, good, "--bogus")
    with pytest.raises(SystemExit):
        main(["scenario"])
    assert capsys.readouterr().err == "paceline scenario: the following arguments are required: file (see --help)\n"


def test_a_policy_that_fails_gets_one_error_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = scenario(preset={"capacity": "tests.support.hostile:Raises"})
    line = refused(tmp_path, capsys, json.dumps(broken))
    assert "a policy failed: ZeroDivisionError: division by zero (hostile.py:" in line


NONSENSE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7, 10**9, 10**40, -(10**40), 0.5, NAN, INF, -INF, "", "x", "10", "\ud800", "a\nb",
    [], [1], [[]], {}, {"id": 1}, {"order": "lpm"}, {"order": None}, "sglang", ["sglang"], {"family": "f", "len": 3},
]  # fmt: skip


def test_fuzz(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any value anywhere: it runs, or one line says what is wrong."""
    rng = random.Random(1)
    refusals = 0
    for number in range(1500):
        values = copy.deepcopy(scenario())
        for _ in range(rng.choice([1, 1, 1, 2])):
            _mutate(values, rng)
        path = tmp_path / "scenario.json"
        path.write_text(json.dumps(values))
        status = run(path, "--json")
        captured = capsys.readouterr()
        assert status in (0, 2), (number, values)
        if status:
            refusals += 1
            assert captured.err.count("\n") == 1, (number, values, captured.err)
            assert len(captured.err) < 700
            assert "a policy failed" not in captured.err
            assert captured.out == ""
    assert 300 < refusals < 1450


def _mutate(values: Any, rng: random.Random) -> None:
    """Change, drop or add something, somewhere."""
    where = values
    while True:
        keys: list[Any] = list(where) if isinstance(where, dict) else list(range(len(where)))
        key = rng.choice(keys) if keys else None
        if key is not None and isinstance(where[key], dict | list) and where[key] and rng.random() < 0.8:
            where = where[key]
            continue
        break
    match rng.random():
        case dice if key is None or dice < 0.1:
            if isinstance(where, dict):
                where[rng.choice(["seed", "order", "len", "ageing_per_s", "max_context_tokens", "\ud800"])] = 1
            else:
                where.append(copy.deepcopy(rng.choice(NONSENSE)))
        case dice if dice < 0.2:
            del where[key]
        case _:
            where[key] = copy.deepcopy(rng.choice(NONSENSE))
