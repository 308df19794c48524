"""Workloads for a cluster run, made from a seed: what clients ask, and when.

Lengths and shapes follow public traces (chat: log-normal prompts of a few hundred tokens, and outputs of one to two
hundred; agents: contexts of ten thousand tokens that grow by a few hundred, and outputs of a few dozen). Pauses are
shorter, so that half a minute on the virtual clock shows the steady state. No two blocks are equal by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.cluster import ClientSession, Turn

Rng = np.random.Generator
Tokens = npt.NDArray[np.int32]
TOKENS = 1 << 29  # token ids of prompts are below this


@dataclass(frozen=True, slots=True)
class Workload:
    """`sessions_per_s`: of an open run, for each worker. It is 80 % of the rate measured in a closed run with one
    worker of the default cost. With one worker, placement has no influence. `concurrency`: sessions of a closed run,
    for each worker. `num_sessions`: of a run, for each worker."""

    name: str
    what: str
    session: Callable[[Rng, Shared], list[Turn]]
    sessions_per_s: float
    concurrency: int
    num_sessions: int


class Shared:
    """Prefixes of prompts that many sessions of a run share."""

    def __init__(self, rng: Rng) -> None:
        self.system = draw(rng, 1_500)
        self.prompts = [draw(rng, int(rng.integers(500, 3_000))) for _ in range(20)]
        weights = 1 / np.arange(1, 21) ** 1.1
        self.weights = weights / weights.sum()
        self.chat_system = draw(rng, 200)
        self.tools = draw(rng, 3_000)


def draw(rng: Rng, num_tokens: int) -> Tokens:
    return rng.integers(1, TOKENS, num_tokens).astype(np.int32)


def lognormal(rng: Rng, median: float, sigma: float, low: int, high: int) -> int:
    return int(np.clip(rng.lognormal(np.log(median), sigma), low, high))


def one(prompt: Tokens, num_output_tokens: int) -> list[Turn]:
    return [Turn(0.0, prompt, num_output_tokens)]


def shared_prompt(rng: Rng, shared: Shared) -> list[Turn]:
    return one(np.concatenate((shared.system, draw(rng, 8))), lognormal(rng, 96, 0.4, 16, 256))


def zipf_prompts(rng: Rng, shared: Shared) -> list[Turn]:
    prompt = shared.prompts[int(rng.choice(20, p=shared.weights))]
    tail = draw(rng, lognormal(rng, 64, 0.7, 8, 512))
    return one(np.concatenate((prompt, tail)), lognormal(rng, 96, 0.5, 16, 384))


def conversation(rng: Rng, shared: Shared) -> list[Turn]:
    turns = []
    for number in range(int(rng.integers(2, 9))):
        own = draw(rng, lognormal(rng, 150 if number else 400, 0.9, 8, 4_000))
        tokens = own if number else np.concatenate((shared.chat_system, own))
        pause_s = float(rng.exponential(1.0)) if number else 0.0
        turns.append(Turn(pause_s, tokens, lognormal(rng, 110, 0.6, 8, 512)))
    return turns


def agent(rng: Rng, shared: Shared) -> list[Turn]:
    turns = []
    for number in range(int(rng.integers(8, 17))):
        tokens = draw(rng, lognormal(rng, 350, 0.8, 32, 3_000))
        if not number:
            tokens = np.concatenate((shared.tools, draw(rng, int(rng.integers(2_000, 6_000)))))
        pause_s = lognormal(rng, 400, 0.8, 50, 4_000) / 1e3 if number else 0.0
        turns.append(Turn(pause_s, tokens, lognormal(rng, 40, 0.6, 8, 200)))
    return turns


def no_sharing(rng: Rng, shared: Shared) -> list[Turn]:
    return one(draw(rng, int(rng.integers(200, 1_000))), int(rng.integers(40, 200)))


def mixed_lengths(rng: Rng, shared: Shared) -> list[Turn]:
    return one(draw(rng, lognormal(rng, 500, 1.3, 16, 16_000)), lognormal(rng, 80, 1.1, 4, 1_500))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("shared-prompt", "one system prompt of 1,500 tokens, 8 own ones", shared_prompt, 71.0, 96, 800),
        Workload("zipf", "20 prompts of 500 to 3,000 tokens, Zipf 1.1", zipf_prompts, 56.0, 96, 600),
        Workload("conversations", "2 to 8 turns, pauses of 1 s", conversation, 6.0, 64, 100),
        Workload("agents", "8 to 16 calls on 5,000 to 15,000 tokens, pauses of half a second", agent, 0.9, 12, 30),
        Workload("no-sharing", "prompts of 200 to 1,000 tokens, nothing shared", no_sharing, 35.0, 96, 600),
        Workload("mixed-lengths", "heavy-tailed prompts and outputs, nothing shared", mixed_lengths, 19.5, 96, 500),
    )
}


def make_sessions(workload: Workload, capacity: float, seed: int, scale: float = 1.0) -> list[ClientSession]:
    """Sessions for a fleet of that capacity (in workers of the default cost): Poisson arrivals at the workload's rate.
    `scale` multiplies the workload's number of sessions."""
    rng = np.random.default_rng(seed)
    shared = Shared(rng)
    count = round(workload.num_sessions * capacity * scale)
    arrivals = rng.exponential(1 / (workload.sessions_per_s * capacity), count).cumsum()
    return [ClientSession(at_s, workload.session(rng, shared)) for at_s in arrivals.tolist()]
