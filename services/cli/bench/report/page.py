"""The HTML report: one file without scripts, fonts or pictures from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files

from services.cli.bench.report import charts
from services.cli.bench.report.compare import ComparedStage, differences
from services.cli.bench.report.document import BenchReport, StageReport
from services.cli.bench.report.svg import LineChart, draw
from services.cli.bench.report.tables import milliseconds, number, ratio_text, stage_cells

VERDICTS = {1: "better", 0: "equal", -1: "worse"}


def run_page(report: BenchReport) -> str:
    """One run: the best value of each main figure, tables, plots."""
    body = [
        "<h1>Benchmark of " + escape(report.model) + "</h1>",
        _facts(report),
        _tiles(report),
        "<h2>Stages</h2>",
        _stages(report),
        _failures(report),
        _notes(report),
    ]
    if len(report.stages) > 1:
        body += ["<h2>Over load</h2>", _figures(charts.over_load(report))]
    body += ["<h2>Distributions</h2>", _figures(charts.distributions(report))]
    if len(report.stages) == 1 and report.stages[0].records:
        body += ["<h2>Over time</h2>", _figures(charts.over_time(report.stages[0]))]
    return _page(f"paceline bench: {report.model}", body)


def comparison_page(a: BenchReport, b: BenchReport, stages: list[ComparedStage], names: tuple[str, str]) -> str:
    """Two runs: their facts, the plots with both, a table of ratios for each stage."""
    titles = (f"A: {names[0]}", f"B: {names[1]}")
    body = [
        f"<h1>{escape(names[0])} and {escape(names[1])}</h1>",
        f"<h2>{escape(titles[0])}</h2>",
        _facts(a),
        f"<h2>{escape(titles[1])}</h2>",
        _facts(b),
        *(f'<p class="warning">{escape(text)}</p>' for text in differences(a, b)),
    ]
    if len(stages) > 1:
        body += ["<h2>Over load</h2>", _figures(charts.both_over_load(stages, titles, has_slo=bool(a.slo or b.slo)))]
    body += ["<h2>Stage by stage</h2>", *(_compared(stage, titles) for stage in stages)]
    body += ["<h2>Distributions</h2>", _figures(charts.both_distributions(stages, titles))]
    return _page(f"paceline bench: {names[0]} and {names[1]}", body)


def _page(title: str, body: Iterable[str]) -> str:
    style = (files("services.cli.bench.report") / "page.css").read_text("utf-8")
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>",
            *filter(None, body),
            "</main>\n</body>\n</html>\n",
        )
    )


def _facts(report: BenchReport) -> str:
    facts = {
        "server": f"{report.url} ({report.endpoint})",
        "model": report.model,
        "workload": report.workload,
        "SLO": report.slo or "none",
        "measured": f"{report.created}, seed {report.seed}, paceline {report.paceline}",
    }
    if report.ramp:
        facts["ramp"] = str(report.ramp)
    rows = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    cut = '<p class="warning">Interrupted: the last stage is incomplete.</p>' if report.interrupted else ""
    return f"<dl>{rows}</dl>{cut}"


def _tiles(report: BenchReport) -> str:
    measured = [stage for stage in report.stages if stage.summary.succeeded]
    if not measured:
        return '<p class="warning">No request succeeded.</p>'
    best = max(measured, key=lambda stage: stage.summary.goodput_per_s)
    fastest = max(measured, key=lambda stage: stage.summary.output_tokens_per_s)
    least = min(measured, key=lambda stage: stage.summary.ttft.p50 if stage.summary.ttft else float("inf"))
    tiles: list[tuple[str, str, StageReport | None]] = [
        ("highest goodput" if report.slo else "most requests", f"{number(best.summary.goodput_per_s)}/s", best),
        ("most output tokens", f"{number(fastest.summary.output_tokens_per_s)}/s", fastest),
        ("lowest TTFT p50", f"{milliseconds(least.summary.ttft, 'p50')} ms", least),
    ]
    if report.ramp and report.ramp.holds:
        tiles.insert(0, ("highest rate that holds the SLO", f"{number(report.ramp.holds)}/s", None))
    cells = []
    for name, value, stage in tiles:
        load = f"load: {escape(str(stage.load))}" if stage else ""
        cells.append(f"<div><b>{value}</b><span>{name}</span><small>{load}</small></div>")
    return f'<section class="tiles">{"".join(cells)}</section>'


def _stages(report: BenchReport) -> str:
    head = ["load", "requests", "failed", "goodput /s", "SLO met", "output tok/s", "all tok/s", "cached"]
    head += ["TTFT p50", "p99", "ITL p50", "p99", "TPOT p50", "e2e p50", "p99"]
    if not report.slo:
        head[3:5] = ["requests /s"]
    rows = [[str(stage.load), *stage_cells(stage.summary, bool(report.slo))] for stage in report.stages]
    return _table(head, rows) + "<p>Latencies in ms.</p>"


def _failures(report: BenchReport) -> str:
    rows = [
        [str(stage.load), reason, str(count), f"{count / stage.summary.requests:.1%}"]
        for stage in report.stages
        for reason, count in stage.summary.failures.items()
    ]
    return "<h2>Failures</h2>" + _table(["load", "reason", "requests", "share"], rows) if rows else ""


def _notes(report: BenchReport) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return f"<h2>Notes</h2><ul>{items}</ul>" if items else ""


def _compared(stage: ComparedStage, titles: tuple[str, str]) -> str:
    rows = []
    for entry in stage.figures:
        verdict = VERDICTS[entry.verdict]
        cells = [f"{entry.figure.name}, {entry.figure.unit}", number(entry.a), number(entry.b)]
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr>{shown}<td class="{verdict}">{escape(ratio_text(entry))}</td></tr>')
    head = "".join(f"<th>{escape(cell)}</th>" for cell in ("", *titles, "B / A"))
    return f'<h3>{escape(stage.title)}</h3><div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _table(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _figures(found: Iterable[LineChart]) -> str:
    shown = []
    for chart in found:
        if picture := draw(chart):
            note = f"<small>{escape(chart.note)}</small>" if chart.note else ""
            shown.append(f"<figure><figcaption>{escape(chart.title)}</figcaption>{picture}{note}</figure>")
    return f'<section class="charts">{"".join(shown)}</section>'
