"""Reports: JSON that is read again, pages that load nothing, plots, two runs compared."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from services.cli.bench.load.arrivals import OfferedLoad
from services.cli.bench.report import page, tables
from services.cli.bench.report.compare import compared, differences
from services.cli.bench.report.document import BadReport, BenchReport, RampResult, StageReport
from services.cli.bench.report.svg import ChartLimit, ChartLine, LineChart, draw
from services.cli.bench.stats.records import RequestRecord
from services.cli.bench.stats.slo import parse_slo
from services.cli.bench.stats.summary import summarise

SLO = "ttft=200ms,share=0.9"


def stage(load: OfferedLoad, slowness: float = 1.0) -> StageReport:
    records = [
        RequestRecord(i, i, i + 0.5 * slowness, i + 0.1 * slowness, [0.2 * slowness] * 2, 9, 3, 3, True)
        for i in range(10)
    ]
    records.append(RequestRecord(3, 3, 4, error="HTTP 429 <overloaded>"))
    return StageReport(load, summarise(records, parse_slo(SLO)), 0, 0.1, records)


def report(*loads: float, slowness: float = 1.0, slo: str | None = SLO) -> BenchReport:
    stages = [stage(OfferedLoad("rate", load), slowness) for load in loads]
    facts = ("2026-11-25T00:00:00+00:00", "0.1.0", "http://x/v1", "<model> & co", "chat", 7, "random", slo)
    return BenchReport(*facts, False, ["a <note>"], stages, RampResult(2.0, 4.0, 8.0))


def test_a_written_report_reads_the_same(tmp_path: Path) -> None:
    written = report(1, 2)
    written.write(tmp_path / "run.json")
    again = BenchReport.read(tmp_path / "run.json")
    assert again == replace(written, stages=[replace(entry, records=[]) for entry in written.stages])
    requests = json.loads((tmp_path / "run.json").read_text())["stages"][0]["requests"]
    assert len(requests) == 11
    assert requests[0]["ttft_s"] == 0.1
    assert requests[-1]["error"] == "HTTP 429 <overloaded>"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "paceline.bench.v1"}', "[" * 100_000,
                                  '{"schema": "paceline.bench.v1", "stages": [{}], "ramp": null}'])  # fmt: skip
def test_another_file_is_no_report(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(BadReport, match=r"x\.json"):
        BenchReport.read(tmp_path / "x.json")


@pytest.mark.parametrize("loads", [(), (1,), (1, 2), tuple(range(1, 12))])
def test_a_page_works_offline_and_escapes_texts(loads: tuple[float, ...]) -> None:
    text = page.run_page(report(*loads))
    assert "<script" not in text
    assert not re.findall(r"""(?:src|href|url\(|@import)""", text)
    assert "&lt;model&gt; &amp; co" in text
    assert "<model>" not in text
    assert "a &lt;note&gt;" in text
    assert text.count("<svg") == {0: 0, 1: 5, 2: 9, 11: 9}[len(loads)]
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(picture)


def test_a_page_compares_two_runs() -> None:
    a, b = report(1, 2, 4), report(2, 4, 8, slowness=2)
    both = compared(a, b)
    text = page.comparison_page(a, b, both, ("first", "second"))
    assert [entry.title for entry in both] == ["2/s", "4/s"]
    assert text.count("<svg") == 12
    assert "2.00x worse" in text


def test_a_ratio_says_which_run_is_better() -> None:
    (entry,) = compared(report(1), report(1, slowness=2))
    figures = {figure.figure.name: figure for figure in entry.figures}
    assert figures["TTFT p50"].ratio == pytest.approx(2)
    assert figures["TTFT p50"].verdict == -1
    assert figures["output tokens"].verdict == -1
    assert figures["failed"].verdict == 0
    (entry,) = compared(report(1, slowness=2), report(1))
    assert {figure.figure.name: figure.verdict for figure in entry.figures}["TTFT p50"] == 1


def test_single_stages_are_compared_whatever_their_load() -> None:
    (entry,) = compared(report(1), report(3))
    assert entry.title == "1/s | 3/s"
    with pytest.raises(BadReport, match=r"no stage of the same load: 1/s and 3/s, 4/s"):
        compared(report(1), report(3, 4))


def test_goodput_needs_an_slo_and_other_settings_are_named() -> None:
    a, b = report(1, slo=None), report(1, slo=None)
    assert "goodput: meet the SLO" not in {figure.figure.name for figure in compared(a, b)[0].figures}
    assert differences(a, b) == []
    assert differences(a, replace(b, model="x", slo=SLO)) == [
        "the model differs: <model> & co | x",
        f"the slo differs: none | {SLO}",
    ]


@pytest.mark.parametrize(("slo", "shown", "other"), [(SLO, "Goodput", "Requests"), (None, "Requests", "Goodput")])
def test_two_runs_without_an_slo_are_compared_by_their_requests(slo: str | None, shown: str, other: str) -> None:
    a, b = report(1, 2, slo=slo), report(1, 2, slo=slo)
    text = page.comparison_page(a, b, compared(a, b), ("first", "second"))
    assert f"{shown} over load" in text
    assert f"{other} over load" not in text


def test_the_table_names_failures_and_the_ramp(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show(report(1, 2), Console(width=160))
    text = capsys.readouterr().out
    assert "failed at 2/s: 1 x HTTP 429 <overloaded>" in text
    assert "the highest rate that holds the SLO is 2 sessions/s (4/s breaks it)" in text
    assert "90.9%" in text
    assert "note: a <note>" in text


positive = st.floats(0.001, 1e6)


@given(
    points=st.lists(st.tuples(positive, positive), min_size=1, max_size=20),
    limit=positive,
    log_x=st.booleans(),
    log_y=st.booleans(),
)
def test_a_chart_stays_within_its_frame(
    points: list[tuple[float, float]], limit: float, log_x: bool, log_y: bool
) -> None:
    lines = [ChartLine(f"line {i}", points, i, True) for i in range(8)]
    limits = [ChartLimit("a", limit), ChartLimit("b", limit, is_vertical=True)]
    root = ElementTree.fromstring(draw(LineChart("t", "x", "y", lines, log_x, log_y, limits)))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for line in root.iter("line"):
        assert 0 <= min(float(line.attrib["x1"]), float(line.attrib["x2"])) <= width
        assert 0 <= min(float(line.attrib["y1"]), float(line.attrib["y2"])) <= height


def test_a_chart_without_points_is_empty() -> None:
    assert draw(LineChart("t", "x", "y", [ChartLine("a", [], 0)])) == ""
