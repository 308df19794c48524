"""The placement bench runs on a small fleet, and its tables say what its rows say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench import run
from bench.placement import placement
from bench.placement.placement import (
    FIGURES,
    Case,
    averages,
    cases,
    equal_fleet,
    groups,
    markdown,
    open_case,
    other_rows,
    play,
    saturated_case,
    shortfall,
)


def row(policy: str, tokens_per_s: float, ttft_ms: float) -> dict[str, object]:
    key = {"workload": "zipf", "fleet": "equal", "workers": 2, "load": "open", "policy": policy}
    figures = {"ttft_p50_ms": ttft_ms, "ttft_p99_ms": ttft_ms, "cached_share": 0.0, "imbalance": 1.0}
    return {**key, "output_tokens_per_s": tokens_per_s, **figures}


def test_a_shared_prompt_spreads_by_least_requests_and_is_mostly_cached() -> None:
    case = dataclasses.replace(saturated_case("shared-prompt", equal_fleet(2), scale=0.1), concurrency=8)
    figures = play(case, "scheduler_svc.policies.placement.least_loaded:LeastLoaded", seed=1)
    assert set(FIGURES) <= set(figures)
    assert figures["requests"] == 160
    assert figures["cached_share"] > 0.9
    assert figures["token_imbalance"] < 1.2


def test_a_run_depends_on_its_seed_alone() -> None:
    case = open_case("conversations", equal_fleet(2), scale=0.05)
    rule = "scheduler_svc.policies.placement.two_choices:TwoChoices"
    assert play(case, rule, 1) == play(case, rule, 1) != play(case, rule, 2)


def test_cases_cover_every_workload_on_every_fleet_once() -> None:
    keys = [tuple(case.key.values()) for case in cases()]
    assert len(set(keys)) == len(keys)
    assert {(key[0], key[2]) for key in keys if key[1] == "equal"} >= {("agents", 16), ("no-sharing", 2)}


def test_shortfall_is_relative_to_the_best_of_the_case() -> None:
    rows = [row("a", 100.0, 20.0), row("b", 90.0, 10.0)]
    (group,) = groups(rows)
    assert shortfall(group, "output_tokens_per_s", rows[0]) == 0.0
    assert round(shortfall(group, "output_tokens_per_s", rows[1]), 6) == 0.1
    assert shortfall(group, "ttft_p50_ms", rows[0]) == 1.0
    assert shortfall(group, "cached_share", rows[0]) == 0.0, "nothing can be cached"


def test_the_table_marks_figures_within_two_percent_of_the_best() -> None:
    rows = [row("a", 100.0, 20.0), row("b", 98.5, 10.0), row("c", 97.0, 10.3)]
    shown = markdown(rows, dict.fromkeys("abc", "2026-11-24"))
    assert "All policies ran on 2026-11-24." in shown
    assert "| a | **100** | 20.0 | 20 | **0.0%** | **1.00** |" in shown
    assert "| b | **98** | **10.0** | **10** | **0.0%** | **1.00** |" in shown
    assert "| c | 97 | 10.3 | 10 | **0.0%** | **1.00** |" in shown
    assert "| c | 0 of 1, 3% | 0 of 1, 3% | 0 of 1, 3% | 1 of 1, 0% | 1 of 1, 0% |" in shown


def test_averages_are_geometric_so_that_each_case_counts_alike() -> None:
    other = {"workload": "agents", "workers": 4}
    rows = [row("a", 100.0, 10.0), row("b", 1.0, 10.0), row("a", 1.0, 10.0) | other, row("b", 100.0, 10.0) | other]
    [*_, a, b] = averages(rows)
    assert a.split("|")[2] == b.split("|")[2] == " **10** "


def earlier_row(case: Case, policy: str) -> dict[str, object]:
    return row(policy, 1.0, 1000.0) | case.key


def test_chosen_policies_run_again_and_replace_only_their_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = open_case("shared-prompt", equal_fleet(2), scale=0.02)
    earlier = [earlier_row(case, policy) for policy in ("round-robin", "least-loaded", "predicted-time")]
    measured = dict.fromkeys(("round-robin", "least-loaded", "predicted-time"), "2026-11-24")
    (tmp_path / "placement.json").write_text(json.dumps({"measured": measured, "rows": earlier}))
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(placement, "cases", lambda: iter([case]))
    assert run.main(["--part", "placement", "--policies", "least-loaded"]) == 0

    report = json.loads((tmp_path / "placement.json").read_text())
    first, again, last = report["rows"]
    assert [first, last] == [earlier[0], earlier[2]]
    assert again["policy"] == "least-loaded"
    assert again["output_tokens_per_s"] > 100
    assert report["measured"] == measured | {"least-loaded": report["date"]}
    shown = (tmp_path / "placement.md").read_text()
    assert "- 2026-11-24: round-robin, predicted-time\n" in shown
    assert f"- {report['date']}: least-loaded\n" in shown


def test_rows_of_other_cases_are_not_compared_with_new_rows() -> None:
    two, four = (open_case("zipf", equal_fleet(num_workers)) for num_workers in (2, 4))
    earlier = [earlier_row(two, "round-robin"), earlier_row(two, "least-loaded")]
    assert other_rows(earlier, ["least-loaded"], [two]) == earlier[:1]
    with pytest.raises(ValueError, match=r"run all policies: .*zipf, 4 workers, open"):
        other_rows(earlier, ["least-loaded"], [two, four])
