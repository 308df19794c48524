"""The table of vLLM's tests: whether each passes on vLLM and on Paceline, and why not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.peer.entrypoints.expected import reason

RESULTS = Path(__file__).parents[3] / "bench" / "results" / "vllm_entrypoint_tests.json"
PREFIX = "tests/entrypoints/"
Row = dict[str, str]  # vllm, paceline: passed, failed or skipped


def load() -> dict[str, Row]:
    """By the test's id. Empty if no run was stored."""
    if not RESULTS.exists():
        return {}
    stored: dict[str, Any] = json.loads(RESULTS.read_text())
    return {row["test"]: {server: row[server] for server in ("vllm", "paceline")} for row in stored["tests"]}


def note(rows: dict[str, Row], server: str, outcome: dict[str, str]) -> None:
    row = rows.setdefault(outcome["test"].removeprefix(PREFIX), {"vllm": "not run", "paceline": "not run"})
    row[server] = outcome["outcome"]


def problems(rows: dict[str, Row]) -> list[str]:
    """Differences without a reason, and reasons without a difference."""
    found = []
    for test, row in sorted(rows.items()):
        if "not run" in row.values():
            continue
        differs = row["vllm"] == "passed" != row["paceline"]
        if differs and not reason(test):
            found.append(f"passes on vLLM, {row['paceline']} here: {test}")
        if row["paceline"] == "passed" and reason(test):
            found.append(f"passes here, but expected.py says why not: {test}")
    return found


def summary(rows: dict[str, Row]) -> str:
    counts = Counter((row["vllm"] == "passed", row["paceline"] == "passed") for row in rows.values())
    on_vllm = counts[True, True] + counts[True, False]
    return (
        f"{len(rows)} tests ask a server. {on_vllm} pass on vLLM with this checkpoint; {counts[True, True]} of "
        f"these pass here, {counts[True, False]} do not. {counts[False, True]} others pass here only."
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
    lines += [_line(row["test"], row["reason"]) for row in tests if row["vllm"] == "passed" != row["paceline"]]
    lines += ["", "## Pass here, not on vLLM", ""]
    lines += [f"- `{row['test']}`" for row in tests if row["paceline"] == "passed" != row["vllm"]] or ["None."]
    lines += ["", "## All tests by file", "", "| file | tests | pass on vLLM | of these here |", "|---|---|---|---|"]
    for file in sorted({test.partition("::")[0] for test in rows}):
        of_file = [row for test, row in rows.items() if test.startswith(f"{file}::")]
        passed = [row for row in of_file if row["vllm"] == "passed"]
        both = sum(row["paceline"] == "passed" for row in passed)
        lines.append(f"| `{file}` | {len(of_file)} | {len(passed)} | {both} |")
    lines += [
        "",
        "The JSON file has each test. Most of those that fail on vLLM need another checkpoint: gpt-oss, models",
    ]
    lines += ["models for images or embeddings, or a model that calls tools and reasons when it is asked to."]
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _why(test: str, row: Row) -> str:
    return reason(test) if row["vllm"] == "passed" != row["paceline"] else ""


def _line(test: str, why: str) -> str:
    shown = test.replace("|", "\\|")
    return f"| `{shown}` | {why or '**not known**'} |"
