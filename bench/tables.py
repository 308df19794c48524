"""The control plane's results on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

PEERS = ("us_median", "us_p10", "us_p99")
OURS = (*PEERS, "with_wire_us_median")
# For each table: the key in the report, the title, and the parts with their row names and key prefixes.
ADMISSIONS = (
    ("burst", "many at once, per request", {"whole": "", "hashing": "hashing_"}),
    ("lone", "one at a time", {"to the plan": "", "whole": "whole_", "hashing": "hashing_"}),
)


def show(report: dict[str, Any], console: Console) -> None:
    _show(
        console,
        "Steady decode step, µs (scheduler and cache cores)",
        report["decode"],
        ["running", *(f"step_{name}" for name in OURS), *(f"peer_step_{name}" for name in PEERS), "ratio"],
    )
    columns = [*OURS, *(f"peer_{name}" for name in PEERS), "ratio"]
    for name, how, parts in ADMISSIONS:
        admission = report["admission"][name]
        tokens = f"{admission['prompt_tokens']:,} tokens, {admission['cached_tokens']:,} of them cached"
        rows = [
            {"part": part, **{column: admission.get(_keyed(column, key)) for column in columns}}
            for part, key in parts.items()
        ]
        _show(console, f"Admission of {tokens}, {how}, µs", rows, ["part", *columns])
    _show(console, "Abort, µs", report["abort"], ["order", "waiting", *columns])
    title = "Choosing the next requests, µs per pass; peer: SGLang (*: SGLang uses fcfs with this many requests)"
    orders = [{**row, "order": f"{row['order']}{'*' if row['peer_falls_back'] else ''}"} for row in report["order"]]
    _show(console, title, orders, ["order", "waiting", *PEERS, "next_us_median", "peer_us_median", "ratio"])
    for name, what in report["counted"].items():
        console.print(f"{name}: {what}", highlight=False)


def _keyed(column: str, key: str) -> str:
    """The report's key for a column of the part with key prefix `key`. In a peer's column, `peer_` comes first."""
    return f"peer_{key}{column.removeprefix('peer_')}" if column.startswith("peer_") else f"{key}{column}"


def _show(console: Console, title: str, rows: list[dict[str, Any]], columns: list[str]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        heading = column.replace("_us", "").replace("us_", "").replace("step_", "").replace("_", " ")
        table.add_column("ours/peer" if column == "ratio" else heading, justify="right")
    for row in rows:
        table.add_row(*(_cell(column, row.get(column)) for column in columns))
    console.print(table)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column == "ratio":
        return f"{value:.3f}"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
