"""guidellm's benchmark over the chat API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, URL, run


def benchmarks() -> None:
    folder = Path(tempfile.mkdtemp())
    command = [
        *(str(Path(sys.executable).parent / "guidellm"), "benchmark", "run"),
        *("--target", URL, "--model", MODEL, "--profile", "synchronous", "--max-requests", "5"),
        *("--data", "prompt_tokens=16,output_tokens=8", "--processor", os.environ["PACELINE_CHECKPOINT"]),
        *("--output-dir", str(folder), "--outputs", "json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder)
    assert done.returncode == 0, (done.stderr or done.stdout)[-300:]
    [report] = folder.glob("*.json")
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (5, 0), totals


run(benchmark=benchmarks)
