"""The control plane's results on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

PEERS = ("us_median", "us_p10", "us_p99")
OURS = (*PEERS, "with_wire_us_median")


def show(report: dict[str, Any], console: Console) -> None:
    _show(
        console,
        "Steady decode step, µs (scheduler and cache cores)",
        report["decode"],
        ["running", *(f"step_{name}" for name in OURS), *(f"peer_step_{name}" for name in PEERS), "ratio"],
    )
    admission = report["admission"]
    parts = [
        {"part": part, **{name: admission.get(f"{key}{name}") for name in names}}
        for part, key, names in (
            ("to the plan", "", (*OURS, "ratio")),
            ("whole", "whole_", (*OURS, "ratio")),
            ("hashing", "hashing_", ()),
        )
    ]
    for row, key in zip(parts, ("", "whole_", "hashing_"), strict=True):
        row |= {f"peer_{name}": admission[f"peer_{key}{name}"] for name in PEERS}
    columns = [*OURS, *(f"peer_{name}" for name in PEERS), "ratio"]
    title = f"Admission of {admission['prompt_tokens']:,} tokens, {admission['cached_tokens']:,} of them cached, µs"
    _show(console, title, parts, ["part", *columns])
    _show(console, "Abort, µs", report["abort"], ["order", "waiting", *columns])
    title = "Who is next, µs a pass; peer: SGLang (*: orders by fcfs at so many waiting)"
    rows = [{**row, "order": f"{row['order']}{'*' if row['peer_falls_back'] else ''}"} for row in report["order"]]
    _show(console, title, rows, ["order", "waiting", *PEERS, "next_us_median", "peer_us_median", "ratio"])
    for name, what in report["counted"].items():
        console.print(f"{name}: {what}", highlight=False)


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
