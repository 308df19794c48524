"""Sends exchanges to a core: one method per operation, refusals as exceptions."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from cache_svc.core.cache import CacheCore
from cache_svc.core.errors import Code
from paceline.v1 import cache_pb2 as pb
from paceline.v1.common_pb2 import RetentionRange


class Refused(Exception):
    def __init__(self, error: pb.CacheOpError) -> None:
        super().__init__(error.message)
        self.code = Code(error.code)


def pack(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()


def unpack(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


def add_worker_op(
    worker: int,
    num_blocks: int,
    block_size: int,
    prefix_caching: bool = True,
    num_host_blocks: int = 0,
    partial_reuse: bool = False,
    host_tier: bool = False,
) -> pb.CacheOp:
    op = pb.AddWorkerOp(worker=worker, num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_host_blocks)
    op.prefix_caching, op.partial_reuse, op.host_tier = prefix_caching, partial_reuse, host_tier
    return pb.CacheOp(add_worker=op)


Retention = Sequence[tuple[int, int, int, int]]  # start, end, priority, milliseconds


def match_op(
    sequence: int,
    tokens: Sequence[int],
    priority: float = 0.0,
    retention: Retention = (),
    salt: str = "",
    tenant: str = "",
) -> pb.CacheOp:
    ranges = [RetentionRange(start=a, end=b, priority=p, duration_ms=ms) for a, b, p, ms in retention]
    match = pb.MatchOp(sequence=sequence, token_ids=pack(tokens), priority=priority, retention=ranges, tenant=tenant)
    match.namespace.cache_salt = salt
    return pb.CacheOp(match=match)


def rematch_op(sequences: Sequence[int], always: bool = False) -> pb.CacheOp:
    return pb.CacheOp(rematch=pb.RematchOp(sequences=sequences, always=always))


def admit_op(sequence: int, worker: int, new_tokens: int = 0, planned: int = 0, no_reuse: bool = False) -> pb.CacheOp:
    admit = pb.AdmitOp(
        sequence=sequence, worker=worker, num_new_tokens=new_tokens, num_planned_tokens=planned, no_reuse=no_reuse
    )
    return pb.CacheOp(admit=admit)


def fork_op(sequence: int, worker: int, parent: int) -> pb.CacheOp:
    return pb.CacheOp(admit=pb.AdmitOp(sequence=sequence, worker=worker, fork_of=parent))


def extend_op(sequences: Sequence[int]) -> pb.CacheOp:
    return pb.CacheOp(extend=pb.ExtendOp(sequences=sequences))


def commit_op(entries: Sequence[tuple[int, Sequence[int], int]], planned: bool = False) -> pb.CacheOp:
    """Entries: sequence, new tokens, computed tokens."""
    return pb.CacheOp(
        commit=pb.CommitOp(
            sequences=[sequence for sequence, _, _ in entries],
            num_new_tokens=[len(tokens) for _, tokens, _ in entries],
            token_ids=b"".join(pack(tokens) for _, tokens, _ in entries),
            num_computed_tokens=[computed for _, _, computed in entries],
            planned=planned,
        )
    )


def swap_out_op(sequence: int) -> pb.CacheOp:
    return pb.CacheOp(swap_out=pb.SwapOutOp(sequence=sequence))


def swap_in_op(sequence: int) -> pb.CacheOp:
    return pb.CacheOp(swap_in=pb.SwapInOp(sequence=sequence))


def free_op(sequences: Sequence[int], discard: bool = False) -> pb.CacheOp:
    return pb.CacheOp(free=pb.FreeOp(sequences=sequences, discard=discard))


def remove_worker_op(worker: int) -> pb.CacheOp:
    return pb.CacheOp(remove_worker=pb.RemoveWorkerOp(worker=worker))


def pairs(copies: pb.BlockMoves | pb.AdmitResult | pb.SwapOutResult) -> list[tuple[int, int]]:
    """(device block, host block)."""
    return list(zip(unpack(copies.device_blocks), unpack(copies.host_blocks), strict=True))


def tiers(matches: Iterable[pb.WorkerMatch]) -> dict[int, tuple[int, int, int]]:
    """Worker -> cached tokens, referenced tokens, tokens in host memory."""
    return {m.worker: (m.num_tokens, m.num_live_tokens, m.num_host_tokens) for m in matches}


class Driver:
    """A link to a core in debug mode: every exchange ends with a check of all invariants."""

    def __init__(
        self, debug: bool = True, eviction: str = "lru", retained: float = 1.0, total_retained: float = 1.0
    ) -> None:
        """Shares of each memory that may be retained, for one tenant and for all: by default there is no limit."""
        self.core = CacheCore(
            debug=debug, eviction=eviction, max_tenant_retained_share=retained, max_retained_share=total_retained
        )
        self.now_ms = 0
        self.pools: dict[int, tuple[int, int, int, int]] = {}  # as reported: free, cached, used, evicted
        self.host_pools: dict[int, tuple[int, int]] = {}  # free, used
        self.cached_host: dict[int, int] = {}
        self.demotions: list[tuple[int, int]] = []  # of the last exchange: device block, host block
        self._exchange = 0

    def exchange(self, *ops: pb.CacheOp) -> pb.CacheServiceLinkResponse:
        self._exchange += 1
        request = pb.CacheServiceLinkRequest(epoch=7, exchange=self._exchange, ops=ops, now_ms=self.now_ms)
        response = self.core.exchange(pb.CacheServiceLinkRequest.FromString(request.SerializeToString()))
        assert (response.epoch, response.exchange) == (7, self._exchange)
        assert len(response.results) == len(ops)
        for pool in response.pools:
            self.pools[pool.worker] = (
                pool.free_blocks,
                pool.cached_blocks,
                pool.used_blocks,
                pool.evicted_blocks_total,
            )
            self.host_pools[pool.worker] = pool.free_host_blocks, pool.used_host_blocks
            self.cached_host[pool.worker] = pool.cached_host_blocks
        self.demotions = [pair for moves in response.demotions for pair in pairs(moves)]
        return response

    def one(self, op: pb.CacheOp) -> pb.CacheOpResult:
        result = self.exchange(op).results[0]
        if result.HasField("error"):
            raise Refused(result.error)
        return result

    def add_worker(
        self,
        worker: int,
        num_blocks: int,
        block_size: int = 4,
        prefix_caching: bool = True,
        num_host_blocks: int = 0,
        partial_reuse: bool = False,
        host_tier: bool = False,
    ) -> None:
        caching = prefix_caching, num_host_blocks, partial_reuse, host_tier
        self.one(add_worker_op(worker, num_blocks, block_size, *caching))

    def remove_worker(self, worker: int) -> None:
        self.one(remove_worker_op(worker))

    def match(self, sequence: int, tokens: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Worker -> cached tokens, referenced tokens."""
        result = self.one(match_op(sequence, tokens))
        assert result.HasField("match")
        return {m.worker: (m.num_tokens, m.num_live_tokens) for m in result.match.matches}

    def admit(self, sequence: int, worker: int) -> tuple[int, list[int]]:
        """Cached tokens, block table."""
        result = self.one(admit_op(sequence, worker)).admit
        return result.num_cached_tokens, unpack(result.block_table)

    def start(self, sequence: int, tokens: Sequence[int], worker: int = 0) -> tuple[int, list[int]]:
        self.match(sequence, tokens)
        return self.admit(sequence, worker)

    def extend(self, *sequences: int) -> list[int]:
        return unpack(self.one(extend_op(sequences)).extend.block_ids)

    def commit(self, sequence: int, tokens: Sequence[int], computed: int) -> None:
        self.one(commit_op([(sequence, tokens, computed)]))

    def swap_out(self, sequence: int) -> list[tuple[int, int]]:
        """(device block, host block)."""
        return pairs(self.one(swap_out_op(sequence)).swap_out)

    def swap_in(self, sequence: int) -> tuple[int, list[int], list[tuple[int, int]]]:
        """Cached tokens, block table, (host block, device block)."""
        result = self.one(swap_in_op(sequence)).swap_in
        pairs = list(zip(unpack(result.host_blocks), unpack(result.device_blocks), strict=True))
        return result.admit.num_cached_tokens, unpack(result.admit.block_table), pairs

    def free(self, *sequences: int) -> None:
        self.one(free_op(sequences))

    def run(self, sequence: int, tokens: Sequence[int], worker: int = 0) -> tuple[int, list[int]]:
        """Start, compute all tokens, end: its whole blocks are cached now."""
        admitted = self.start(sequence, tokens, worker)
        self.commit(sequence, [], len(tokens))
        self.free(sequence)
        return admitted

    def probe(self, tokens: Sequence[int]) -> dict[int, tuple[int, int]]:
        """How many of these tokens are cached, for a prompt with one more token."""
        matched = self.match(2**63, [*tokens, -1])
        self.free(2**63)
        return matched


def restored(
    sequence: int,
    tokens: Sequence[int],
    computed: int,
    table: Sequence[int] = (),
    host: Sequence[int] | None = None,
    salt: str = "",
) -> pb.RestoredSequence:
    """A restore entry; with `host`, of a swapped-out sequence."""
    entry = pb.RestoredSequence(
        sequence=sequence, token_ids=pack(tokens), num_computed_tokens=computed, block_table=pack(table)
    )
    entry.namespace.cache_salt = salt
    if host is not None:
        entry.host_blocks = pack(host)
    return entry


def restore_op(
    worker: int, entries: Iterable[pb.RestoredSequence], incomplete: bool = False, cached: bool = False
) -> pb.CacheOp:
    op = pb.RestoreOp(worker=worker, sequences=entries, incomplete=incomplete, cached=cached)
    return pb.CacheOp(restore=op)
