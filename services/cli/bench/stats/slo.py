"""The SLO of a run: limits of latency that a request must meet, and the share of requests that must meet them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from services.cli.bench.load.ranges import parse_seconds
from services.cli.bench.stats.records import RequestRecord

DEFAULT_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Limits in seconds. None: no limit. `itl_s` limits the 99th percentile of a request's gaps, `tpot_s` their mean
    per token."""

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    share: float = DEFAULT_SHARE

    def is_met_by(self, record: RequestRecord) -> bool:
        """A failed request meets no SLO. If the request has no value for a limit, that limit is met: an output of one
        token has no TPOT."""
        if record.error:
            return False
        for limit, value in (
            (self.ttft_s, record.ttft_s),
            (self.itl_s, record.itl_p99_s),
            (self.tpot_s, record.tpot_s),
            (self.e2e_s, record.e2e_s),
        ):
            if limit is not None and value is not None and value > limit:
                return False
        return True

    def __str__(self) -> str:
        limits = [(field.name.removesuffix("_s"), getattr(self, field.name)) for field in fields(self)[:4]]
        named = [f"{name}={limit * 1000:g}ms" for name, limit in limits if limit is not None]
        return ",".join([*named, f"share={self.share:g}"])


def parse_slo(text: str) -> ServiceLevel:
    """`ttft=200ms,itl=50ms,share=0.99`. Raises ValueError."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name == "share":
            try:
                values["share"] = float(value)
            except ValueError:
                raise ValueError(f"share: expected a number (got {value!r})") from None
            if not 0 < values["share"] <= 1:
                raise ValueError(f"share: above 0, at most 1 (got {value})")
        elif name in ("ttft", "itl", "tpot", "e2e"):
            values[f"{name}_s"] = parse_seconds(value)
        else:
            raise ValueError(f"there is no {name!r} in an SLO: ttft, itl, tpot, e2e, share")
    if not values.keys() - {"share"}:
        raise ValueError("an SLO needs a limit: ttft, itl, tpot or e2e")
    return ServiceLevel(**values)
