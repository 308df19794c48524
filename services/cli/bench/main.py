"""`paceline bench`: puts load on an OpenAI-compatible server and measures it; compares two runs."""

from __future__ import annotations

import sys
from pathlib import Path

import uvloop
from rich.console import Console

from services.cli.arguments import Parser, console, usage_error
from services.cli.bench.client import ServerRefuses
from services.cli.bench.load.traces import TraceError
from services.cli.bench.options import PROG, parse_options
from services.cli.bench.options import parser as parser  # for shell completion
from services.cli.bench.report import compare, page, tables
from services.cli.bench.report.document import BadReport, BenchReport
from services.cli.bench.run import BenchRun
from services.cli.bench.screen import ProgressScreen
from services.runtime.service import raise_file_limit

# The exit status after Ctrl-C, also of a run that reported what it had measured.
INTERRUPTED_STATUS = 130


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    if argv[:1] == ["compare"]:
        return compare_runs(argv[1:])
    options = parse_options(argv)
    raise_file_limit()
    screen = ProgressScreen(Console(stderr=True, highlight=False))

    async def body() -> BenchReport:
        return await BenchRun(options, screen).run()

    try:
        report = uvloop.run(body())
    except TraceError as error:
        return usage_error(PROG, str(error))
    except ServerRefuses as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    out = console()
    tables.show(report, out)
    try:
        if options.json_file:
            report.write(options.json_file)
            out.print(f"JSON: {options.json_file}", soft_wrap=True)
        if options.html_file:
            options.html_file.write_text(page.run_page(report), "utf-8")
            out.print(f"HTML: {options.html_file}", soft_wrap=True)
    except OSError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    if report.interrupted:
        return INTERRUPTED_STATUS
    return 0 if any(stage.summary.succeeded for stage in report.stages) else 1


def compare_runs(argv: list[str]) -> int:
    """`paceline bench compare A.json B.json`."""
    prog = f"{PROG} compare"
    parser = Parser(prog=prog, description="Show two runs side by side, stage by stage, with the ratios B / A.")
    parser.add_argument("a", type=Path, metavar="A.json", help="written by `paceline bench --json`")
    parser.add_argument("b", type=Path, metavar="B.json")
    parser.add_argument("--html", metavar="FILE", type=Path, help="one page with plots, which works offline")
    arguments = parser.parse_args(argv)
    try:
        a, b = BenchReport.read(arguments.a), BenchReport.read(arguments.b)
        both = compare.compared(a, b)
    except BadReport as error:
        return usage_error(prog, str(error))
    names = (arguments.a.stem, arguments.b.stem)
    tables.show_comparison(both, names, console())
    for text in compare.differences(a, b):
        console().print(f"note: {text}", soft_wrap=True)
    if arguments.html:
        try:
            arguments.html.write_text(page.comparison_page(a, b, both, names), "utf-8")
        except OSError as error:
            return usage_error(prog, str(error))
        console().print(f"HTML: {arguments.html}", soft_wrap=True)
    return 0
