"""Runs SGLang's SchedulePolicy with its RadixCache on the workload of bench/orders.py, and SGLang's prefix caches on
the workload of bench/cache/cache.py. Reads jobs and prints samples (peer.py).

Runs in the environment that tests/peer/env.sh makes, with the stand-ins for kernels and web servers from
tests/peer/sglang_stubs.py.
"""

# ruff: noqa: E402 - SGLang can be imported only after the stand-ins for packages that are not installed

from __future__ import annotations

import gc
import json
import logging
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ANSWERS, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not get among the answers
warnings.filterwarnings("ignore")
sys.path.insert(0, str(ROOT / "tests" / "peer"))
sys.path.append(str(ROOT))

import sglang_stubs

sglang_stubs.install()

import numpy as np
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__

from bench.peers.sglang_cache import JOBS

BLOCK_SIZE = 16
FAMILIES, SHARED, OWN = 16, 512, 128


def requests(rng: np.random.Generator) -> Iterator[Req]:
    for i in count(1):
        family = int(rng.integers(FAMILIES))
        prompt = [*range(1000 * family, 1000 * family + SHARED), *rng.integers(1 << 20, 1 << 29, OWN).tolist()]
        sampling = SamplingParams(max_new_tokens=int(rng.integers(1, 512)), temperature=0.0)
        sampling.normalize(None)
        request = Req(str(i), "", array("q", prompt), sampling, vocab_size=1 << 30)
        request.arrival_processed_tokens = 100 * i
        yield request


def order(order: str, waiting: int, passes: int, seed: int) -> list[float]:
    """Seconds of each pass."""
    rng = np.random.default_rng(seed)
    tree = RadixCache.create_simulated(page_size=BLOCK_SIZE)
    for family in range(1, FAMILIES):
        cached = array("q", range(1000 * family, 1000 * family + 2 * BLOCK_SIZE * family))
        tree.insert(InsertParams(key=RadixKey(cached)))
    policy = SchedulePolicy(order, tree, False, False, False)
    source = requests(rng)
    queue = list(islice(source, waiting))
    changes = max(1, waiting // 100)
    seconds = []
    gc.collect()
    gc.freeze()
    gc.disable()
    for number in range(passes + 1):
        gone = {queue[i] for i in rng.choice(waiting, changes, replace=False).tolist()}
        fresh = list(islice(source, changes))
        began = time.perf_counter()
        queue = [request for request in queue if request not in gone]  # as SGLang's scheduler does
        queue += fresh
        policy.calc_priority(queue, None, 1_000_000)
        if number:  # the first one is the warm-up
            seconds.append(time.perf_counter() - began)
    gc.enable()
    gc.unfreeze()
    return seconds


def main() -> None:
    logging.disable(logging.WARNING)
    arguments = ServerArgs(
        model_path=str(ROOT / "demo" / "checkpoint"),
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
    )
    publish(arguments, role="scheduler")
    jobs: dict[str, Callable[..., Any]] = {**JOBS, "order": order, "version": lambda: __version__}
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(jobs[job.pop("what")](**job)), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
