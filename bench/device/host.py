"""`make bench-host` needs no GPU. It counts the GPU operations and bytes of sampling, and times the launch of a decode
step and of a step with a prefill chunk; it also counts the latter's operations. Writes
bench/results/gpu_counts.json."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.device import launching
from bench.device.counts import CASES, ROWS, VOCAB, count_fused, count_torch
from bench.device.launching import lowest, mixed_operations, run_decodes, run_mixed

# Triton's interpreter needs about 1 s per row, so only these rows run. The bytes are scaled to ROWS.
INTERPRETED_ROWS = 32
MIXED_RUNS = 5
RESULTS = Path(__file__).parents[1] / "results" / "gpu_counts.json"


def count(case: str) -> dict[str, str | int | float]:
    fused, torch = count_fused(CASES[case], INTERPRETED_ROWS, VOCAB), count_torch(CASES[case], ROWS, VOCAB)
    return {
        "case": case,
        "operations": fused.operations,
        "gigabytes": round(fused.bytes / 1e9 * ROWS / INTERPRETED_ROWS, 3),
        "passes": round(sum(fused.passes) / INTERPRETED_ROWS, 2),
        "most_passes": round(max(fused.passes), 2),
        "torch_operations": torch.operations,
        "torch_gigabytes": round(torch.bytes / 1e9, 3),
    }


def main() -> None:
    console = Console()
    rows, runs = [], []
    for case in CASES:
        with console.status(f"counting: {case}"):
            rows.append(count(case))
        runs.append(run_decodes(ROWS))  # here, because a machine may be busy for half a minute
    launches = lowest(runs)
    table = Table(title=f"Sampling of {ROWS} rows, vocabulary {VOCAB:,}, bfloat16 logits", title_justify="left")
    for heading in ("case", "ops", "GB", "passes", "most", "torch: ops", "torch: GB"):
        table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=heading == "case")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)
    for name, took_ms in launches.items():
        console.print(f"launch() of {ROWS} {name} decodes, kernels stubbed: {took_ms:.2f} ms", highlight=False)
    mixed_times = lowest([run_mixed() for _ in range(MIXED_RUNS)])
    mixed = {
        name: {"operations": operations.total, "launch_ms": round(took_ms, 3)}
        for (name, operations), took_ms in zip(mixed_operations().items(), mixed_times.values(), strict=True)
    }
    for name, counted in mixed.items():
        console.print(
            f"launch() of {launching.DECODES} decodes and a chunk, {launching.ROWS} rows, {launching.LAYERS} layers, "
            f"{name}: {counted['operations']} operations, {counted['launch_ms']:.2f} ms",
            highlight=False,
        )
    report = {
        "rows": ROWS,
        "vocabulary": VOCAB,
        "dtype": "bfloat16",
        "interpreted_rows": INTERPRETED_ROWS,
        "sampling": rows,
        "launch_ms": {name: round(took_ms, 3) for name, took_ms in launches.items()},
        "mixed": mixed,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
