"""`vllm bench serve`. It skips SSE comments, and fails at any other line of a stream that does not begin with
`data: `."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, URL, run

NUM_PROMPTS = 30


def bench(backend: str, path: str) -> None:
    options = {
        "--backend": backend,
        "--base-url": URL,
        "--endpoint": path,
        "--model": MODEL,
        "--tokenizer": os.environ["PACELINE_CHECKPOINT"],
        "--dataset-name": "random",
        "--random-input-len": "32",
        "--random-output-len": "8",
        "--num-prompts": str(NUM_PROMPTS),
    }
    words = [word for pair in options.items() for word in pair]
    command = [str(Path(sys.executable).parent / "vllm"), "bench", "serve", *words, "--ignore-eos"]
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        command, cwd=tempfile.mkdtemp(), env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    counts = dict(re.findall(r"^(Successful|Failed) requests: +(\d+)", done.stdout, re.MULTILINE))
    expected = {"Successful": str(NUM_PROMPTS), "Failed": "0"}
    assert counts == expected, (counts, (done.stdout + done.stderr)[-300:])


run(completions=lambda: bench("openai", "/v1/completions"),
    chat=lambda: bench("openai-chat", "/v1/chat/completions"))  # fmt: skip
