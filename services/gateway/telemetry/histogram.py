"""A histogram that costs two list operations per observation. prometheus_client's objects exist only at scrape time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily

# Upper edges of the buckets, in seconds: from one decode step of a small model to a request of half an hour.
LATENCY_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0),
    *(300.0, 600.0, 1800.0),
)
NUM_TOKENS = tuple(factor * 10.0**power for power in range(6) for factor in (1, 2, 5))

SMALL_NUMBERS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


class FastHistogram:
    """Bucket counts in a list. `bounds` are the inclusive upper edges."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float] = LATENCY_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def counts(self) -> tuple[int, ...]:
        """Observations in each bucket since the start; the last bucket has no upper edge."""
        return tuple(self._counts)

    def quantile(self, q: float, since: Sequence[int]) -> float | None:
        """The q-quantile of recent observations: those that came after `counts` had the value `since`. Interpolates
        linearly in the quantile's bucket. Returns the highest edge for a quantile above all edges, and None without an
        observation."""
        counts = [now - before for now, before in zip(self._counts, since, strict=True)]
        wanted = q * sum(counts)
        if not wanted:
            return None
        low, below = 0.0, 0
        for edge, count in zip(self._bounds, counts, strict=False):
            if count and below + count >= wanted:
                return low + (edge - low) * (wanted - below) / count
            low, below = edge, below + count
        return self._bounds[-1]

    def add_to(self, family: HistogramMetricFamily, label_values: Sequence[str]) -> None:
        """Add the state to a family that is being scraped."""
        buckets, total = [], 0
        for edge, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((edge, float(total)))
        family.add_metric(label_values, buckets, self._sum)


def histogram_family(
    name: str, documentation: str, histogram: FastHistogram, labels: Mapping[str, str]
) -> HistogramMetricFamily:
    """A family of one histogram."""
    family = HistogramMetricFamily(name, documentation, labels=list(labels))
    histogram.add_to(family, list(labels.values()))
    return family
