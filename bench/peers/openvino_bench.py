"""OpenVINO GenAI's side of bench.cpu.serving: its continuous batching, in this process and without HTTP. Runs in an
environment of its own (tests/peer/env.sh openvino). It reads jobs from stdin, and writes results, each as a line of
JSON."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

# What the libraries print goes to stderr.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
# The step that serves the most tokens per second on two cores; 256 is OpenVINO's own default.
STEP_TOKENS = 2048
HINTS = {"bfloat16": "bf16", "float32": "f32"}


class OpenVinoBench:
    """The jobs of one process: `start` first."""

    def __init__(self) -> None:
        self.pipeline: Any = None
        self.num_requests = 0

    def version(self) -> str:
        return str(openvino.get_version())

    def start(self, checkpoint: str, dtype: str, threads: int, max_num_seqs: int) -> bool:
        """Convert the checkpoint, unless that was done before, and compile it."""
        folder = Path(checkpoint) / "openvino"
        if not folder.exists():
            command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", checkpoint]
            kind = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
            subprocess.run([*command, *kind, str(folder)], check=True)
        config = genai.SchedulerConfig()
        config.max_num_batched_tokens, config.max_num_seqs, config.cache_size = STEP_TOKENS, max_num_seqs, 1
        config.enable_prefix_caching = False
        hints = {"INFERENCE_PRECISION_HINT": HINTS[dtype], "INFERENCE_NUM_THREADS": threads}
        self.pipeline = genai.ContinuousBatchingPipeline(str(folder), config, "CPU", hints)
        return True

    def load(self, streams: int, requests: int, prompt_tokens: int, output_tokens: int, vocab: int) -> dict[str, float]:
        """The figures of bench.client. `streams` requests run at any time, until `requests` of them have run."""
        rng = random.Random(time.time_ns())
        options = genai.GenerationConfig(max_new_tokens=output_tokens, ignore_eos=True, do_sample=False)
        live: list[tuple[Any, float, list[float]]] = []  # handle, when it began, when it had each of its tokens
        ended: list[tuple[float, list[float]]] = []
        num_started = 0
        began_s = time.perf_counter()
        while len(ended) < requests:
            while num_started < requests and len(live) < streams:
                prompt = np.array([[rng.randrange(8, vocab) for _ in range(prompt_tokens)]], np.int64)
                now_s = time.perf_counter()
                handle = self.pipeline.add_request(self.num_requests, openvino.Tensor(prompt), options)
                live.append((handle, now_s, []))
                num_started += 1
                self.num_requests += 1
            self.pipeline.step()
            now_s = time.perf_counter()
            for handle, _, token_s in live:
                while handle.can_read():
                    token_s += [now_s] * sum(len(output.generated_ids) for output in handle.read().values())
            ended += [(first_s, token_s) for _, first_s, token_s in live if len(token_s) >= output_tokens]
            live = [one for one in live if len(one[2]) < output_tokens]
        wall_s = time.perf_counter() - began_s
        return {
            "tokens_per_s": sum(len(token_s) for _, token_s in ended) / wall_s,
            "ttft_p50_ms": 1000 * statistics.median(token_s[0] - first_s for first_s, token_s in ended),
            "tpot_p50_ms": 1000 * statistics.median((t[-1] - t[0]) / (len(t) - 1) for _, t in ended),
        }


def main() -> None:
    bench = OpenVinoBench()
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(getattr(bench, job.pop("what"))(**job)), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
