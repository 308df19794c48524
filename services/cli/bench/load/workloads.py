"""Synthetic workloads: endless sessions, the same for the same seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from services.cli.bench.load.ranges import SecondsRange, TokenRange
from services.cli.bench.load.sessions import LoadSession, Segment, SessionTurn


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """Lengths and pauses. A kind of session uses those that it needs."""

    mix: dict[str, float] = field(default_factory=lambda: {"random": 1.0})  # kind: weight
    input_tokens: TokenRange = field(default=TokenRange(128, 128))
    output_tokens: TokenRange = field(default=TokenRange(64, 64))
    prefixes: int = 4
    prefix_tokens: TokenRange = field(default=TokenRange(512, 512))
    turns: TokenRange = field(default=TokenRange(3, 3))
    think_s: SecondsRange = field(default=SecondsRange(1.0, 3.0))
    tool_calls: TokenRange = field(default=TokenRange(2, 4))
    tool_tokens: TokenRange = field(default=TokenRange(64, 64))
    tool_s: SecondsRange = field(default=SecondsRange(0.2, 1.0))


def parse_mix(text: str) -> dict[str, float]:
    """`agent`, or weights like `multi-turn=3,agent=1`. Raises ValueError."""
    mix: dict[str, float] = {}
    for part in text.split(","):
        kind, _, weight = part.partition("=")
        if kind not in KINDS:
            raise ValueError(f"there is no workload {kind!r}: {', '.join(KINDS)}")
        try:
            mix[kind] = float(weight or 1)
        except ValueError:
            raise ValueError(f"{kind}: expected a weight (got {weight!r})") from None
        if not 0 < mix[kind] < 1e6:
            raise ValueError(f"{kind}: a weight is between 0 and 1000000 (got {weight})")
    return mix


def synthetic_sessions(settings: WorkloadSettings, seed: int) -> Iterator[LoadSession]:
    """Endless sessions of the kinds of the mix. No two sessions share a prompt, except for the prefixes."""
    random = Random(f"sessions/{seed}")
    prefixes = [Segment(f"prefix{i}", settings.prefix_tokens.draw(random)) for i in range(settings.prefixes)]
    kinds, weights = list(settings.mix), list(settings.mix.values())
    for number in itertools.count():
        (kind,) = random.choices(kinds, weights)
        yield KINDS[kind](settings, _Drawer(random, number, prefixes))


class _Drawer:
    """Draws the parts of one session."""

    def __init__(self, random: Random, number: int, prefixes: list[Segment]) -> None:
        self.random = random
        self._number = number
        self._prefixes = prefixes
        self._segments = 0

    def segment(self, tokens: TokenRange) -> tuple[Segment, ...]:
        self._segments += 1
        return (Segment(f"session{self._number}.{self._segments}", tokens.draw(self.random)),)

    def prefix(self) -> tuple[Segment, ...]:
        return (self.random.choice(self._prefixes),)


def _random(settings: WorkloadSettings, draw: _Drawer) -> LoadSession:
    turn = SessionTurn(draw.segment(settings.input_tokens), settings.output_tokens.draw(draw.random))
    return LoadSession((turn,))


def _shared_prefix(settings: WorkloadSettings, draw: _Drawer) -> LoadSession:
    turn = SessionTurn(draw.segment(settings.input_tokens), settings.output_tokens.draw(draw.random))
    return LoadSession((turn,), draw.prefix(), "shared-prefix")


def _multi_turn(settings: WorkloadSettings, draw: _Drawer) -> LoadSession:
    turns = []
    for i in range(settings.turns.draw(draw.random)):
        pause_s = settings.think_s.draw(draw.random) if i else 0.0
        turns.append(
            SessionTurn(draw.segment(settings.input_tokens), settings.output_tokens.draw(draw.random), pause_s)
        )
    return LoadSession(tuple(turns), kind="multi-turn")


def _agent(settings: WorkloadSettings, draw: _Drawer) -> LoadSession:
    """A shared prefix (instructions and tools). A turn of the user, then tool results, each after its tool's pause."""
    turns: list[SessionTurn] = []
    for _ in range(settings.turns.draw(draw.random)):
        pause_s = settings.think_s.draw(draw.random) if turns else 0.0
        turns.append(
            SessionTurn(draw.segment(settings.input_tokens), settings.output_tokens.draw(draw.random), pause_s)
        )
        for _ in range(settings.tool_calls.draw(draw.random)):
            pause_s = settings.tool_s.draw(draw.random)
            turns.append(
                SessionTurn(draw.segment(settings.tool_tokens), settings.output_tokens.draw(draw.random), pause_s)
            )
    return LoadSession(tuple(turns), draw.prefix(), "agent")


KINDS: dict[str, Callable[[WorkloadSettings, _Drawer], LoadSession]] = {
    "random": _random,
    "shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
    "agent": _agent,
}
