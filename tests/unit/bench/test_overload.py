"""The arithmetic of the overload bench."""

from __future__ import annotations

from bench.overload.overload import bucket_percentile_ms, percentile


def test_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(i) for i in range(100)], 0.99) == 99.0
    assert percentile([1.0, 2.0], 1.0) == 2.0


def test_percentiles_of_the_growth_of_a_histogram() -> None:
    inf = float("inf")
    before = {0.001: 100.0, 0.01: 100.0, inf: 100.0}
    after = {0.001: 150.0, 0.01: 199.0, inf: 200.0}  # cumulative: 50 new ones to 1 ms, 49 to 10 ms, one above
    assert bucket_percentile_ms(before, after, 0.5) == 1.0
    assert bucket_percentile_ms(before, after, 0.99) == 10.0
    assert bucket_percentile_ms(before, after, 1.0) == inf
    assert bucket_percentile_ms(after, after, 0.5) is None
