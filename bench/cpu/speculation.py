"""What speculation with n-gram drafts gains on a CPU: the same requests with and without it, in turns, in one run.

The model `llama` of bench/cpu/models.py has random weights. Greedy, its output soon repeats itself: that is the text on
which n-grams guess best. With temperature 1 its output never repeats: that is the text on which they only cost time.
Real text lies in between. The token ids of the two servers are compared, too.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from bench.cpu.models import VOCAB, write_checkpoint
from tests.support.stack import Stack

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 192
# Number of concurrent streams: number of requests.
REQUESTS = {1: 4, 4: 12, 16: 32}
TEXTS = {"repetitive": 0.0, "free": 1.0}  # temperature
DRAFT_TOKENS = 5
COUNTERS = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")


class SpeculationRun(NamedTuple):
    """One measurement. `tokens`: the answers' token ids, in the order of the requests."""

    tokens_per_s: float
    drafted: float
    accepted: float
    tokens: list[list[int]]


def speculation(turns: int) -> dict[str, Any]:
    """The report of bench/results/speculation.json. Its figures are medians over the turns."""
    threads = len(os.sched_getaffinity(0))
    runs: dict[tuple[str, int, bool], list[SpeculationRun]] = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder))
        for turn in range(turns):
            for speculates in (False, True) if turn % 2 == 0 else (True, False):
                with running(checkpoint, threads, speculates) as stack:
                    asyncio.run(ask(stack.url, 1, 1, 0.0))  # warm
                    for text, temperature in TEXTS.items():
                        for streams, requests in REQUESTS.items():
                            runs.setdefault((text, streams, speculates), []).append(
                                measure(stack, streams, requests, temperature)
                            )
    rows = [row(text, streams, runs) for text in TEXTS for streams in REQUESTS]
    return {"threads": threads, "turns": turns, "draft_tokens": DRAFT_TOKENS, "rows": rows}


def row(text: str, streams: int, runs: dict[tuple[str, int, bool], list[SpeculationRun]]) -> dict[str, Any]:
    """One row of the report."""
    off, on = runs[text, streams, False], runs[text, streams, True]
    drafted, accepted = sum(run.drafted for run in on), sum(run.accepted for run in on)
    speed_ups = [mine.tokens_per_s / base.tokens_per_s for mine, base in zip(on, off, strict=True)]
    return {
        "text": text,
        "concurrency": streams,
        "output_tokens_per_s": round(statistics.median(run.tokens_per_s for run in on), 1),
        "without_tokens_per_s": round(statistics.median(run.tokens_per_s for run in off), 1),
        "speed_up": round(statistics.median(speed_ups), 2),
        "drafted": drafted,
        "accepted_share": round(accepted / drafted, 3) if drafted else None,
        "same_tokens": all(run.tokens == off[0].tokens for run in (*off, *on)),
    }


@contextmanager
def running(checkpoint: Path, threads: int, speculates: bool) -> Iterator[Stack]:
    """A running Paceline."""
    with tempfile.TemporaryDirectory() as logs:
        stack = Stack(Path(logs), model=str(checkpoint))
        stack.worker_flags = ["--threads", str(threads), "--dtype", "float32", "--max-num-seqs", "32"]
        if speculates:
            stack.scheduler_flags = ["--speculative-tokens", str(DRAFT_TOKENS)]
        try:
            yield stack.up()
        finally:
            stack.down()


def measure(stack: Stack, streams: int, requests: int, temperature: float) -> SpeculationRun:
    """One measurement, with the scheduler's own counters."""
    before = counted(stack)
    began = time.perf_counter()
    tokens = asyncio.run(ask(stack.url, streams, requests, temperature))
    wall_s = time.perf_counter() - began
    drafted, accepted = (now - then for now, then in zip(counted(stack), before, strict=True))
    return SpeculationRun(sum(map(len, tokens)) / wall_s, drafted, accepted, tokens)


def counted(stack: Stack) -> list[float]:
    """Draft tokens and accepted tokens since the scheduler's start."""
    url = f"http://127.0.0.1:{stack.metrics_ports['scheduler']}/metrics"
    lines = httpx.get(url, timeout=60).text.splitlines()
    return [
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"paceline_scheduler_{name}_total"))
        for name in COUNTERS
    ]


async def ask(url: str, streams: int, requests: int, temperature: float) -> list[list[int]]:
    """The token ids of the answers. The requests are the same in each call."""
    found: dict[int, list[int]] = {}
    left = iter(range(requests))

    async def user(client: httpx.AsyncClient) -> None:
        for index in left:
            rng = random.Random(index)
            fields = {
                "prompt": [rng.randrange(8, VOCAB) for _ in range(PROMPT_TOKENS)],
                "max_tokens": OUTPUT_TOKENS,
                "temperature": temperature,
                "seed": index,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            answer = await client.post(f"{url}/v1/completions", json=fields)
            found[index] = answer.raise_for_status().json()["choices"][0]["token_ids"]

    async with httpx.AsyncClient(timeout=600) as client:
        await asyncio.gather(*(user(client) for _ in range(streams)))
    return [found[index] for index in range(requests)]


def show(report: dict[str, Any], console: Console) -> None:
    """The report as a table."""
    title = f"Speculation, {report['draft_tokens']} draft tokens, 56 M parameters, {report['threads']} threads"
    table = Table(title=title)
    for column in ("text", "streams", "tokens/s", "without", "ratio", "accepted", "same tokens"):
        table.add_column(column, justify="left" if column == "text" else "right")
    for one in report["rows"]:
        share = "-" if one["accepted_share"] is None else f"{one['accepted_share']:.0%}"
        speeds = (f"{one[name]:,.1f}" for name in ("output_tokens_per_s", "without_tokens_per_s"))
        table.add_row(
            one["text"], str(one["concurrency"]), *speeds, f"{one['speed_up']:.2f}", share, str(one["same_tokens"])
        )
    console.print(table)
