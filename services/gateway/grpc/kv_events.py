"""The cache's events in the form of the contracts of smg (the SGLang Model Gateway, a router). All workers together are
one engine.

A block may be on several workers, and on a worker in device and in host memory. A router is told that a block is stored
when its first copy is stored, and that it is removed when its last copy is removed.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from paceline.third_party import smg_common_pb2 as smg
from paceline.v1 import cache_pb2

# Events in one message of a snapshot, at most. A stored event has a run of consecutive blocks.
_CHUNK_EVENTS = 64
_SIGN = 2**63


class NoTokens(Exception):
    """The cache sends no tokens, without which a router cannot find a prompt's blocks."""

    def __init__(self) -> None:
        super().__init__(
            "SubscribeKvEvents needs the tokens of blocks: start the cache with --event-tokens "
            "(PACELINE_CACHE_EVENT_TOKENS=true)"
        )


def block_hash(prefix_id: int) -> int:
    """A prefix id as smg's signed number."""
    return prefix_id - 2 * _SIGN if prefix_id >= _SIGN else prefix_id


class KvEventTranslator:
    """Translates the events of one WatchEvents stream. A stream begins with a snapshot.

    A batch has the number of the cache's event, also if the event changes nothing for a router, so numbers have no gap.
    The last message of a snapshot has the number of the snapshot, and the messages before it have the numbers below.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], set[int]] = defaultdict(set)  # prefix ids by worker and tier
        self._copies: Counter[int] = Counter()
        self._snapshot: list[smg.KvCacheEvent] | None = None  # the events of a snapshot that is not complete
        self._num_events = 0

    def take(self, response: cache_pb2.WatchEventsResponse) -> list[smg.KvEventBatch]:
        """The batches for one message of the cache. No batches until a snapshot is complete. Raises NoTokens."""
        match response.WhichOneof("event"):
            case "snapshot":
                return self._take_snapshot(response)
            case "stored":
                events = self._stored(response.stored)
            case "removed":
                events = self._removed(response.removed)
            case "cleared":
                events = self._cleared(response.cleared.worker)
            case _:  # of a newer cache
                events = []
        if self._snapshot is not None:
            self._snapshot += events
            return []
        return [_batch(response.sequence_number, events)]

    def _take_snapshot(self, response: cache_pb2.WatchEventsResponse) -> list[smg.KvEventBatch]:
        if not response.snapshot.complete:
            if not response.snapshot.with_tokens:
                raise NoTokens
            self._held.clear()
            self._copies.clear()
            self._snapshot = [self._event(cleared=smg.KvCacheCleared())]
            return []
        events, self._snapshot = self._snapshot or [], None
        parts = [events[i : i + _CHUNK_EVENTS] for i in range(0, len(events), _CHUNK_EVENTS)] or [[]]
        batches = []
        for index, part in enumerate(parts):
            batch = _batch(response.sequence_number - len(parts) + 1 + index, part)
            batch.snapshot.CopyFrom(
                smg.KvSnapshotChunk(index=index, count=len(parts), blocks=len(self._copies), unknown_before=0)
            )
            batches.append(batch)
        return batches

    def _stored(self, stored: cache_pb2.BlockStored) -> list[smg.KvCacheEvent]:
        ids, held = stored.prefix_ids, self._held[stored.worker, stored.tier]
        tokens = np.frombuffer(stored.token_ids, "<i4")
        if not ids or not len(tokens) or len(tokens) % len(ids):
            return []  # no blocks, no tokens, or blocks of unequal size: no cache with tokens sends these
        size = len(tokens) // len(ids)
        events, run = [], list[int]()  # indices of consecutive blocks that are new to the router
        for i, prefix_id in enumerate(ids):
            is_new = False
            if prefix_id not in held:
                held.add(prefix_id)
                self._copies[prefix_id] += 1
                is_new = self._copies[prefix_id] == 1
            if is_new:
                run.append(i)
            elif run:
                events.append(self._run(stored, tokens, size, run))
                run = []
        if run:
            events.append(self._run(stored, tokens, size, run))
        return events

    def _run(
        self, stored: cache_pb2.BlockStored, tokens: np.ndarray, size: int, run: Sequence[int]
    ) -> smg.KvCacheEvent:
        message = smg.KvBlocksStored()
        for i in run:
            message.blocks.add(
                block_hash=block_hash(stored.prefix_ids[i]),
                token_ids=tokens[i * size : (i + 1) * size].tolist(),
                block_size=size,
            )
        if run[0]:
            message.parent_block_hash = block_hash(stored.prefix_ids[run[0] - 1])
        elif stored.start_block:  # otherwise the parent is the namespace, which is no block
            message.parent_block_hash = block_hash(stored.parent_prefix_id)
        if stored.namespace.lora:
            message.lora_name = stored.namespace.lora
        return self._event(stored=message)

    def _removed(self, removed: cache_pb2.BlockRemoved) -> list[smg.KvCacheEvent]:
        held = self._held[removed.worker, removed.tier]
        gone = [prefix_id for prefix_id in removed.prefix_ids if prefix_id in held]
        held.difference_update(gone)
        return self._drop(gone)

    def _cleared(self, worker: int) -> list[smg.KvCacheEvent]:
        events = []
        for key in [key for key in self._held if key[0] == worker]:
            events += self._drop(self._held.pop(key))
        return events

    def _drop(self, prefix_ids: Iterable[int]) -> list[smg.KvCacheEvent]:
        """One copy less of each block."""
        last = []
        for prefix_id in prefix_ids:
            self._copies[prefix_id] -= 1
            if not self._copies[prefix_id]:
                del self._copies[prefix_id]
                last.append(block_hash(prefix_id))
        return [self._event(removed=smg.KvBlocksRemoved(block_hashes=last))] if last else []

    def _event(
        self,
        stored: smg.KvBlocksStored | None = None,
        removed: smg.KvBlocksRemoved | None = None,
        cleared: smg.KvCacheCleared | None = None,
    ) -> smg.KvCacheEvent:
        self._num_events += 1
        return smg.KvCacheEvent(event_id=self._num_events, stored=stored, removed=removed, cleared=cleared)


def _batch(number: int, events: Iterable[smg.KvCacheEvent]) -> smg.KvEventBatch:
    return smg.KvEventBatch(sequence_number=number, timestamp=time.time(), events=events)
