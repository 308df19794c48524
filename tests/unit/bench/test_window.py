"""The load, the arithmetic and the table of the bench of steps in flight."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from bench.ceiling import Shape
from bench.window import row_of, show

SHAPE = Shape(slots=32, step_ms=2.0, max_tokens=1000, staggered=True)


def found(steps_per_s: float) -> dict[str, float]:
    """As `measure` returns it, of 8 s."""
    return {
        "steps": 8 * steps_per_s,
        "scheduler_s": 2.0,
        "steps_per_s": steps_per_s,
        "requests_per_s": 12.0,
        "rows_per_step": 31.5,
    }


def test_the_first_requests_of_a_staggered_load_end_one_after_another() -> None:
    assert [SHAPE.tokens_of(number, 4) for number in (1, 2, 3, 4, 5, 9)] == [250, 500, 750, 1000, 1000, 1000]
    assert SHAPE.tokens_of(1, 4096) == 1, "no request may ask for 0 tokens"
    assert Shape(slots=32, step_ms=2.0, max_tokens=1000).tokens_of(1, 4) == 1000


def test_wait_and_idle_share_follow_from_the_step_rate() -> None:
    """At 400 steps/s a step begins every 2.5 ms, so a worker with steps of 2 ms waits 0.5 ms: a fifth of the time."""
    row = row_of(SHAPE, 2, found(400.0))
    assert row["wait_us"] == pytest.approx(500.0)
    assert row["idle_share"] == pytest.approx(0.2)
    assert row["scheduler_us_per_step"] == pytest.approx(625.0)
    full = row_of(SHAPE, 2, found(500.0))
    assert (full["wait_us"], full["idle_share"]) == pytest.approx((0.0, 0.0))


def test_the_table_has_a_row_for_each_load_and_window() -> None:
    rows = [row_of(SHAPE, window, found(rate)) for window, rate in ((1, 400.0), (2, 500.1))]
    out = StringIO()
    show({"step_ms": 2.0, "rows": rows}, Console(file=out, width=120))
    lines = [line.replace("│", " ").split() for line in out.getvalue().splitlines() if line.startswith("│")]
    assert lines == [
        ["32", "1000", "1", "400", "500", "20.0", "12", "31.5", "12,600"],
        ["32", "1000", "2", "500", "0", "0.0", "12", "31.5", "15,753"],
    ], "a worker that never waits is shown as idle for 0.0 %, not -0.0 %"
