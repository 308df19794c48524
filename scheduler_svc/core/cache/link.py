"""The scheduler's side of the cache link. It gathers operations, and has one exchange in flight."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from paceline.v1.cache_pb2 import (
    AdmitOp,
    AdmitResult,
    CacheOp,
    CacheServiceLinkRequest,
    CacheServiceLinkResponse,
    CommitOp,
    EndRetentionOp,
    MatchOp,
    RestoredSequence,
    WorkerMatch,
)
from scheduler_svc.core.requests.request import TOKEN_BYTES, Request
from scheduler_svc.core.workers.state import PendingSteps, WorkerState
from scheduler_svc.core.workers.steps import PendingStep, PlannedAdmission

# When an exchange has more bytes of tokens and tables than this, the rest goes with the next exchange. Half of the
# message limit (services/runtime/rpc.py), so that one more sequence still fits. An example that needs several
# exchanges: 1,024 sequences of 8,192 tokens are 34 MB.
MAX_EXCHANGE_BYTES = 8 * 2**20


class ProtocolError(Exception):
    """A peer broke the protocol; its link is closed."""


@dataclass(slots=True)
class Sent:
    """An exchange in flight, and what is needed to apply its answer. `operation`: an index in the exchange."""

    matches: list[tuple[int, int]] = field(default_factory=list)  # (operation, sequence)
    swap_outs: list[tuple[int, int, Request]] = field(default_factory=list)  # (operation, sequence, request)
    restores: list[tuple[int, int]] = field(default_factory=list)  # (operation, worker)
    # workers with a next step that waits for the answer
    awaiting_cache: list[WorkerState] = field(default_factory=list)
    pending_steps: list[PendingStep] = field(default_factory=list)

    def matched(self, response: CacheServiceLinkResponse) -> Iterator[tuple[int, Iterable[WorkerMatch]]]:
        """For each sequence that the exchange made known: what the cache holds of it."""
        for index, sequence in self.matches:
            result = response.results[index]
            if result.HasField("match"):
                yield sequence, result.match.matches


@dataclass(slots=True)
class CacheLink:
    """Operations gather until the previous exchange is answered; then they go in one message.

    Their order is fixed: commits, swaps to host memory, frees, ended retentions and pins, removed and added workers,
    matches. Then come the operations of each pending step (growth, what the step computes of running sequences,
    admissions), and at last rematches. So the cache can grant a block in the same exchange in which another sequence
    frees it, and a commit never follows its sequence's free.

    A new link to an empty cache begins with special exchanges, while `restoring` is not empty: they report the
    sequences that hold blocks on workers (recovery.py). Operations that come meanwhile gather.
    """

    epoch: int
    connected: bool = False
    exchange: int = 0
    sent: Sent | None = None
    removed: list[int] = field(default_factory=list)
    # Workers to add: each with its AddWorkerOp, and the kept contents of its blocks, if any.
    added: dict[int, list[CacheOp]] = field(default_factory=dict)
    opening: deque[CacheServiceLinkRequest] = field(default_factory=deque)  # special exchanges that are not sent yet
    # Requests with restore entries in these exchanges, until all are answered: by worker, by sequence.
    restoring: dict[int, dict[int, Request]] = field(default_factory=dict)
    matches: dict[int, Request] = field(default_factory=dict)  # by sequence
    swap_outs: dict[int, Request] = field(default_factory=dict)  # by sequence
    model: str = ""  # fingerprint of the served model
    rematches: dict[int, None] = field(default_factory=dict)  # waiting sequences that need fresh matches
    frees: list[int] = field(default_factory=list)
    end_retentions: list[EndRetentionOp] = field(default_factory=list)  # of conversations that are over
    unpins: dict[int, None] = field(default_factory=dict)  # workers with pins that the cache should give up
    discards: list[int] = field(default_factory=list)  # frees of sequences with KV that must not be reused
    # Of sequences with progress: their names, numbers of new tokens, numbers of computed tokens, the new tokens.
    _commits: tuple[list[int], list[int], list[int], list[bytes]] = field(default_factory=lambda: ([], [], [], []))

    @property
    def has_gathered(self) -> bool:
        """Whether operations have gathered."""
        return bool(self._commits[0]) or not self.has_only_commits

    @property
    def has_only_commits(self) -> bool:
        """Whether only commits have gathered, or nothing."""
        changed = self.swap_outs or self.frees or self.discards or self.matches or self.rematches
        return not (changed or self.added or self.removed or self.unpins or self.end_retentions)

    @property
    def idle(self) -> bool:
        return self.connected and self.sent is None

    def forget(self) -> None:
        """The link is gone, together with everything asked or gathered."""
        self.connected = False
        self.exchange = 0
        self.sent = None
        for by_id in (self.added, self.restoring, self.matches, self.swap_outs, self.rematches, self.unpins):
            by_id.clear()
        gathered_lists = (self.removed, self.frees, self.discards, self.end_retentions, *self._commits)
        for gathered in (self.opening, *gathered_lists):
            gathered.clear()

    def forget_sequence(self, sequence: int, discard: bool = False) -> None:
        """The cache may forget the sequence. If the cache has not heard of it yet, it never will."""
        self.rematches.pop(sequence, None)
        if self.matches.pop(sequence, None) is None:
            (self.discards if discard else self.frees).append(sequence)

    def end_retention(self, lora: str, cache_salt: str, tenant: str, token_ids: bytes) -> None:
        """The tenant does not need these tokens of the namespace any more. A new cache retains nothing."""
        if not self.connected:
            return
        op = EndRetentionOp(tenant=tenant, token_ids=token_ids)
        op.namespace.model, op.namespace.lora, op.namespace.cache_salt = self.model, lora, cache_salt
        self.end_retentions.append(op)

    def never_knew(self, sequence: int) -> None:
        """The cache has refused the sequence: drop every gathered operation of it."""
        for frees in (self.frees, self.discards):
            if sequence in frees:
                frees.remove(sequence)
        while sequence in self._commits[0]:
            at = self._commits[0].index(sequence)
            for gathered in self._commits:
                del gathered[at]

    def forget_worker(self, worker: int) -> None:
        """The worker is gone. If the cache has not heard of it yet, it never will."""
        self.unpins.pop(worker, None)
        if self.added.pop(worker, None) is None:
            self.removed.append(worker)

    def add_commit(self, sequence: int, new_tokens: bytes, num_computed_tokens: int) -> None:
        """The sequence has new tokens, and this many of all its tokens are computed."""
        sequences, num_new_tokens, num_computed, tokens = self._commits
        sequences.append(sequence)
        num_new_tokens.append(len(new_tokens) // TOKEN_BYTES)
        num_computed.append(num_computed_tokens)
        tokens.append(new_tokens)

    def _add_gathered(self, ops: RepeatedCompositeFieldContainer[CacheOp], sent: Sent) -> int:
        """Move the gathered operations, except matches and rematches, into the message. Returns the bytes of the added
        workers."""
        sequences, new_tokens, computed, tokens = self._commits
        if sequences:
            commit = ops.add().commit
            commit.sequences.extend(sequences)
            commit.num_new_tokens.extend(new_tokens)
            commit.num_computed_tokens.extend(computed)
            commit.token_ids = b"".join(tokens)
            for gathered in self._commits:
                gathered.clear()
        for sequence, request in self.swap_outs.items():
            sent.swap_outs.append((len(ops), sequence, request))
            ops.add().swap_out.sequence = sequence
        self.swap_outs.clear()
        for sequences, discard in ((self.frees, False), (self.discards, True)):
            if sequences:
                free = ops.add().free
                free.sequences.extend(sequences)
                free.discard = discard
                sequences.clear()
        for end in self.end_retentions:  # after the frees: an ended request must no longer hold its blocks
            ops.add().end_retention.CopyFrom(end)
        self.end_retentions.clear()
        for worker in self.unpins:
            ops.add().give_up_pins.worker = worker
        self.unpins.clear()
        for worker in self.removed:
            ops.add().remove_worker.worker = worker
        self.removed.clear()
        num_bytes = 0
        while self.added:
            worker, own = next(iter(self.added.items()))
            size = sum(op.ByteSize() for op in own)
            if num_bytes and num_bytes + size > MAX_EXCHANGE_BYTES:
                break  # the others go with the next exchange
            num_bytes += size
            del self.added[worker]
            for op in own:
                ops.add().MergeFrom(op)
        return num_bytes

    def open(self, now_s: float) -> CacheServiceLinkRequest | None:
        """The next of the exchanges with which the link begins. None while one is in flight."""
        if self.sent is not None:
            return None
        message = self.opening.popleft()
        self.exchange += 1
        message.epoch, message.exchange, message.now_ms = self.epoch, self.exchange, int(now_s * 1000)
        restores = [(index, op.restore.worker) for index, op in enumerate(message.ops) if op.HasField("restore")]
        self.sent = Sent(restores=restores)
        return message

    def emit_exchange(
        self, pending_steps: PendingSteps, awaiting_cache: list[WorkerState], candidates: list[Request], now_s: float
    ) -> CacheServiceLinkRequest:
        """The next exchange. It asks for fresh matches of `candidates`, the waiting requests that come next."""
        self.exchange += 1
        message = CacheServiceLinkRequest(epoch=self.epoch, exchange=self.exchange, now_ms=int(now_s * 1000))
        ops = message.ops  # filled in place: adding a message to another copies it, prompt included
        self.sent = sent = Sent(awaiting_cache=awaiting_cache)
        self._add_matches(ops, sent, self._add_gathered(ops, sent))
        for worker, pending_step in pending_steps:
            decision = pending_step.decision
            if len(decision.growth):
                pending_step.extend = len(ops)
                ops.add().extend.sequences.extend(worker.batch.slots.sequence[decision.growth].tolist())
            if decision.shares and decision.admissions and decision.chunks:
                self._fill_planned(ops.add().commit, worker, decision.chunks)
            for admission in decision.admissions:
                pending_step.admits.append(len(ops))
                request, op = admission.request, ops.add()
                if request.held.swapped_on:
                    op.swap_in.sequence = request.held.sequence
                else:
                    self._fill_admit(op.admit, worker, admission, decision.shares)
            sent.pending_steps.append(pending_step)
        known = [request.held.sequence for request in candidates if request.matches is not None]
        if known:
            ops.add().rematch.sequences.extend(known)
        if self.rematches:
            rematch = ops.add().rematch
            rematch.sequences.extend(self.rematches)
            rematch.always = True
            self.rematches.clear()
        return message

    def _add_matches(self, ops: RepeatedCompositeFieldContainer[CacheOp], sent: Sent, num_bytes: int) -> None:
        """Add matches until the message is full; it has `num_bytes` bytes already. The next exchange has the others."""
        for sequence, request in self.matches.items():
            if num_bytes > MAX_EXCHANGE_BYTES:
                break
            sent.matches.append((len(ops), sequence))
            self.fill(ops.add().match, sequence, request)
            num_bytes += TOKEN_BYTES * request.num_tokens
        self.matches = dict(itertools.islice(self.matches.items(), len(sent.matches), None))

    @staticmethod
    def _fill_admit(admit: AdmitOp, worker: WorkerState, admission: PlannedAdmission, shares: bool) -> None:
        request = admission.request
        admit.sequence, admit.worker = request.held.sequence, worker.id
        admit.num_new_tokens = admission.num_new_tokens
        if request.family.parent is not None and request.can_fork_on(worker.id):
            admit.fork_of = request.family.parent.held.sequence
        elif shares:
            admit.num_planned_tokens = admission.num_tokens
        if request.needs_whole_prompt:
            admit.no_reuse = True
        if request.history.cached_tokens is not None:
            admit.again = True

    @staticmethod
    def _fill_planned(commit: CommitOp, worker: WorkerState, chunks: list[tuple[int, int, int]]) -> None:
        """What the step computes of running sequences."""
        commit.planned = True
        for slot, _, size in chunks:
            commit.sequences.append(int(worker.batch.slots.sequence[slot]))
            commit.num_new_tokens.append(0)
            commit.num_computed_tokens.append(worker.batch.prefills[slot].num_planned + size)

    def fill(self, match: MatchOp | RestoredSequence, sequence: int, request: Request) -> None:
        """What the cache needs to know of a sequence, for a match or a restore."""
        match.sequence, match.token_ids = sequence, request.token_ids
        namespace = match.namespace
        namespace.model = self.model
        namespace.lora, namespace.cache_salt = request.metadata.lora, request.metadata.cache_salt
        if request.metadata.priority:
            match.priority = request.metadata.priority
        if request.metadata.cache_retention:
            match.retention.extend(request.metadata.cache_retention)
            match.tenant = request.metadata.tenant

    def receive(self, response: CacheServiceLinkResponse) -> Sent:
        """The exchange that this response answers. Raises ProtocolError if it answers none."""
        if self.sent is None or (response.epoch, response.exchange) != (self.epoch, self.exchange):
            raise ProtocolError(
                f"cache answered exchange {response.exchange} of epoch {response.epoch}, "
                f"not {self.exchange} of {self.epoch}"
            )
        sent, self.sent = self.sent, None
        return sent


def admit_result(response: CacheServiceLinkResponse, index: int) -> AdmitResult | None:
    """The grant of an admission, or None if the cache refused it."""
    result = response.results[index]
    if result.HasField("admit"):
        return result.admit
    return result.swap_in.admit if result.HasField("swap_in") else None
