"""`paceline top` shows what the snapshot says, in every size of a terminal."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
from rich.console import Console

from services.cli.top import bars
from services.cli.top.keys import parse_keys
from services.cli.top.lines import Choice, Lines, condensed
from services.cli.top.main import moved
from services.cli.top.screen import ServerState, fitted, full, group

TIMES = {"p50": 0.0204, "p90": 0.05, "p99": 1.5}
NO_TIMES = {"p50": None, "p90": None, "p99": None}
SERVER = ServerState("http://127.0.0.1:8000")


def worker(number: int, **other: Any) -> dict[str, Any]:
    return {
        "worker": number, "name": f"worker-{number}", "num_slots": 8, "num_running": 2, "num_prefilling": 1,
        "num_offline": 0, "num_blocks": 100, "num_available_blocks": 40, "num_free_host_blocks": 7,
        "num_swapped_out": 1, "in_flight": 1, "window": 2, "draining": False, "base_s": 0.004, "token_s": 0.0001,
        "context_s": 1e-7, "row_s": 0.0005, **other,
    }  # fmt: skip


def step(number: int, of: int = 1) -> dict[str, Any]:
    return {"worker": of, "step": number, "planned_s": 10.0, "sent_s": 10.01, "ended_s": 10.1, "computed_s": 0.06,
            "num_decodes": 2, "num_prefills": 1, "new_tokens": 33, "context_tokens": 90}  # fmt: skip


SNAPSHOT: dict[str, Any] = {
    "at_s": 1000.0,
    "gateway": {
        "ready": True, "draining": False, "model": "m", "live_requests": 5, "prompt_tokens": 1, "generation_tokens": 2,
        "tokens_per_s": 1234.56, "window_s": 10.0, "ttft_s": TIMES, "itl_s": NO_TIMES, "e2e_s": TIMES,
        "event_loop_lag_s": NO_TIMES,
    },
    "scheduler": {
        "at_s": 1000.0, "epoch": 5,
        "load": {
            "num_running": 4, "num_waiting": 3, "num_waiting_tokens": 1500, "waiting_s": 2.5, "num_blocks": 200,
            "num_used_blocks": 120, "block_size": 16, "num_slots": 16, "num_preemptions": 6,
            "prefix_query_tokens": 400, "prefix_hit_tokens": 100,
        },
        "policies": {"preset": "paceline", "order": "fair", "capacity": "watermark", "batch": "decode-first",
                     "preemption": "largest-share", "placement": "predicted-time"},
        "failed_policies": ["order"], "cache_connected": True, "num_sessions": 1, "num_offline_running": 0,
        "num_offline_waiting": 0, "num_finished": 77, "num_rejected": 8, "num_generated_tokens": 9, "num_steps": 55,
        "num_failures": 0, "core_s": 0.5, "workers": [worker(1), worker(2, draining=True)],
        "tenants": [{"tenant": "ann", "running_tokens": 300, "waiting_tokens": 100},
                    {"tenant": "\x1b[2Jbob", "running_tokens": 100, "waiting_tokens": 0}],
        "num_tenants": 5, "steps": [step(8), step(9), step(3, of=2)], "num_missed_steps": 0,
    },
}  # fmt: skip
CACHE = {"maps": [{"worker": 1, "name": "worker-1", "num_blocks": 100, "blocks_per_cell": 2, "cells": "uuscp" * 10,
                   "num_host_blocks": 0, "host_cells": ""}]}  # fmt: skip
SERVICES = [
    {"kind": "gateway", "name": "gateway", "state": "ready", "num_restarts": None, "up_s": 200.0},
    {"kind": "worker", "name": "worker-1", "state": "down", "num_restarts": 2, "up_s": None},
    {"kind": "worker", "name": "worker-2", "state": "ready", "num_restarts": 0, "up_s": 7.0},
]


def shown(lines: list[Any], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, record=True, highlight=False, emoji=False)
    console.print(group(lines))
    return console.export_text()


def test_a_snapshot_as_text_has_all_that_is_known() -> None:
    text = shown(full(Lines(SNAPSHOT, 160), SERVER), 160)
    for part in ("1,234.6 tokens/s", "3 waiting (1,500 tokens, 2.50 s to serve)", "4 running of 16", "preemptions 6",
                 "rejected 8", "reused 25 %", "order fair FAILED", "2/8", "60/100", "1/2", "5.00 ms", "drains",
                 "ann", "300", "3 smaller tenants", "3 steps since"):  # fmt: skip
        assert part in text, part
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["TTFT"] == ["20.4", "ms", "50.0", "ms", "1.50", "s"]
    assert rows["ITL"] == ["-", "-", "-"]
    assert "\x1b" not in text, "a tenant's name must not control the terminal"


@pytest.mark.parametrize("choice", [None, Choice("worker", 2), Choice("tenant", "ann")])
@pytest.mark.parametrize(("width", "height"), [(200, 60), (80, 24), (60, 12), (40, 8), (20, 4), (10, 1)])
def test_a_snapshot_fits_into_every_terminal(width: int, height: int, choice: Choice | None) -> None:
    snapshot = copy.deepcopy(SNAPSHOT)
    snapshot["scheduler"]["workers"] = [worker(number) for number in range(1, 20)]
    lines = fitted(Lines(snapshot, width, choice, [1.0, 5.0]), SERVER, height)
    assert 1 <= len(lines) <= height
    assert max(len(line) for line in shown(lines, width).splitlines()) <= width


def test_a_common_terminal_has_every_section() -> None:
    text = shown(fitted(Lines(SNAPSHOT, 80), SERVER, 24), 80)
    for part in ("tokens/s", "TTFT", "policies", "worker-1", "worker-2", "ann", "steps since", "q quit"):
        assert part in text, part


def test_a_long_table_shows_the_chosen_worker() -> None:
    snapshot = copy.deepcopy(SNAPSHOT)
    snapshot["scheduler"]["workers"] = [worker(number) for number in range(1, 40)]
    text = shown(fitted(Lines(snapshot, 80, Choice("worker", 30)), SERVER, 24), 80)
    assert "> worker-30" in text
    assert "more lines" in text


def test_the_chosen_worker_shows_its_fit_its_blocks_and_its_steps() -> None:
    lines = fitted(Lines({**SNAPSHOT, "cache": CACHE}, 120, Choice("worker", 1)), SERVER, 40)
    text = shown(lines, 120)
    assert "step 4.00 ms + 100 µs/prompt token + 500 µs/row + 100 µs/1,000 attended tokens" in text
    assert "▓▓█░▀" * 10 in text
    assert "2 steps since" in text


def test_the_chosen_tenant_shows_its_shares() -> None:
    text = shown(fitted(Lines(SNAPSHOT, 120, Choice("tenant", "ann")), SERVER, 40), 120)
    assert "ann: has 75 % of the running tokens and 100 % of the waiting ones" in text


def test_a_large_block_map_is_condensed_to_the_most_used_cells() -> None:
    assert condensed("..c.u.sp", 4) == (".cus", 2)
    assert condensed("uc", 4) == ("uc", 1)
    assert condensed("", 4) == ("", 1)
    large = copy.deepcopy(CACHE)
    large["maps"][0]["cells"] = "c" * 2000 + "u" * 48
    text = shown(fitted(Lines({**SNAPSHOT, "cache": large}, 80, Choice("worker", 1)), SERVER, 60), 80)
    assert "blocks, 14 in a cell" in text
    assert "▓▓▓▓▓▓▓" in text


def test_services_are_shown_if_the_gateway_knows_them() -> None:
    text = shown(full(Lines({**SNAPSHOT, "services": SERVICES}, 160), SERVER), 160)
    assert "gateway ready 3 min" in text
    assert "worker worker-1 down (2 restarts)  1 worker ready" in text
    assert "services" not in shown(full(Lines(SNAPSHOT, 160), SERVER), 160)


def test_without_a_scheduler_the_screen_says_so() -> None:
    snapshot = {**SNAPSHOT, "scheduler": None}
    for lines in (full(Lines(snapshot, 80), SERVER), fitted(Lines(snapshot, 80), SERVER, 24)):
        assert "no scheduler" in shown(lines, 80)
    assert Lines(snapshot, 80).choices() == []


def test_a_lost_connection_and_its_return_are_shown() -> None:
    lost = ServerState("u", trouble="no server answers", away_s=4.2)
    assert "no connection for 4 s, trying again: no server answers" in shown(fitted(Lines(SNAPSHOT, 80), lost, 24), 80)
    back = ServerState("u", back_after_s=9.0, paused=True)
    text = shown(fitted(Lines(SNAPSHOT, 120), back, 24), 120)
    assert "connected again after 9 s" in text
    assert "PAUSED" in text


def test_keys_choose_workers_and_tenants() -> None:
    choices = Lines(SNAPSHOT, 80).choices()
    first, second, ann, bob = choices
    assert [moved(None, choices, key) for key in ("down", "up", "tab")] == [first, bob, first]
    assert [moved(second, choices, key) for key in ("down", "up", "tab")] == [ann, first, ann]
    assert [moved(bob, choices, key) for key in ("down", "tab")] == [first, first]
    assert moved(Choice("worker", 99), choices, "down") == first, "the chosen worker has left"


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        ("q", ["q"]),
        ("pj\t", ["p", "down", "tab"]),
        ("\x1b[A\x1b[B\x1bOA\x1b[Z", ["up", "down", "up", "back-tab"]),
        ("\x1b[15~q", ["q"]),
        ("\x1b", []),
        ("\x1b[1;5Cq", ["q"]),
    ],
)
def test_keys_of_a_terminal(typed: str, keys: list[str]) -> None:
    assert parse_keys(typed) == keys


def test_a_bar_is_shown_empty_or_full_only_if_its_value_is() -> None:
    assert [bars.bar(part, 100, 4) for part in (0, 1, 50, 99, 100, 120)] == [
        "░░░░", "█░░░", "██░░", "███░", "████", "████"
    ]  # fmt: skip
    assert bars.bar(5, 0, 3) == "░░░"
    assert bars.stacked([(1, "a"), (2, "b"), (1, "c")], 4, 8) == "aabbbbcc"
    assert bars.stacked([(1, "a")], 4, 8) == "aa      "
    assert bars.sparkline([0, 5, 10], 2) == "▅█"
    assert bars.sparkline([0.0], 5) == "▁"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0000121, "12 µs"), (0.0009999, "1.00 ms"), (0.01234, "12.3 ms"), (0.2, "200 ms"),
     (1.5, "1.50 s"), (99.99, "100 s"), (200.0, "3 min"), (8000.0, "2 h"), (200_000.0, "2 d")],
)  # fmt: skip
def test_times_have_three_digits(value: float | None, text: str) -> None:
    assert bars.seconds(value) == text
