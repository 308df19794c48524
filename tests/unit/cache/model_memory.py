"""The memories of the naive model of the cache: of a worker's device and of its host, block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tests.unit.cache.driver import Retention

Prefix = tuple[str | int, ...]  # the salt, and tokens


@dataclass
class Kept:
    """The values that decide how long a prefix is kept."""

    serial: int
    priority: float = -math.inf
    reuses: int = 0
    retention: int = 35
    duration_ms: int = 0
    expires_ms: int = 0

    def rank(self, eviction: str) -> float:
        return {"lru": 0, "lfu": self.reuses, "slru": self.reuses >= 2, "fifo": self.serial, "priority": self.priority}[
            eviction
        ]


@dataclass
class ModelMemory:
    num_blocks: int
    block_size: int
    eviction: str
    free: list[int] = field(default_factory=list)
    stored: dict[Prefix, int] = field(default_factory=dict)
    unused: list[Prefix] = field(default_factory=list)  # least recently used first
    kept: dict[Prefix, Kept] = field(default_factory=dict)
    evicted: int = 0
    num_stored: int = 0
    now_ms: int = 0
    sources: set[int] = field(default_factory=set)  # copies of this exchange read these
    withheld: list[int] = field(default_factory=list)  # free after the exchange: dropped sources, swapped-in blocks
    moves: dict[int, int] = field(default_factory=dict)  # copies to this memory in this exchange: target -> source
    unwritten: set[Prefix] = field(default_factory=set)  # planned, and not committed yet: never on a host

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks, 0, -1))

    def end_exchange(self) -> None:
        self.free += self.withheld
        self.withheld = []
        self.sources = set()
        self.moves = {}

    def above(self, prefix: Prefix) -> Prefix:
        """The prefix without its last block, which may be a partial block."""
        return prefix[: 1 + (len(prefix) - 2) // self.block_size * self.block_size]

    def is_partial_block(self, prefix: Prefix) -> bool:
        return (len(prefix) - 1) % self.block_size > 0

    def behind(self, prefix: Prefix) -> list[Prefix]:
        """The stored prefixes that are one block longer."""
        return [p for p in self.stored if self.above(p) == prefix]

    def eviction_order(self, wanted: Prefix = ()) -> list[Prefix]:
        """All unused prefixes in the order of their eviction, children before parents. Never a prefix of `wanted`."""
        order: list[Prefix] = []
        unused = list(self.unused)
        behind = {p: len(self.behind(p)) + (bool(wanted) and p == self.above(wanted)) for p in self.stored}
        while ends := [p for p in unused if not behind[p]]:
            order.append(min(ends, key=lambda p: (self.kept[p].retention, self.kept[p].rank(self.eviction))))
            unused.remove(order[-1])
            if (parent := self.above(order[-1])) in behind:
                behind[parent] -= 1
        return order

    def pass_time(self, now_ms: int) -> None:
        self.now_ms = now_ms
        over = [p for p in self.unused if self.kept[p].duration_ms and self.kept[p].expires_ms <= now_ms]
        for prefix in sorted(over, key=lambda p: self.kept[p].expires_ms):
            self.kept[prefix].retention, self.kept[prefix].duration_ms = 35, 0
            self.unused.remove(prefix)
            self.unused.append(prefix)

    def take(self, count: int, wanted: Prefix = ()) -> list[int]:
        blocks: list[int] = []
        evicted: list[tuple[Prefix, int, Kept]] = []
        while len(blocks) < count:
            if self.free:
                blocks.append(self.free.pop())
            else:
                order = self.eviction_order(wanted)
                if not order:
                    break
                prefix = order[0]
                self.unused.remove(prefix)
                block = self.stored.pop(prefix)
                evicted.append((prefix, block, self.kept.pop(prefix)))
                self.evicted += 1
                self.give_back([block], blocks)
        for block in blocks:
            self.moves.pop(block, None)
        self.pass_on(evicted)
        return blocks

    def give_back(self, given: list[int], into: list[int]) -> None:
        """Frees blocks, except those that copies read."""
        for block in given:
            (self.withheld if block in self.sources else into).append(block)
            self.sources.discard(block)

    def pass_on(self, evicted: list[tuple[Prefix, int, Kept]]) -> None:
        """Hands evicted blocks to the host memory; this memory has none."""

    def store(self, prefix: Prefix, block: int) -> None:
        self.num_stored += 1
        for partial in [
            p for p in self.behind(self.above(prefix)) if self.is_partial_block(p) and prefix[: len(p)] == p
        ]:
            self.forget([partial])
        self.stored[prefix], self.kept[prefix] = block, Kept(self.num_stored)

    def use(self, prefix: Prefix, priority: float, again: bool) -> None:
        if prefix in self.unused:
            self.unused.remove(prefix)
        kept = self.kept[prefix]
        kept.priority = max(kept.priority, priority)
        kept.reuses += again

    def leave(self, prefix: Prefix) -> None:
        self.unused.append(prefix)
        self.kept[prefix].expires_ms = self.now_ms + self.kept[prefix].duration_ms

    def forget(self, prefixes: list[Prefix]) -> None:
        """All these prefixes must be unused."""
        self.unused = [p for p in self.unused if p not in prefixes]
        self.give_back(sorted(self.stored.pop(p) for p in prefixes), self.free)
        for prefix in prefixes:
            del self.kept[prefix]

    def nearest(self, begins: Prefix, tokens: Prefix) -> tuple[int, int]:
        """The stored block after this prefix with the longest common beginning with the next tokens, and its length."""
        reached = len(begins)
        rest = tokens[reached : min(reached + self.block_size, len(tokens) - 1)]
        best = 0, 0
        behind = [prefix for prefix in self.behind(begins) if prefix not in self.unwritten]
        ahead = sorted(p for p in behind if p[reached:] >= rest)
        for prefix in ahead + sorted((p for p in behind if p[reached:] < rest), reverse=True):
            last = prefix[reached:]
            shorter = min(len(last), len(rest))
            common = next((i for i in range(shorter) if last[i] != rest[i]), shorter)
            if common > best[1]:
                best = self.stored[prefix], common
        return best

    @property
    def available(self) -> int:
        return len(self.free) + len(self.unused) - len(self.sources)


@dataclass
class ModelHost(ModelMemory):
    def reuse(self, hit: list[Prefix], promoted: list[Prefix], priority: float) -> list[int]:
        """Uses the last blocks of a match as sources of copies to the device."""
        for prefix in reversed(hit) if promoted else ():
            if prefix in self.stored:
                self.use(prefix, priority, again=True)
                self.leave(prefix)
        blocks = [self.stored[prefix] for prefix in promoted]
        self.sources.update(blocks)
        return blocks

    def drop_behind(self, prefix: Prefix) -> None:
        below = [prefix]
        for above in below:
            below += self.behind(above)
        self.forget(below[1:])


@dataclass
class ModelWorker(ModelMemory):
    prefix_caching: bool = True
    users: dict[Prefix, set[int]] = field(default_factory=dict)
    partial_reuse: bool = False
    host: ModelHost = field(default_factory=lambda: ModelHost(0, 0, ""))
    host_tier: bool = False

    def forget(self, prefixes: list[Prefix]) -> None:
        super().forget(prefixes)
        for prefix in prefixes:
            self.users.pop(prefix, None)  # a partial block never had a user
        self.unwritten.difference_update(prefixes)

    def pass_on(self, evicted: list[tuple[Prefix, int, Kept]]) -> None:
        """Blocks on the host stay there. The others are copied to it, shortest prefixes first, while there is room."""
        host, block_size = self.host, self.block_size
        for prefix, _, _ in evicted:
            del self.users[prefix]
        if not self.host_tier:
            return
        known = [prefix for prefix, _, _ in evicted if prefix in host.stored]
        host.unused = [prefix for prefix in host.unused if prefix not in known]
        for prefix, block, _ in reversed(evicted):
            before = self.above(prefix)
            if prefix in host.stored:
                continue
            reached = len(before) == 1 or before in self.stored or before in host.stored
            if self.is_partial_block(prefix) and any(p[: len(prefix)] == prefix for p in host.behind(before)):
                continue
            for copy in host.take(1, prefix) if reached and host.available > 0 else ():
                host.store(prefix, copy)
                host.moves[copy] = block
            if prefix not in host.stored:
                host.drop_behind(prefix)
        for prefix, _, gone in evicted:
            if prefix not in host.stored:
                continue
            kept = host.kept[prefix]
            kept.reuses, kept.priority = max(kept.reuses, gone.reuses), max(kept.priority, gone.priority)
            kept.retention, kept.duration_ms, kept.expires_ms = gone.retention, gone.duration_ms, gone.expires_ms
            host.unused.append(prefix)
            if prefix in known and self.above(prefix) in self.stored:
                above = [prefix[:end] for end in range(len(self.above(prefix)), 1, -block_size)]
                host.unused += [p for p in above if p in host.stored]
                moved = len([p for p in above if p in host.stored])
                first = len(host.unused) - moved
                host.unused = [p for i, p in enumerate(host.unused) if i >= first or p not in above]

    def use_for(self, prefix: Prefix, sequence: int, priority: float, again: bool) -> None:
        self.use(prefix, priority, again)
        self.users.setdefault(prefix, set()).add(sequence)

    def keep_partial_block(self, partial: Prefix, block: int, priority: float, retention: Retention) -> None:
        """The partial block of an ended sequence. It is not kept if another block has all its tokens."""
        covering = sorted(p for p in self.behind(self.above(partial)) if p[: len(partial)] == partial)
        if not covering:
            self.store(partial, block)
            self.users[partial] = set()
            covering = [partial]
        if self.is_partial_block(covering[0]):
            self.use(covering[0], priority, again=False)
            first = len(self.above(partial)) - 1
            for start, end, kept, duration_ms in retention:
                if start <= first < (end or 10**9):
                    self.kept[covering[0]].retention, self.kept[covering[0]].duration_ms = kept, duration_ms
            self.leave(covering[0])

    def retain(self, prefixes: list[Prefix], retention: Retention) -> None:
        for i, prefix in enumerate(prefixes):
            for start, end, priority, duration_ms in retention:
                if start <= i * self.block_size < (end or 10**9):
                    self.kept[prefix].retention, self.kept[prefix].duration_ms = priority, duration_ms

    def counters(self) -> tuple[int, int, int, int]:
        free, cached = len(self.free), len(self.unused)
        return free, cached, self.num_blocks - free - cached, self.evicted

    def host_counters(self) -> tuple[int, int, int]:
        free, cached = len(self.host.free), len(self.host.unused)
        return free, cached, self.host.num_blocks - free - cached
