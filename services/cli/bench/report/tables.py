"""The tables of a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.cli.bench.report.compare import ComparedFigure, ComparedStage
from services.cli.bench.report.document import BenchReport
from services.cli.bench.stats.summary import Distribution, StageSummary

STYLES = {1: "green", 0: "", -1: "red"}


def show(report: BenchReport, out: Console) -> None:
    """One row per stage, then failures and notes."""
    out.print(f"{report.model} at {report.url} ({report.endpoint}), {report.workload}, seed {report.seed}")
    goodput = ("goodput/s", "SLO met") if report.slo else ("requests/s",)
    rates = _table("load", "requests", "failed", *goodput, "out tok/s", "all tok/s", "cached")
    latencies = _table("load", "TTFT p50", "p99", "ITL p50", "p99", "TPOT p50", "e2e p50", "p99")
    for stage in report.stages:
        rates.add_row(str(stage.load), *_rates(stage.summary, bool(report.slo)))
        latencies.add_row(str(stage.load), *_latencies(stage.summary))
    out.print(rates)
    out.print()
    out.print(latencies)
    out.print("latencies in ms" + (f"; SLO {report.slo}" if report.slo else ""))
    for stage in report.stages:
        for reason, count in stage.summary.failures.items():
            out.print(f"failed at {stage.load}: {count} x {reason}", soft_wrap=True)
    if report.ramp:
        out.print(f"ramp: {report.ramp}", style="bold", soft_wrap=True)
    if report.interrupted:
        out.print("interrupted: requests that ran at that time are not counted")
    for note in report.notes:
        out.print(f"note: {note}", soft_wrap=True)


def show_comparison(stages: list[ComparedStage], names: tuple[str, str], out: Console) -> None:
    for stage in stages:
        table = Table(title=f"{stage.title}", title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        for title in (f"A: {names[0]}", f"B: {names[1]}", "B / A"):
            table.add_column(title, justify="right")
        for entry in stage.figures:
            ratio = Text(ratio_text(entry), style=STYLES[entry.verdict])
            table.add_row(f"{entry.figure.name}, {entry.figure.unit}", number(entry.a), number(entry.b), ratio)
        out.print(table)


def stage_cells(summary: StageSummary, has_slo: bool) -> list[str]:
    """All figures of a stage."""
    return [*_rates(summary, has_slo), *_latencies(summary)]


def ratio_text(entry: ComparedFigure) -> str:
    if entry.ratio is None:
        return "-"
    return f"{entry.ratio:.2f}x {({1: 'better', 0: 'equal', -1: 'worse'})[entry.verdict]}"


def number(value: float | None) -> str:
    """With three or four significant digits; from 1,000 on, a whole number."""
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 or value == 0 else f"{value:.3g}"


def milliseconds(distribution: Distribution | None, percentile: str) -> str:
    return "-" if distribution is None else number(1000 * float(getattr(distribution, percentile)))


def _cached_share(summary: StageSummary) -> str:
    """The share of prompt tokens that the server took from its cache, as far as it says so."""
    if summary.cached_tokens is None or not summary.prompt_tokens:
        return "-"
    return f"{summary.cached_tokens / summary.prompt_tokens:.0%}"


def _table(first: str, *titles: str) -> Table:
    """A table with these columns. A report has two tables, because one table with all columns is wider than 80
    characters."""
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _rates(summary: StageSummary, has_slo: bool) -> list[str]:
    s = summary
    return [
        str(s.requests),
        f"{s.failed_share:.1%}" if s.failures else "0",
        number(s.goodput_per_s),
        *([f"{s.good_share:.1%}"] if has_slo else []),
        number(s.output_tokens_per_s),
        number(s.total_tokens_per_s) if s.prompt_tokens else "-",
        _cached_share(s),
    ]


def _latencies(summary: StageSummary) -> list[str]:
    s = summary
    return [
        *(milliseconds(s.ttft, p) for p in ("p50", "p99")),
        *(milliseconds(s.itl, p) for p in ("p50", "p99")),
        milliseconds(s.tpot, "p50"),
        *(milliseconds(s.e2e, p) for p in ("p50", "p99")),
    ]
