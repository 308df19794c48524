"""A naive model of the cache.

A prefix is a tuple of the salt and all its tokens, unused blocks are a list, and searches are linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache_svc.core.errors import Code
from tests.unit.cache.driver import Retention
from tests.unit.cache.model_memory import ModelHost, ModelWorker, Prefix

Result = tuple[object, ...]
OK: Result = ("ok",)


class ModelRefusal(Exception):
    def __init__(self, code: Code) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class RequestMetadata:
    priority: float
    retention: Retention
    salt: str


@dataclass
class ModelSequence:
    worker: int
    tokens: list[int]
    table: list[int]
    computed: int
    prefixes: list[Prefix]  # the prefixes that it uses, shortest first
    metadata: RequestMetadata
    planned: bool = False  # and not committed yet

    def __post_init__(self) -> None:
        self.begun = self.computed


@dataclass
class ModelSwapped:
    worker: int
    tokens: list[int]
    computed: int
    host: list[int]
    metadata: RequestMetadata


class Model:
    def __init__(self, eviction: str = "lru") -> None:
        self.eviction = eviction
        self.metadata: dict[int, RequestMetadata] = {}  # of waiting sequences
        self.swapped: dict[int, ModelSwapped] = {}
        self.block_size = 0
        self.workers: dict[int, ModelWorker] = {}
        self.waiting: dict[int, list[int]] = {}
        self.running: dict[int, ModelSequence] = {}
        # The workers of a refused extend() in this exchange. They get no step, even if only another worker had too few
        # blocks.
        self.stepless: set[int] = set()

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
        self.stepless = set()
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
        self.metadata[sequence] = RequestMetadata(priority, retention, salt)
        matches = {}
        for worker_id, worker in self.workers.items():
            hit = self._hit(worker, salt, tokens)
            behind = self._behind(worker, salt, tokens, len(hit))
            referenced = [prefix for prefix in hit if worker.users[prefix]]
            _, copied, from_host = self._nearest(worker, (salt, *tokens), hit, behind)
            on_host = len(behind) * self.block_size + from_host
            counts = len(hit) * self.block_size + copied, len(referenced) * self.block_size, on_host
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
        metadata = self.metadata[sequence]
        _, matches = self.match(sequence, tokens, metadata.priority, metadata.retention, metadata.salt)
        assert isinstance(matches, dict)
        return matches

    def admit(
        self, sequence: int, worker_id: int, new_tokens: int = 0, planned: int = 0, copies: bool = True
    ) -> Result:
        if sequence not in self.waiting:
            known = sequence in self.running or sequence in self.swapped
            raise ModelRefusal(Code.FAILED_PRECONDITION if known else Code.NOT_FOUND)
        worker = self._worker(worker_id)
        self._expect_step(worker_id)
        if planned > new_tokens > 0:
            raise ModelRefusal(Code.INVALID_ARGUMENT)
        tokens = self.waiting[sequence]
        metadata = self.metadata[sequence]
        hit = [p for p in self._hit(worker, metadata.salt, tokens) if copies or p not in worker.unwritten]
        behind = self._behind(worker, metadata.salt, tokens, len(hit)) if copies else []
        source, copied, from_host = 0, 0, 0
        if copies:
            source, copied, from_host = self._nearest(worker, (metadata.salt, *tokens), hit, behind)

        def needed() -> int:
            needed = -(-len(tokens) // self.block_size) - len(hit)
            new = copied + from_host + new_tokens
            return min(needed, len(behind) - (-new // self.block_size)) if new_tokens else needed

        available = worker.available - len([p for p in worker.unused if p in hit])
        if source and needed() > available - bool(copied):
            source = copied = from_host = 0
        if needed() > available:
            raise ModelRefusal(Code.RESOURCE_EXHAUSTED)
        for prefix in hit:
            worker.use_for(prefix, sequence, metadata.priority, again=True)
        worker.retain(hit, metadata.retention)
        host_blocks = worker.host.reuse(hit + behind, behind, metadata.priority)
        if copied:
            worker.sources.add(source)
        elif from_host:
            worker.host.sources.add(source)
            host_blocks.append(source)
        table = [worker.stored[prefix] for prefix in hit] + worker.take(needed())
        computed, end = len(hit) * self.block_size + copied, len(hit) + len(host_blocks)
        self.running[sequence] = ModelSequence(worker_id, self.waiting.pop(sequence), table, computed, hit, metadata)
        self.running[sequence].planned = any(prefix in worker.unwritten for prefix in hit)
        cached = computed + len(behind) * self.block_size + from_host
        promoted = list(zip(table[len(hit) : end], host_blocks, strict=True))
        if planned:
            self._plan(sequence, min(cached + planned, len(tokens)))
        return "admit", cached, list(table), source if copied else 0, promoted

    def fork(self, sequence: int, worker_id: int, parent_id: int) -> Result:
        if sequence not in self.waiting:
            known = sequence in self.running or sequence in self.swapped
            raise ModelRefusal(Code.FAILED_PRECONDITION if known else Code.NOT_FOUND)
        worker = self._worker(worker_id)
        self._expect_step(worker_id)
        parent, tokens = self._running(parent_id), self.waiting[sequence]
        shared = len(tokens) - 1
        alike = parent.worker == worker_id and parent.metadata.salt == self.metadata[sequence].salt
        if not alike or parent.tokens[:shared] != tokens[:shared] or parent.computed < shared:
            raise ModelRefusal(Code.FAILED_PRECONDITION)
        if parent.planned:
            raise ModelRefusal(Code.FAILED_PRECONDITION)
        whole = shared // self.block_size
        if worker.prefix_caching and len(parent.prefixes) < whole:
            raise ModelRefusal(Code.FAILED_PRECONDITION)
        if not worker.available:
            raise ModelRefusal(Code.RESOURCE_EXHAUSTED)
        prefixes = parent.prefixes[:whole]
        metadata = self.metadata[sequence]
        for prefix in prefixes:
            worker.use_for(prefix, sequence, metadata.priority, again=True)
        worker.retain(prefixes, metadata.retention)
        # Without prefix caching, the fork shares the parent's blocks; with it, the blocks in the tree.
        table = [worker.stored[prefix] for prefix in prefixes] if worker.prefix_caching else parent.table[:whole]
        copy_from = parent.table[whole] if shared % self.block_size else 0
        table += worker.take(1)
        self.running[sequence] = ModelSequence(worker_id, self.waiting.pop(sequence), table, shared, prefixes, metadata)
        return "admit", shared, list(table), copy_from, []

    def extend(self, sequences: Sequence[int]) -> Result:
        running = [self._running(s) for s in sequences]
        needed = {worker_id: [s.worker for s in running].count(worker_id) for worker_id in self.workers}
        if any(needed[worker_id] > worker.available for worker_id, worker in self.workers.items()):
            self.stepless |= {worker_id for worker_id in needed if needed[worker_id]}
            raise ModelRefusal(Code.RESOURCE_EXHAUSTED)
        taken = {worker_id: worker.take(needed[worker_id]) for worker_id, worker in self.workers.items()}
        blocks = []
        for sequence in running:
            blocks.append(taken[sequence.worker].pop(0))
            sequence.table.append(blocks[-1])
        return "extend", blocks

    def commit(self, entries: Sequence[tuple[int, Sequence[int], int]], planned: bool = False) -> Result:
        if planned and any(new for _, new, _ in entries):
            raise ModelRefusal(Code.INVALID_ARGUMENT)
        for sequence_id, _, _ in entries:
            self._running(sequence_id)
        tried = {s: (len(self.running[s].tokens), self.running[s].computed) for s, _, _ in entries}
        for s, new, computed in entries:
            known, before = tried[s]
            room = len(self.running[s].table) * self.block_size
            if computed < before or computed > known + len(new) or computed > room:
                raise ModelRefusal(Code.INVALID_ARGUMENT)
            tried[s] = known + len(new), computed
        for s, _, _ in entries if planned else ():
            self._expect_step(self.running[s].worker)
        for s, new, computed in entries:
            if planned:
                self._plan(s, computed)
                continue
            self.running[s].planned = False
            self.workers[self.running[s].worker].unwritten.difference_update(self.running[s].prefixes)
            self._store(s, new, computed)
        return OK

    def _plan(self, sequence_id: int, computed: int) -> None:
        sequence = self.running[sequence_id]
        sequence.planned = True
        worker = self.workers[sequence.worker]
        known = set(worker.stored)
        self._store(sequence_id, [], computed)
        worker.unwritten |= worker.stored.keys() - known

    def _expect_step(self, worker_id: int) -> None:
        if worker_id in self.stepless:
            raise ModelRefusal(Code.ABORTED)

    def _store(self, sequence_id: int, new: Sequence[int], computed: int) -> None:
        sequence = self.running[sequence_id]
        worker = self.workers[sequence.worker]
        sequence.tokens += new
        sequence.computed = computed
        before = len(sequence.prefixes)
        while worker.prefix_caching and (len(sequence.prefixes) + 1) * self.block_size <= computed:
            i = len(sequence.prefixes)
            prefix: Prefix = (sequence.metadata.salt, *sequence.tokens[: (i + 1) * self.block_size])
            if prefix in worker.unwritten:
                break
            if prefix not in worker.stored:
                worker.store(prefix, sequence.table[i])
            worker.use_for(prefix, sequence_id, sequence.metadata.priority, again=False)
            sequence.prefixes.append(prefix)
        if len(sequence.prefixes) > before:
            worker.retain(sequence.prefixes, sequence.metadata.retention)

    def swap_out(self, sequence_id: int) -> Result:
        sequence = self._running(sequence_id)
        worker = self.workers[sequence.worker]
        if sequence.planned:
            raise ModelRefusal(Code.FAILED_PRECONDITION)
        needed = -(-sequence.computed // self.block_size)
        if needed > worker.host.available:
            raise ModelRefusal(Code.RESOURCE_EXHAUSTED)
        host = worker.host.take(needed)
        self.free([sequence_id])
        self.swapped[sequence_id] = ModelSwapped(
            sequence.worker, sequence.tokens, sequence.computed, host, sequence.metadata
        )
        return "swap_out", sequence.table[:needed], host

    def swap_in(self, sequence_id: int) -> Result:
        swapped = self.swapped.get(sequence_id)
        if swapped is None:
            known = sequence_id in self.waiting or sequence_id in self.running
            raise ModelRefusal(Code.FAILED_PRECONDITION if known else Code.NOT_FOUND)
        self._expect_step(swapped.worker)
        self.waiting[sequence_id], self.metadata[sequence_id] = swapped.tokens, swapped.metadata
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

    def free(self, sequences: Sequence[int], discard: bool = False) -> Result:
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
            self._leave(s, discard)
        return OK

    def _leave(self, s: int, discard: bool) -> None:
        sequence = self.running.pop(s)
        worker = self.workers[sequence.worker]
        ends_within = sequence.computed > sequence.begun and sequence.computed % self.block_size
        all_stored = len(sequence.prefixes) == sequence.computed // self.block_size
        if worker.partial_reuse and ends_within and all_stored and not (discard or sequence.planned):
            partial: Prefix = (sequence.metadata.salt, *sequence.tokens[: sequence.computed])
            block = sequence.table[sequence.computed // self.block_size]
            worker.keep_partial_block(partial, block, sequence.metadata.priority, sequence.metadata.retention)
        others = {block for other in self.running.values() if other.worker == sequence.worker for block in other.table}
        for block in reversed(sequence.table):
            if block not in worker.stored.values() and block not in others:
                worker.free.append(block)
        for prefix in reversed(sequence.prefixes):
            worker.users[prefix].remove(s)
            if not worker.users[prefix]:
                worker.leave(prefix)
            if not worker.users[prefix] and prefix in worker.unwritten:
                worker.forget([prefix])
        unused = [prefix for prefix in sequence.prefixes if prefix in worker.unused]
        if discard and unused:
            for memory in (worker.host, worker):
                memory.forget([p for p in memory.stored if p[: len(unused[0])] == unused[0]])

    def _hit(self, worker: ModelWorker, salt: str, tokens: Sequence[int]) -> list[Prefix]:
        hit: list[Prefix] = []
        for end in range(self.block_size, len(tokens), self.block_size):
            prefix: Prefix = (salt, *tokens[:end])
            if prefix not in worker.stored:
                break
            hit.append(prefix)
        return hit

    def _behind(self, worker: ModelWorker, salt: str, tokens: Sequence[int], num_hit: int) -> list[Prefix]:
        """The blocks on the host that follow a match."""
        behind: list[Prefix] = []
        for end in range((num_hit + 1) * self.block_size, len(tokens), self.block_size):
            prefix: Prefix = (salt, *tokens[:end])
            if prefix not in worker.host.stored:
                break
            behind.append(prefix)
        return behind

    def _nearest(
        self, worker: ModelWorker, tokens: Prefix, hit: list[Prefix], behind: list[Prefix]
    ) -> tuple[int, int, int]:
        """The block with the longest common beginning with the next tokens, how many tokens are copied from it if it is
        on the device, and how many if it is on the host."""
        if not worker.partial_reuse:
            return 0, 0, 0
        ends = [1 + len(prefixes) * self.block_size for prefixes in (hit, hit + behind)]
        source, copied = worker.nearest(tokens[: ends[0]], tokens) if not behind else (0, 0)
        on_host, more = worker.host.nearest(tokens[: ends[1]], tokens) if worker.host_tier else (0, 0)
        return (on_host, 0, more) if more > copied else (source, copied, 0)

    def _worker(self, worker: int) -> ModelWorker:
        if worker not in self.workers:
            raise ModelRefusal(Code.NOT_FOUND)
        return self.workers[worker]

    def _running(self, sequence: int) -> ModelSequence:
        if sequence not in self.running:
            known = sequence in self.waiting or sequence in self.swapped
            raise ModelRefusal(Code.FAILED_PRECONDITION if known else Code.NOT_FOUND)
        return self.running[sequence]
