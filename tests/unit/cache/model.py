"""The cache as naive as can be: prefixes are tuples of all their tokens, what is unused is a list, everything is
searched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cache_svc.core.errors import Code
from tests.unit.cache.driver import Retention

Prefix = tuple[str | int, ...]  # the salt, and tokens
Result = tuple[object, ...]
OK: Result = ("ok",)


class ModelRefusal(Exception):
    def __init__(self, code: Code) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class Kept:
    """What says how long a prefix is kept."""

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
class Terms:
    priority: float
    retention: Retention
    salt: str


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
    sources: set[int] = field(default_factory=set)  # to be copied from in this exchange
    withheld: list[int] = field(default_factory=list)  # what was evicted of them
    moves: dict[int, int] = field(default_factory=dict)  # copied here in this exchange: from there

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks, 0, -1))

    def end_exchange(self) -> None:
        self.free += self.withheld
        self.withheld = []
        self.sources = set()
        self.moves = {}

    def behind(self, prefix: Prefix) -> list[Prefix]:
        """What is stored one block further on."""
        return [p for p in self.stored if len(p) == len(prefix) + self.block_size and p[: len(prefix)] == prefix]

    def eviction_order(self, wanted: Prefix = ()) -> list[Prefix]:
        """Again and again the one that goes first of those with nothing behind them; nor what is before `wanted`."""
        order: list[Prefix] = []
        unused = list(self.unused)
        behind = {p: len(self.behind(p)) + (p == wanted[: -self.block_size]) for p in self.stored}
        while ends := [p for p in unused if not behind[p]]:
            order.append(min(ends, key=lambda p: (self.kept[p].retention, self.kept[p].rank(self.eviction))))
            unused.remove(order[-1])
            if (parent := order[-1][: -self.block_size]) in behind:
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
        """Not those that are to be copied from."""
        for block in given:
            (self.withheld if block in self.sources else into).append(block)
            self.sources.discard(block)

    def pass_on(self, evicted: list[tuple[Prefix, int, Kept]]) -> None:
        """To the memory below."""

    def store(self, prefix: Prefix, block: int) -> None:
        self.num_stored += 1
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

    @property
    def available(self) -> int:
        return len(self.free) + len(self.unused) - len(self.sources)


@dataclass
class ModelHost(ModelMemory):
    def reuse(self, hit: list[Prefix], promoted: list[Prefix], priority: float) -> list[int]:
        """The last ones of a hit are to be copied from here."""
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
        self.unused = [p for p in self.unused if p not in below]
        self.give_back(sorted(self.stored.pop(p) for p in below[1:]), self.free)
        for p in below[1:]:
            del self.kept[p]


@dataclass
class ModelWorker(ModelMemory):
    prefix_caching: bool = True
    users: dict[Prefix, set[int]] = field(default_factory=dict)
    partial_reuse: bool = False
    host: ModelHost = field(default_factory=lambda: ModelHost(0, 0, ""))
    host_tier: bool = False

    def nearest(self, begins: Prefix, tokens: Sequence[int]) -> tuple[int, int]:
        """Of the blocks stored behind these, the one that begins with the most tokens that come next, and how many."""
        reached = len(begins) - 1
        rest = tuple(tokens[reached : min(reached + self.block_size, len(tokens) - 1)])
        best = 0, 0
        behind = self.behind(begins)
        ahead = sorted(p for p in behind if p[len(begins) :] >= rest)
        for prefix in ahead + sorted((p for p in behind if p[len(begins) :] < rest), reverse=True):
            last = prefix[len(begins) :]
            common = next((i for i, (a, b) in enumerate(zip(last, rest, strict=False)) if a != b), len(rest))
            if common > best[1]:
                best = self.stored[prefix], common
        return best if self.partial_reuse else (0, 0)

    def pass_on(self, evicted: list[tuple[Prefix, int, Kept]]) -> None:
        """What the host has already stays; the rest is copied there, from the heads on, as long as there is room."""
        host, block_size = self.host, self.block_size
        for prefix, _, _ in evicted:
            del self.users[prefix]
        if not self.host_tier:
            return
        known = [prefix for prefix, _, _ in evicted if prefix in host.stored]
        host.unused = [prefix for prefix in host.unused if prefix not in known]
        for prefix, block, _ in reversed(evicted):
            before = prefix[:-block_size]
            if prefix in host.stored:
                continue
            reached = len(before) == 1 or before in self.stored or before in host.stored
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
            if prefix in known and prefix[:-block_size] in self.stored:
                above = [prefix[:end] for end in range(len(prefix) - block_size, 1, -block_size)]
                host.unused += [p for p in above if p in host.stored]
                moved = len([p for p in above if p in host.stored])
                first = len(host.unused) - moved
                host.unused = [p for i, p in enumerate(host.unused) if i >= first or p not in above]

    def use_for(self, prefix: Prefix, sequence: int, priority: float, again: bool) -> None:
        self.use(prefix, priority, again)
        self.users.setdefault(prefix, set()).add(sequence)

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


@dataclass
class ModelSequence:
    worker: int
    tokens: list[int]
    table: list[int]
    computed: int
    prefixes: list[Prefix]  # those it uses, from the head on
    terms: Terms


@dataclass
class ModelSwapped:
    worker: int
    tokens: list[int]
    computed: int
    host: list[int]
    terms: Terms


class Model:
    def __init__(self, eviction: str = "lru") -> None:
        self.eviction = eviction
        self.terms: dict[int, Terms] = {}  # of those that wait
        self.swapped: dict[int, ModelSwapped] = {}
        self.block_size = 0
        self.workers: dict[int, ModelWorker] = {}
        self.waiting: dict[int, list[int]] = {}
        self.running: dict[int, ModelSequence] = {}

    def add_worker(
        self,
        worker: int,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        num_host: int,
        partial: bool,
        host_tier: bool,
    ) -> Result:
        if worker in self.workers:
            raise ModelRefusal(Code.ALREADY_EXISTS)
        if num_blocks < 1 or block_size < 1:
            raise ModelRefusal(Code.INVALID_ARGUMENT)
        if self.workers and block_size != self.block_size:
            raise ModelRefusal(Code.FAILED_PRECONDITION)
        self.block_size = block_size
        made = self.workers[worker] = ModelWorker(num_blocks, block_size, self.eviction)
        made.prefix_caching, made.partial_reuse = prefix_caching, prefix_caching and partial
        made.host = ModelHost(num_host, block_size, self.eviction)
        made.host_tier = prefix_caching and host_tier
        return OK

    def remove_worker(self, worker: int) -> Result:
        self._worker(worker)
        del self.workers[worker]
        self.running = {s: sequence for s, sequence in self.running.items() if sequence.worker != worker}
        self.swapped = {s: sequence for s, sequence in self.swapped.items() if sequence.worker != worker}
        return OK

    def end_exchange(self) -> None:
        for worker in self.workers.values():
            worker.end_exchange()
            worker.host.end_exchange()

    def pass_time(self, now_ms: int) -> None:
        for worker in self.workers.values():
            worker.pass_time(now_ms)
            worker.host.pass_time(now_ms)

    def match(
        self, sequence: int, tokens: Sequence[int], priority: float = 0.0, retention: Retention = (), salt: str = ""
    ) -> Result:
        if sequence in self.waiting or sequence in self.running or sequence in self.swapped:
            raise ModelRefusal(Code.ALREADY_EXISTS)
        if not tokens:
            raise ModelRefusal(Code.INVALID_ARGUMENT)
        self.waiting[sequence] = list(tokens)
        self.terms[sequence] = Terms(priority, retention, salt)
        matches = {}
        for worker_id, worker in self.workers.items():
            hit = self._hit(worker, salt, tokens)
            behind = self._behind(worker, salt, tokens, len(hit))
            live = [prefix for prefix in hit if worker.users[prefix]]
            begins = (salt, *tokens[: len(hit) * self.block_size])
            _, copied = worker.nearest(begins, tokens) if not behind else (0, 0)
            counts = len(hit) * self.block_size + copied, len(live) * self.block_size, len(behind) * self.block_size
            if any(counts):
                matches[worker_id] = counts
        return "match", matches

    def rematch(self, sequences: Sequence[int], always: bool) -> Result:
        if any(sequence not in self.waiting for sequence in sequences):
            raise ModelRefusal(Code.NOT_FOUND)
        return OK

    def matches(self, sequence: int) -> dict[int, tuple[int, int, int]]:
        """What a fresh match of a waiting sequence would report."""
        tokens = self.waiting.pop(sequence)
        terms = self.terms[sequence]
        _, matches = self.match(sequence, tokens, terms.priority, terms.retention, terms.salt)
        assert isinstance(matches, dict)
        return matches

    def admit(self, sequence: int, worker_id: int, new_tokens: int = 0, copies: bool = True) -> Result:
        if sequence not in self.waiting:
            known = sequence in self.running or sequence in self.swapped
            raise ModelRefusal(Code.FAILED_PRECONDITION if known else Code.NOT_FOUND)
        worker = self._worker(worker_id)
        tokens = self.waiting[sequence]
        terms = self.terms[sequence]
        hit = self._hit(worker, terms.salt, tokens)
        begins = (terms.salt, *tokens[: len(hit) * self.block_size])
        behind = self._behind(worker, terms.salt, tokens, len(hit)) if copies else []
        source, copied = worker.nearest(begins, tokens) if copies and not behind else (0, 0)

        def needed() -> int:
            needed = -(-len(tokens) // self.block_size) - len(hit)
            return min(needed, len(behind) - (-(copied + new_tokens) // self.block_size)) if new_tokens else needed

        available = worker.available - len([p for p in worker.unused if p in hit])
        if source and needed() > available - 1:
            source = copied = 0
        if needed() > available:
            raise ModelRefusal(Code.RESOURCE_EXHAUSTED)
        for prefix in hit:
            worker.use_for(prefix, sequence, terms.priority, again=True)
        worker.retain(hit, terms.retention)
        if source:
            worker.sources.add(source)
        from_host = worker.host.reuse(hit + behind, behind, terms.priority)
        table = [worker.stored[prefix] for prefix in hit] + worker.take(needed())
        computed, end = len(hit) * self.block_size + copied, len(hit) + len(behind)
        self.running[sequence] = ModelSequence(worker_id, self.waiting.pop(sequence), table, computed, hit, terms)
        cached = computed + len(behind) * self.block_size
        return "admit", cached, list(table), source, list(zip(table[len(hit) : end], from_host, strict=True))

    def fork(self, sequence: int, worker_id: int, parent_id: int) -> Result:
        if sequence not in self.waiting:
            known = sequence in self.running or sequence in self.swapped
            raise ModelRefusal(Code.FAILED_PRECONDITION if known else Code.NOT_FOUND)
        worker, parent, tokens = self._worker(worker_id), self._running(parent_id), self.waiting[sequence]
        shared = len(tokens) - 1
        alike = parent.worker == worker_id and parent.terms.salt == self.terms[sequence].salt
        if not alike or parent.tokens[:shared] != tokens[:shared] or parent.computed < shared:
            raise ModelRefusal(Code.FAILED_PRECONDITION)
        if not worker.available:
            raise ModelRefusal(Code.RESOURCE_EXHAUSTED)
        whole = shared // self.block_size
        prefixes = parent.prefixes[:whole]
        terms = self.terms[sequence]
        for prefix in prefixes:
            worker.use_for(prefix, sequence, terms.priority, again=True)
        worker.retain(prefixes, terms.retention)
        # Without prefix caching the blocks are shared as they are; with it, those that the tree has.
        table = [worker.stored[prefix] for prefix in prefixes] if worker.prefix_caching else parent.table[:whole]
        copy_from = parent.table[whole] if shared % self.block_size else 0
        table += worker.take(1)
        self.running[sequence] = ModelSequence(worker_id, self.waiting.pop(sequence), table, shared, prefixes, terms)
        return "admit", shared, list(table), copy_from, []

    def extend(self, sequences: Sequence[int]) -> Result:
        running = [self._running(s) for s in sequences]
        needed = {worker_id: [s.worker for s in running].count(worker_id) for worker_id in self.workers}
        if any(needed[worker_id] > worker.available for worker_id, worker in self.workers.items()):
            raise ModelRefusal(Code.RESOURCE_EXHAUSTED)
        taken = {worker_id: worker.take(needed[worker_id]) for worker_id, worker in self.workers.items()}
        blocks = []
        for sequence in running:
            blocks.append(taken[sequence.worker].pop(0))
            sequence.table.append(blocks[-1])
        return "extend", blocks

    def commit(self, entries: Sequence[tuple[int, Sequence[int], int]]) -> Result:
        for sequence_id, _, _ in entries:
            self._running(sequence_id)
        tried = {s: (len(self.running[s].tokens), self.running[s].computed) for s, _, _ in entries}
        for s, new, computed in entries:
            known, before = tried[s]
            room = len(self.running[s].table) * self.block_size
            if computed < before or computed > known + len(new) or computed > room:
                raise ModelRefusal(Code.INVALID_ARGUMENT)
            tried[s] = known + len(new), computed
        for s, new, computed in entries:
            self._store(s, new, computed)
        return OK

    def _store(self, sequence_id: int, new: Sequence[int], computed: int) -> None:
        sequence = self.running[sequence_id]
        worker = self.workers[sequence.worker]
        sequence.tokens += new
        sequence.computed = computed
        before = len(sequence.prefixes)
        while worker.prefix_caching and (len(sequence.prefixes) + 1) * self.block_size <= computed:
            i = len(sequence.prefixes)
            prefix = (sequence.terms.salt, *sequence.tokens[: (i + 1) * self.block_size])
            if prefix not in worker.stored:
                worker.store(prefix, sequence.table[i])
            worker.use_for(prefix, sequence_id, sequence.terms.priority, again=False)
            sequence.prefixes.append(prefix)
        if len(sequence.prefixes) > before:
            worker.retain(sequence.prefixes, sequence.terms.retention)

    def swap_out(self, sequence_id: int) -> Result:
        sequence = self._running(sequence_id)
        worker = self.workers[sequence.worker]
        needed = -(-sequence.computed // self.block_size)
        if needed > worker.host.available:
            raise ModelRefusal(Code.RESOURCE_EXHAUSTED)
        host = worker.host.take(needed)
        self.free([sequence_id])
        self.swapped[sequence_id] = ModelSwapped(
            sequence.worker, sequence.tokens, sequence.computed, host, sequence.terms
        )
        return "swap_out", sequence.table[:needed], host

    def swap_in(self, sequence_id: int) -> Result:
        swapped = self.swapped.get(sequence_id)
        if swapped is None:
            known = sequence_id in self.waiting or sequence_id in self.running
            raise ModelRefusal(Code.FAILED_PRECONDITION if known else Code.NOT_FOUND)
        self.waiting[sequence_id], self.terms[sequence_id] = swapped.tokens, swapped.terms
        try:
            _, cached, table, _, _ = self.admit(sequence_id, swapped.worker, copies=False)
        except ModelRefusal:
            del self.waiting[sequence_id]
            raise
        assert isinstance(cached, int)
        assert isinstance(table, list)
        del self.swapped[sequence_id]
        self.workers[swapped.worker].host.withheld += reversed(swapped.host)
        first, computed = cached // self.block_size, min(swapped.computed, len(swapped.tokens) - 1)
        return "swap_in", computed, table, table[first : len(swapped.host)], swapped.host[first:]

    def free(self, sequences: Sequence[int]) -> Result:
        if any(s not in self.waiting and s not in self.running and s not in self.swapped for s in sequences):
            raise ModelRefusal(Code.NOT_FOUND)
        if len(set(sequences)) != len(sequences):
            raise ModelRefusal(Code.INVALID_ARGUMENT)
        for s in sequences:
            if s in self.waiting:
                del self.waiting[s]
                continue
            if s in self.swapped:
                swapped = self.swapped.pop(s)
                self.workers[swapped.worker].host.free += reversed(swapped.host)
                continue
            sequence = self.running.pop(s)
            worker = self.workers[sequence.worker]
            others = {
                block for other in self.running.values() if other.worker == sequence.worker for block in other.table
            }
            for block in reversed(sequence.table):
                if block not in worker.stored.values() and block not in others:
                    worker.free.append(block)
            for prefix in reversed(sequence.prefixes):
                worker.users[prefix].remove(s)
                if not worker.users[prefix]:
                    worker.leave(prefix)
        return OK

    def _hit(self, worker: ModelWorker, salt: str, tokens: Sequence[int]) -> list[Prefix]:
        hit: list[Prefix] = []
        for end in range(self.block_size, len(tokens), self.block_size):
            prefix = (salt, *tokens[:end])
            if prefix not in worker.stored:
                break
            hit.append(prefix)
        return hit

    def _behind(self, worker: ModelWorker, salt: str, tokens: Sequence[int], num_hit: int) -> list[Prefix]:
        """What the host has behind a hit."""
        behind: list[Prefix] = []
        for end in range((num_hit + 1) * self.block_size, len(tokens), self.block_size):
            prefix = (salt, *tokens[:end])
            if prefix not in worker.host.stored:
                break
            behind.append(prefix)
        return behind

    def _worker(self, worker: int) -> ModelWorker:
        if worker not in self.workers:
            raise ModelRefusal(Code.NOT_FOUND)
        return self.workers[worker]

    def _running(self, sequence: int) -> ModelSequence:
        if sequence not in self.running:
            known = sequence in self.waiting or sequence in self.swapped
            raise ModelRefusal(Code.FAILED_PRECONDITION if known else Code.NOT_FOUND)
        return self.running[sequence]
