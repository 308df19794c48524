"""One stage of load in numbers: latencies, throughput, goodput, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from services.cli.bench.stats.records import INTERRUPTED, RequestRecord
from services.cli.bench.stats.slo import ServiceLevel

CURVE_POINTS = 101
# If the p99 of the requests' delay after their planned times is above this, the report says so.
LATE_S = 0.05


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles in seconds, with linear interpolation."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    curve: list[float]  # percentiles 0 to 100

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        array = np.fromiter(values, float)
        if not len(array):
            return None
        curve = [round(float(value), 6) for value in np.percentile(array, np.linspace(0, 100, CURVE_POINTS))]
        p50, p90, p95, p99 = (curve[p] for p in (50, 90, 95, 99))
        return cls(len(array), round(float(array.mean()), 6), p50, p90, p95, p99, curve[-1], curve)


@dataclass(frozen=True, slots=True)
class StageSummary:
    """Rates are per second of `duration_s`, the time from the first request to the end of the last."""

    duration_s: float
    requests: int  # ended, without interrupted ones
    succeeded: int
    failures: dict[str, int]  # reason: requests
    interrupted: int
    requests_per_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    good: int  # requests that meet the SLO; all that succeeded if there is none
    goodput_per_s: float
    good_share: float
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    late: Distribution | None
    is_counted: bool  # whether the server counted all output tokens

    @property
    def failed_share(self) -> float:
        return (self.requests - self.succeeded) / self.requests if self.requests else 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> StageSummary:
        """Raises KeyError, TypeError."""
        known = dict(values)
        for name in ("ttft", "itl", "tpot", "e2e", "late"):
            known[name] = None if known[name] is None else Distribution(**known[name])
        return cls(**known)


def summarise(records: Iterable[RequestRecord], slo: ServiceLevel | None) -> StageSummary:
    """Latencies are those of successful requests. `late` is of the first turns, failed ones included. Only
    `interrupted` counts interrupted requests."""
    everything = list(records)
    ended = [record for record in everything if record.error != INTERRUPTED]
    well = [record for record in ended if not record.error]
    good = sum(slo is None or slo.is_met_by(record) for record in well)
    start_s = min((record.sent_s for record in ended), default=0.0)
    duration_s = max((record.end_s for record in ended), default=0.0) - start_s
    prompt_tokens = sum(record.prompt_tokens or 0 for record in well)
    output_tokens = sum(record.output_tokens for record in well)
    cached = [record.cached_tokens for record in well if record.cached_tokens is not None]

    def rate(count: float) -> float:
        return round(count / duration_s, 4) if duration_s > 0 else 0.0

    return StageSummary(
        duration_s=round(duration_s, 4),
        requests=len(ended),
        succeeded=len(well),
        failures=dict(Counter(record.error for record in ended if record.error).most_common()),
        interrupted=len(everything) - len(ended),
        requests_per_s=rate(len(well)),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(cached) if cached else None,
        output_tokens=output_tokens,
        output_tokens_per_s=rate(output_tokens),
        total_tokens_per_s=rate(prompt_tokens + output_tokens),
        good=good,
        goodput_per_s=rate(good),
        good_share=good / len(ended) if ended else 0.0,
        ttft=Distribution.of(record.ttft_s for record in well if record.ttft_s is not None),
        itl=Distribution.of(gap for record in well for gap in record.gaps_s),
        tpot=Distribution.of(record.tpot_s for record in well if record.tpot_s is not None),
        e2e=Distribution.of(record.e2e_s for record in well),
        late=Distribution.of(record.late_s for record in ended if record.turn == 0),
        is_counted=all(record.is_counted for record in well),
    )
