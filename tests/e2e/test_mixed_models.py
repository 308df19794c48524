"""Workers and gateways with another model or data type than the attached workers."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from demo import CHECKPOINT
from services.runtime.exit_status import REFUSED
from tests.support.ports import free_port
from tests.support.stack import Stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"))
    try:
        yield stack.up()
    finally:
        stack.down()


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a tokenizer that swaps the ids of two words."""
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path_factory.mktemp("models") / "other"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    words = sorted(vocab, key=vocab.get)
    first, last = words[-2:]
    vocab[first], vocab[last] = vocab[last], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def refused_worker(stack: Stack, *flags: str) -> str:
    """The one line with which such a worker ends."""
    command = [sys.executable, "-m", "services.cli", "worker", "--scheduler", stack.scheduler, "--threads", "1"]
    command += ["--metrics-port", "0", "--log-level", "error", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == REFUSED, ended.stderr
    [line] = ended.stderr.splitlines()
    return line


def test_a_worker_in_another_data_type_ends_with_one_line(stack: Stack) -> None:
    line = refused_worker(stack, "--dtype", "bfloat16")
    assert line.startswith("paceline worker: the scheduler refuses this worker: dtype: ")
    assert "in float32, not in bfloat16" in line


def test_a_worker_with_quantized_weights_ends_with_one_line(stack: Stack) -> None:
    line = refused_worker(stack, "--dtype", "bfloat16", "--quantization", "int8")
    assert "in float32, not in bfloat16+int8" in line


def test_a_worker_of_another_model_ends_with_one_line(stack: Stack) -> None:
    line = refused_worker(stack, "--load-format", "dummy")
    assert line.startswith("paceline worker: the scheduler refuses this worker: model: this scheduler serves ")


def test_a_worker_with_blocks_of_another_size_ends_with_one_line(stack: Stack) -> None:
    assert "block_size: 8, but the workers here use 16" in refused_worker(stack, "--block-size", "8")


def test_a_gateway_of_another_model_refuses_requests(stack: Stack, other_model: Path) -> None:
    stack.model = str(other_model)
    stack.gateway_ports["gateway-2"] = free_port(), free_port()
    stack.start("gateway-2")
    stack.model = ""
    url = f"http://127.0.0.1:{stack.gateway_ports['gateway-2'][0]}"
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        reason = ""
        while "has the model" not in reason:
            time.sleep(0.05)
            with contextlib.suppress(httpx.TransportError):  # it starts
                reason = http.get("/ready").json()["reason"]
        assert f"this gateway has the model {other_model} (tokenizer " in reason
        answer = http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 4})
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, reason)
    with httpx.Client(base_url=stack.url, timeout=60, trust_env=False) as http:
        assert http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 4}).status_code == 200
