"""vLLM's own benchmark client, unmodified, against running services: `make peer-test`."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo import CHECKPOINT
from tests.peer.test_vllm import PYTHON
from tests.support.stack import Stack

DRIVER = Path(__file__).parent / "vllm_bench.py"
NUM_PROMPTS = 30

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM's environment is missing: make peer-test makes it"),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("stack"))
    running.gateway_flags = ["--served-model-name", str(CHECKPOINT)]  # the client loads the tokenizer by the name
    try:
        yield running.up()
    finally:
        running.down()


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_the_benchmark_reads_every_answer(stack: Stack, tmp_path: Path, backend: str, path: str) -> None:
    """It fails at any line of a stream that does not begin with `data:`."""
    options = {
        "--backend": backend,
        "--base-url": stack.url,
        "--endpoint": path,
        "--model": str(CHECKPOINT),
        "--dataset-name": "random",
        "--random-input-len": "32",
        "--random-output-len": "8",
        "--num-prompts": str(NUM_PROMPTS),
    }
    arguments = [word for pair in options.items() for word in pair]
    # The peer's environment has no part of ours.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, DRIVER, *arguments, "--ignore-eos"],
        cwd=tmp_path,
        env={**environment, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    counts = dict(re.findall(r"^(Successful|Failed) requests: +(\d+)", done.stdout, re.MULTILINE))
    assert counts == {"Successful": str(NUM_PROMPTS), "Failed": "0"}, done.stdout[-2000:] + done.stderr[-2000:]
