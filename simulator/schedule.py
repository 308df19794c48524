"""The events of a simulated run, as data: which client asks for what, what happens to which party, and when.

A schedule comes from a seed, is stored as JSON, and can lose any of its parts and still be played. That is how a
failing schedule is shrunk.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

FaultKind = Literal["kill", "freeze", "suspend", "drain", "cut", "silence", "isolate"]

NUM_GATEWAYS = 2
# One seed in this many has two schedulers, and an etcd that elects one of them.
PAIR_EVERY = 6
# Seeds below this have no grammars: a grammar shifts the times of messages, so a seed that once found a defect might no
# longer find it.
FIRST_WITH_GRAMMARS = 1000
# The same for texts that repeat themselves, and for schedulers that speculate.
FIRST_WITH_DRAFTS = 2000


@dataclass(frozen=True, slots=True)
class ClientScript:
    """A client's request, and when the client leaves for good.

    A client with `comes_back` returns in three cases: its gateway is lost; its connection breaks, `breaks_after_s`
    after the client began; nothing came for `patience_s`, which doubles with each try. It brings the tokens that it
    has, or otherwise its key. The gateway that it has left notices, or gives up waiting for it, `grace_s` later.
    """

    at_s: float
    gateway: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    n: int = 1
    ignore_eos: bool = False
    logprobs: bool = False
    beam_width: int = 0  # 0: no beam search
    cancel_after_s: float | None = None
    comes_back: bool = False
    brings_tokens: bool = False  # like a gRPC client; only with n = 1 and without beam search
    breaks_after_s: float | None = None
    patience_s: float | None = None
    grace_s: float = 0.0
    grammar: str = ""
    repeats: int = 0  # its text mostly repeats the token this many places before; 0: it does not repeat itself


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a party, by `kind`:

    - "kill", "drain": the party is killed, or told to leave, and is started again after `for_s`.
    - "freeze": the party stands still for `for_s`.
    - "suspend": its machine stands still for `for_s`, its clock as well.
    - "cut", "silence": the `which`-th of its connections at that moment is cut, or falls silent.
    - "isolate": a scheduler cannot reach etcd for `for_s`.

    `target` "leader": the scheduler that is elected at that moment.
    """

    at_s: float
    kind: FaultKind
    target: str
    for_s: float = 0.0
    which: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """`seed` gives the sizes of the parties and every delay of the network."""

    seed: int
    asks: tuple[ClientScript, ...]
    faults: tuple[Fault, ...]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Raises ValueError, KeyError or TypeError if the JSON is no schedule."""
        data = json.loads(text)
        asks = tuple(ClientScript(**{**ask, "prompt": tuple(ask["prompt"])}) for ask in data["asks"])
        return cls(data["seed"], asks, tuple(Fault(**fault) for fault in data["faults"]))


@dataclass(frozen=True, slots=True)
class PartySizes:
    """Sizes of the parties, drawn from the seed. All workers have the same sizes."""

    block_size: int
    num_blocks: int
    num_host_blocks: int
    num_workers: int
    window: int
    response_window: int
    preset: str
    mode: str
    num_schedulers: int
    speculative_tokens: int
    speculative_max_rows: int

    @classmethod
    def of(cls, seed: int) -> PartySizes:
        rng = random.Random(f"sizes {seed}")
        block_size = rng.choice([1, 2, 4, 8])
        num_blocks = rng.choice([48, 56, 72, 300]) // block_size + 2
        return cls(
            block_size=block_size,
            num_blocks=num_blocks,
            num_host_blocks=rng.choice([0, num_blocks // 2, 2 * num_blocks]),
            num_workers=rng.choice([1, 1, 2, 3]),
            window=rng.choice([1, 2, 3]),
            response_window=rng.choice([2, 64]),
            preset=rng.choice(["paceline", "paceline", "vllm-v1", "vllm-v0", "sglang-lpm", "trtllm-max-util"]),
            mode=rng.choice(["recompute", "swap", "swap"]),
            num_schedulers=2 if seed % PAIR_EVERY == 3 else 1,
            speculative_tokens=seed % 5 if seed >= FIRST_WITH_DRAFTS else 0,
            speculative_max_rows=1 + seed % 4,
        )


def random_schedule(seed: int) -> Schedule:
    rng = random.Random(f"schedule {seed}")
    families = [[rng.randrange(8, 100) for _ in range(24)] for _ in range(2)]
    asks = tuple(_random_ask(rng, families) for _ in range(rng.randrange(2, 8)))
    if seed >= FIRST_WITH_GRAMMARS:
        asks = tuple(replace(ask, grammar=_grammar_of(ask)) for ask in asks)
    if seed >= FIRST_WITH_DRAFTS:
        asks = tuple(replace(ask, repeats=period, grammar="") if (period := _period_of(ask)) else ask for ask in asks)
    sizes = PartySizes.of(seed)
    faults = [_random_fault(rng, sizes.num_workers) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4]))]
    if sizes.num_schedulers > 1:
        faults += _takeover(rng, sizes.num_workers)
    return Schedule(seed, asks, tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _grammar_of(ask: ClientScript) -> str:
    """No grammar, a grammar that many requests share, or a grammar that few requests share. It is not drawn at random,
    so that the rest of the schedule is the same as without grammars."""
    last = ask.prompt[-1]
    return "" if ask.beam_width else ("", "form 0", "form 1", f"form {last}")[last % 4]


def _period_of(ask: ClientScript) -> int:
    """As with grammars: not drawn at random."""
    return 0 if ask.beam_width else ask.prompt[-1] % 3


def _random_ask(rng: random.Random, families: list[list[int]]) -> ClientScript:
    shared = rng.choice(families)[: rng.randrange(25)]
    prompt = (*shared, *(rng.randrange(8, 1000) for _ in range(rng.randrange(1, 6))))
    beam_width = rng.randrange(1, 4) if rng.random() < 0.08 else 0
    n = 1 if beam_width else rng.choice([1, 1, 1, 2, 3])
    comes_back = rng.random() < 0.6
    return ClientScript(
        at_s=round(rng.uniform(0.1, 0.4), 4),
        gateway=rng.randrange(NUM_GATEWAYS),
        prompt=prompt,
        max_tokens=rng.randrange(1, 8 if beam_width else 20),
        seed=rng.randrange(4),
        n=n,
        ignore_eos=rng.random() < 0.3,
        logprobs=not beam_width and rng.random() < 0.2,
        beam_width=beam_width,
        cancel_after_s=round(rng.uniform(0.0, 0.4), 4) if rng.random() < 0.15 else None,
        comes_back=comes_back,
        brings_tokens=n == 1 and not beam_width and rng.random() < 0.6,
        # The client then asks again, so its request may run twice at the same time.
        breaks_after_s=round(rng.uniform(0.0, 0.3), 4) if comes_back and rng.random() < 0.4 else None,
        patience_s=rng.choice([0.5, 2.0]) if comes_back and rng.random() < 0.3 else None,
        grace_s=rng.choice([0.0, 0.1, 3.0]),
    )


def _random_fault(rng: random.Random, num_workers: int) -> Fault:
    """A fault, mostly while the requests run. Half of the faults are short."""
    workers = [f"worker-{i}" for i in range(num_workers)]
    gateways = [f"gateway-{i}" for i in range(NUM_GATEWAYS)]
    target = rng.choice([*workers, *workers, "cache", "cache", "scheduler", "scheduler", *gateways])
    kinds: list[FaultKind] = ["kill", "kill", "freeze", "cut", "silence", "drain"]
    return Fault(
        at_s=round(rng.uniform(0.1, 0.8), 4),
        kind=rng.choice(kinds),
        target=target,
        for_s=round(rng.choice([rng.uniform(0.0, 0.3), rng.uniform(0.3, 8.0)]), 4),
        which=rng.randrange(4),
    )


def _takeover(rng: random.Random, num_workers: int) -> list[Fault]:
    """A fault by which the leader usually loses its lease; sometimes a fault of etcd; and more faults, at about the
    moment at which the leader comes back."""
    at_s, for_s = rng.uniform(0.2, 0.7), rng.uniform(2.5, 6.0)

    def fault(at_s: float, kind: FaultKind, target: str, for_s: float) -> Fault:
        return Fault(round(at_s, 4), kind, target, round(for_s, 4), which=rng.randrange(4))

    kind: FaultKind = rng.choice(["kill", "freeze", "suspend", "suspend", "suspend", "isolate", "drain"])
    faults = [fault(at_s, kind, "leader", for_s)]
    if kind == "suspend" and rng.random() < 0.9:
        faults.append(fault(at_s + 0.001, "isolate", "leader", for_s + 4.0))
    if rng.random() < 0.3:
        faults.append(fault(rng.uniform(0.1, 4.0), rng.choice(["kill", "freeze"]), "etcd", rng.uniform(0.0, 4.0)))
    clients = [*(f"worker-{i}" for i in range(num_workers)), "gateway-0", "gateway-1"]
    for _ in range(rng.randrange(6)):
        target = rng.choice([*clients, *clients, "cache", "scheduler", "scheduler-2"])
        again: FaultKind = rng.choice(["cut", "cut", "cut", "kill", "freeze"])
        faults.append(fault(at_s + for_s + rng.uniform(-0.25, 0.02), again, target, rng.uniform(0.0, 0.5)))
    return faults


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """A smaller schedule that still fails. If any one of its requests or faults is removed, it passes."""
    smaller = True
    while smaller:
        smaller = False
        for field in ("faults", "asks"):
            parts = getattr(schedule, field)
            for i in range(len(parts)):
                without = dataclasses.replace(schedule, **{field: parts[:i] + parts[i + 1 :]})
                if fails(without):
                    schedule, smaller = without, True
                    break
    return schedule
