"""The plots of a report: over load, distributions, over time; of one run, or of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from services.cli.bench.load.arrivals import UNITS
from services.cli.bench.report.compare import ComparedStage
from services.cli.bench.report.document import BenchReport, StageReport
from services.cli.bench.report.svg import MAX_SERIES, ChartLimit, ChartLine, LineChart
from services.cli.bench.stats.slo import ServiceLevel, parse_slo
from services.cli.bench.stats.summary import Distribution, StageSummary

LATENCIES = {"ttft": "time to first token", "itl": "inter-token latency", "e2e": "end-to-end latency"}
SHORT = {"ttft": "TTFT", "itl": "ITL", "e2e": "e2e latency"}
# More dots than these make a file slow to open.
MAX_DOTS = 1500
# From this ratio of the largest value to the smallest, an axis is logarithmic.
LOG_RATIO = 8


def over_load(report: BenchReport) -> Iterator[LineChart]:
    """Latencies, goodput and throughput of each stage."""
    stages = _by_load(report.stages)
    slo = parse_slo(report.slo) if report.slo else None
    for name in LATENCIES:
        lines = [
            ChartLine(percentile, _points(stages, _latency(name, percentile)), i, has_markers=True)
            for i, percentile in enumerate(("p50", "p99"))
        ]
        yield _load_chart(f"{LATENCIES[name].capitalize()} over load", "ms", stages, lines, _limits(slo, name), True)
    lines = [ChartLine("requests that succeed", _points(stages, lambda s: s.requests_per_s), 0, True)]
    if slo:
        lines.append(ChartLine("goodput: meet the SLO", _points(stages, lambda s: s.goodput_per_s), 1, True))
    yield _load_chart("Goodput over load" if slo else "Requests over load", "requests per second", stages, lines)
    if slo:
        lines = [ChartLine("requests that meet the SLO", _points(stages, lambda s: 100 * s.good_share), 1, True)]
        limits = [ChartLimit(f"SLO {slo.share:.0%}", 100 * slo.share)]
        yield _load_chart("Share that meets the SLO", "% of requests", stages, lines, limits)
    lines = [ChartLine("output tokens", _points(stages, lambda s: s.output_tokens_per_s), 0, True)]
    if any(stage.summary.prompt_tokens for stage in stages):
        lines.append(ChartLine("prompt and output", _points(stages, lambda s: s.total_tokens_per_s), 2, True))
    yield _load_chart("Throughput over load", "tokens per second", stages, lines)


def distributions(report: BenchReport) -> Iterator[LineChart]:
    """Cumulative distributions of latencies, a line per stage."""
    slo = parse_slo(report.slo) if report.slo else None
    stages = _spread(_by_load(report.stages))
    note = f"{len(stages)} of {len(report.stages)} stages" if len(stages) < len(report.stages) else ""
    for name in LATENCIES:
        lines = [ChartLine(str(stage.load), _curve(getattr(stage.summary, name)), i) for i, stage in enumerate(stages)]
        yield _distribution(name, lines, _limits(slo, name, is_vertical=True), note)


def over_time(stage: StageReport) -> Iterator[LineChart]:
    """A dot per request."""
    records = [record for record in stage.records if not record.error]
    shown = records[:: -(-len(records) // MAX_DOTS) or 1]
    note = f"{len(shown)} of {len(records)} requests" if len(shown) < len(records) else ""
    latencies: dict[str, list[tuple[float, float | None]]] = {
        "ttft": [(record.sent_s, record.ttft_s) for record in shown],
        "e2e": [(record.sent_s, record.e2e_s) for record in shown],
    }
    for name, found in latencies.items():
        dots = [(at_s, 1000 * latency_s) for at_s, latency_s in found if latency_s is not None]
        line = ChartLine("a request, at the time when it was sent", dots, 0, has_markers=True, has_line=False)
        yield LineChart(f"{LATENCIES[name].capitalize()} over time", "seconds", f"{SHORT[name]}, ms", [line], note=note)


def both_over_load(stages: list[ComparedStage], titles: tuple[str, str], *, has_slo: bool) -> Iterator[LineChart]:
    """Two runs: latencies, goodput (without an SLO: requests) and throughput of the stages of equal load."""
    runs = [_by_load([stage.a for stage in stages]), _by_load([stage.b for stage in stages])]

    def lines(of: Callable[[StageSummary], float | None]) -> list[ChartLine]:
        return [
            ChartLine(title, _points(run, of), i, True) for i, (title, run) in enumerate(zip(titles, runs, strict=True))
        ]

    for name in LATENCIES:
        for percentile in ("p50", "p99"):
            title = f"{LATENCIES[name].capitalize()} over load, {percentile}"
            yield _load_chart(title, "ms", runs[0], lines(_latency(name, percentile)), may_be_log=True)
    title = "Goodput over load" if has_slo else "Requests over load"
    rates = lines(lambda s: s.goodput_per_s if has_slo else s.requests_per_s)
    yield _load_chart(title, "requests per second", runs[0], rates)
    title = "Output tokens over load"
    yield _load_chart(title, "tokens per second", runs[0], lines(lambda s: s.output_tokens_per_s))


def both_distributions(stages: list[ComparedStage], titles: tuple[str, str]) -> Iterator[LineChart]:
    """Two runs: the distributions at the lowest, the middle and the highest load that both runs measured."""
    ordered = sorted(stages, key=lambda stage: stage.a.load.value)
    chosen = {ordered[i].title: ordered[i] for i in (0, len(ordered) // 2, -1)}
    for stage in chosen.values():
        for name in ("ttft", "itl"):
            runs = (stage.a.summary, stage.b.summary)
            curves = [_curve(getattr(run, name)) for run in runs]
            lines = [ChartLine(title, curve, i) for i, (title, curve) in enumerate(zip(titles, curves, strict=True))]
            chart = _distribution(name, lines, [], "")
            yield LineChart(f"{chart.title}, {stage.title}", chart.x_label, chart.y_label, lines, log_x=True)


def _by_load(stages: Sequence[StageReport]) -> list[StageReport]:
    return sorted(stages, key=lambda stage: stage.load.value)


def _spread(stages: list[StageReport]) -> list[StageReport]:
    """At most as many as a chart can tell apart, from the lowest to the highest load."""
    if len(stages) <= MAX_SERIES:
        return stages
    return [stages[round(i * (len(stages) - 1) / (MAX_SERIES - 1))] for i in range(MAX_SERIES)]


def _latency(name: str, percentile: str) -> Callable[[StageSummary], float | None]:
    def of(summary: StageSummary) -> float | None:
        found: Distribution | None = getattr(summary, name)
        return None if found is None else 1000 * float(getattr(found, percentile))

    return of


def _points(stages: Sequence[StageReport], of: Callable[[StageSummary], float | None]) -> list[tuple[float, float]]:
    found = [(stage.load.value, of(stage.summary)) for stage in stages]
    return [(load, value) for load, value in found if value is not None]


def _curve(distribution: Distribution | None) -> list[tuple[float, float]]:
    """Latency in ms, share of requests in percent."""
    if distribution is None:
        return []
    last = len(distribution.curve) - 1
    return [(max(1000 * value, 0.01), 100 * i / last) for i, value in enumerate(distribution.curve)]


def _limits(slo: ServiceLevel | None, name: str, is_vertical: bool = False) -> list[ChartLimit]:
    limit = getattr(slo, f"{name}_s", None)
    return [] if limit is None else [ChartLimit("SLO", 1000 * limit, is_vertical)]


def _load_chart(
    title: str,
    unit: str,
    stages: Sequence[StageReport],
    lines: list[ChartLine],
    limits: Sequence[ChartLimit] = (),
    may_be_log: bool = False,
) -> LineChart:
    values = [stage.load.value for stage in stages]
    kind = stages[0].load.kind
    label = {"concurrency": "sessions at once"}.get(kind, f"load, {UNITS[kind]}")
    shown = [value for line in lines for _, value in line.points if value > 0]
    log_y = may_be_log and bool(shown) and max(shown) / min(shown) >= LOG_RATIO
    return LineChart(title, label, unit, lines, max(values) / min(values) >= LOG_RATIO, log_y, list(limits))


def _distribution(name: str, lines: list[ChartLine], limits: list[ChartLimit], note: str) -> LineChart:
    what = "gaps" if name == "itl" else "requests"
    title = f"{LATENCIES[name].capitalize()}"
    return LineChart(title, f"{SHORT[name]}, ms", f"% of {what} up to this latency", lines, True, False, limits, note)
