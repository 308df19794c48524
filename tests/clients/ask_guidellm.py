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
    options = {
        "backend": f"kind=openai_http,target={URL},model={MODEL}",
        "profile": "kind=synchronous",
        "constraint": "kind=max_requests,count=5",
        "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "tokenizer": f"kind=huggingface_auto,model={os.environ['PACELINE_CHECKPOINT']}",
        "output": f"kind=json,path={folder}/report.json",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    command = [str(Path(sys.executable).parent / "guidellm"), "run", *words, "--disable-console"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False, cwd=folder)
    assert done.returncode == 0, (done.stderr or done.stdout)[-300:]
    totals = json.loads((folder / "report.json").read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (5, 0), totals


run(benchmark=benchmarks)
