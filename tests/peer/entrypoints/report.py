"""The table of vLLM's tests: whether each passes on vLLM and on Paceline, and why not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.peer.entrypoints.expected import reason

RESULTS = Path(__file__).parents[3] / "bench" / "results" / "vllm_entrypoint_tests.json"
PREFIX = "tests/entrypoints/"
Row = dict[str, str]  # vllm, paceline: passed, failed, skipped or not run
_NOT_RUN, _NOT_PASSED = "not run", ("failed", "skipped")


def load() -> dict[str, Row]:
    """The rows by test id; empty if no run was stored."""
    if not RESULTS.exists():
        return {}
    stored: dict[str, Any] = json.loads(RESULTS.read_text())
    return {row["test"]: {server: row[server] for server in ("vllm", "paceline")} for row in stored["tests"]}


def note(rows: dict[str, Row], server: str, outcome: dict[str, str]) -> None:
    row = rows.setdefault(outcome["test"].removeprefix(PREFIX), {"vllm": _NOT_RUN, "paceline": _NOT_RUN})
    row[server] = outcome["outcome"]


def differs(row: Row) -> bool:
    """Whether the test passes on vLLM, and does not pass here."""
    return row["vllm"] == "passed" and row["paceline"] in _NOT_PASSED


def problems(rows: dict[str, Row]) -> list[str]:
    """Differences without a reason, and reasons without a difference."""
    found = []
    for test, row in sorted(rows.items()):
        if differs(row) and not reason(test):
            found.append(f"passes on vLLM, {row['paceline']} here: {test}")
        if row["vllm"] == row["paceline"] == "passed" and reason(test):
            found.append(f"passes here, but expected.py says why not: {test}")
    return found


def summary(rows: dict[str, Row]) -> str:
    counts = Counter((row["vllm"], row["paceline"]) for row in rows.values())
    on_vllm = sum(row["vllm"] == "passed" for row in rows.values())
    here_only = sum(counts[outcome, "passed"] for outcome in _NOT_PASSED)
    waiting = counts["passed", _NOT_RUN]
    unknown = sum(row["vllm"] == _NOT_RUN for row in rows.values())
    return (
        f"{on_vllm} of {len(rows)} tests pass on vLLM with this checkpoint. {counts['passed', 'passed']} of these "
        f"pass here, {sum(map(differs, rows.values()))} do not (reasons below), {waiting} were not run here. "
        f"{here_only} others pass here only. {unknown} were not run on vLLM."
    )


def write(rows: dict[str, Row], version: str) -> None:
    """The JSON file, and the same as Markdown."""
    tests = [{"test": test, **row, "reason": _why(test, row)} for test, row in sorted(rows.items())]
    RESULTS.write_text(json.dumps({"vllm": version, "tests": tests}, indent=1) + "\n")
    lines = [
        "# vLLM's own entrypoint tests",
        "",
        f"Tests of vLLM {version}'s source distribution that ask a server, unmodified, with the demo model on a CPU:",
        "`python -m tests.peer.entrypoints.run`. " + summary(rows),
        "",
        "## Pass on vLLM, not here",
        "",
        "| test | reason |",
        "|---|---|",
    ]
    lines += [_line(row["test"], row["reason"]) for row in tests if differs(row)]
    lines += ["", "## Pass here, not on vLLM", ""]
    here_only = [row for row in tests if row["paceline"] == "passed" and row["vllm"] in _NOT_PASSED]
    lines += [f"- `{row['test']}`" for row in here_only] or ["None."]
    not_run = {server: [row for row in tests if row[server] == _NOT_RUN] for server in ("paceline", "vllm")}
    for server, left in not_run.items():
        names = sorted({row["test"].partition("::")[0] for row in left})
        lines += ["", f"## Not run on {server}", "", *(f"- `{name}`" for name in names)] if names else []
    lines += ["", "## All tests by file", "", "| file | tests | pass on vLLM | of these here |", "|---|---|---|---|"]
    for file in sorted({test.partition("::")[0] for test in rows}):
        of_file = [row for test, row in rows.items() if test.startswith(f"{file}::")]
        passed = [row for row in of_file if row["vllm"] == "passed"]
        both = sum(row["paceline"] == "passed" for row in passed)
        lines.append(f"| `{file}` | {len(of_file)} | {len(passed)} | {both} |")
    lines += ["", "The JSON file has each test. Most of those that fail on vLLM need another checkpoint: gpt-oss,"]
    lines += ["models for images or embeddings, or a model that calls tools and reasons when it is asked to."]
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _why(test: str, row: Row) -> str:
    return reason(test) if differs(row) else ""


def _line(test: str, why: str) -> str:
    shown = test.replace("|", "\\|")
    return f"| `{shown}` | {why or '**not known**'} |"
