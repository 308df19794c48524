"""Two runs side by side: which stages belong together, and the ratio of each figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from services.cli.bench.report.document import BadReport, BenchReport, StageReport
from services.cli.bench.stats.summary import Distribution, StageSummary

# Ratios closer to 1 than this count as equal.
NOISE = 0.05


class Figure(NamedTuple):
    """A figure of a stage. `better` is 1 if more is better, -1 if less is better."""

    name: str
    unit: str
    better: int
    of: Callable[[StageSummary], float | None]


class ComparedFigure(NamedTuple):
    """One figure of two runs; None: the run has not measured it."""

    figure: Figure
    a: float | None
    b: float | None

    @property
    def ratio(self) -> float | None:
        return self.b / self.a if self.a and self.b is not None else None

    @property
    def verdict(self) -> int:
        """1: B is better; -1: B is worse; 0: about equal, or unknown."""
        if self.ratio is None or abs(self.ratio - 1) < NOISE:
            return 0
        return self.figure.better if self.ratio > 1 else -self.figure.better


class ComparedStage(NamedTuple):
    """One stage of each run: with the same load, or the only stage of both."""

    a: StageReport
    b: StageReport
    figures: list[ComparedFigure]

    @property
    def title(self) -> str:
        return str(self.a.load) if self.a.load == self.b.load else f"{self.a.load} | {self.b.load}"


def _at(name: str, percentile: str) -> Callable[[StageSummary], float | None]:
    def of(summary: StageSummary) -> float | None:
        found: Distribution | None = getattr(summary, name)
        return None if found is None else 1000 * float(getattr(found, percentile))

    return of


FIGURES = (
    Figure("goodput: meet the SLO", "/s", 1, lambda s: s.goodput_per_s),
    Figure("requests", "/s", 1, lambda s: s.requests_per_s),
    Figure("output tokens", "/s", 1, lambda s: s.output_tokens_per_s),
    Figure("all tokens", "/s", 1, lambda s: s.total_tokens_per_s),
    Figure("TTFT p50", "ms", -1, _at("ttft", "p50")),
    Figure("TTFT p99", "ms", -1, _at("ttft", "p99")),
    Figure("ITL p50", "ms", -1, _at("itl", "p50")),
    Figure("ITL p99", "ms", -1, _at("itl", "p99")),
    Figure("TPOT p50", "ms", -1, _at("tpot", "p50")),
    Figure("e2e p50", "ms", -1, _at("e2e", "p50")),
    Figure("e2e p99", "ms", -1, _at("e2e", "p99")),
    Figure("failed", "%", -1, lambda s: 100 * s.failed_share),
)


def differences(a: BenchReport, b: BenchReport) -> list[str]:
    """Which of model, endpoint, workload and SLO differ. With one, the ratios do not compare the servers alone."""
    return [
        f"the {name} differs: {getattr(a, name) or 'none'} | {getattr(b, name) or 'none'}"
        for name in ("model", "endpoint", "workload", "slo")
        if getattr(a, name) != getattr(b, name)
    ]


def compared(a: BenchReport, b: BenchReport) -> list[ComparedStage]:
    """The stages of equal load. If each run has only one stage, these two. Raises BadReport if there are none."""
    others = {stage.load: stage for stage in b.stages}
    pairs = [(stage, others[stage.load]) for stage in a.stages if stage.load in others]
    if not pairs and len(a.stages) == len(b.stages) == 1:
        pairs = [(a.stages[0], b.stages[0])]
    if not pairs:
        loads = " and ".join(", ".join(str(stage.load) for stage in run.stages) or "nothing" for run in (a, b))
        raise BadReport(f"the runs have no stage of the same load: {loads}")
    # Without an SLO, goodput is only another name for the requests.
    figures = FIGURES if a.slo or b.slo else FIGURES[1:]
    return [
        ComparedStage(x, y, [ComparedFigure(figure, figure.of(x.summary), figure.of(y.summary)) for figure in figures])
        for x, y in pairs
    ]
