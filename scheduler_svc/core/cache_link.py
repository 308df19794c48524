"""The scheduler's side of the cache link: gathers operations, one exchange at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from paceline.v1.cache_pb2 import (
    AddWorkerOp,
    AdmitResult,
    CacheOp,
    CacheServiceLinkRequest,
    CacheServiceLinkResponse,
    CommitOp,
    MatchOp,
)
from scheduler_svc.core.request import TOKEN_BYTES, Request
from scheduler_svc.core.worker import Draft, Worker


class ProtocolError(Exception):
    """A peer said something that its protocol does not allow; its link has to go."""


@dataclass(slots=True)
class Sent:
    """An exchange that is on its way: which operation of it belongs to whom, by index."""

    matches: list[tuple[int, int]] = field(default_factory=list)  # (operation, sequence)
    swap_outs: list[tuple[int, int, Request]] = field(default_factory=list)  # (operation, sequence, request)
    askers: list[Worker] = field(default_factory=list)  # whose next step waits for the answer
    drafts: list[tuple[Draft, int, list[int]]] = field(default_factory=list)  # (draft, extend or -1, admits)


@dataclass(slots=True)
class CacheLink:
    """Operations gather until the exchange before them has come back; then they all go in one message.

    Their order is fixed: commits, swaps to host memory, frees, workers going and coming, matches, and last what drafts
    ask for: growth, what the step computes of running sequences, admissions. So a block that a sequence of this
    exchange gives up can be granted in the same exchange, and a commit never follows its sequence's free.
    """

    epoch: int
    connected: bool = False
    exchange: int = 0
    sent: Sent | None = None
    removed: list[int] = field(default_factory=list)
    added: list[AddWorkerOp] = field(default_factory=list)
    matches: dict[int, Request] = field(default_factory=dict)  # by sequence
    swap_outs: dict[int, Request] = field(default_factory=dict)  # by sequence
    model: str = ""  # fingerprint of the one that is served
    rematches: dict[int, None] = field(default_factory=dict)  # sequences that wait, whose matches are asked for anew
    frees: list[int] = field(default_factory=list)
    discards: list[int] = field(default_factory=list)  # frees after which nothing is kept of what they computed
    # Of sequences that have progressed: their names, numbers of new tokens, numbers of computed tokens, the new tokens.
    _commits: tuple[list[int], list[int], list[int], list[bytes]] = field(default_factory=lambda: ([], [], [], []))

    @property
    def has_gathered(self) -> bool:
        """Whether the cache has yet to hear of something."""
        changed = self._commits[0] or self.swap_outs or self.frees or self.discards or self.matches or self.rematches
        return bool(changed or self.added or self.removed)

    @property
    def idle(self) -> bool:
        return self.connected and self.sent is None

    def forget(self) -> None:
        """The link is gone, and with it all that was asked or gathered."""
        self.connected = False
        self.exchange = 0
        self.sent = None
        self.matches.clear()
        self.swap_outs.clear()
        self.rematches.clear()
        for gathered in (self.removed, self.added, self.frees, self.discards, *self._commits):
            gathered.clear()

    def forget_sequence(self, sequence: int, discard: bool = False) -> None:
        """The cache need not know the sequence any more (or never hears of it, if it has not yet)."""
        self.rematches.pop(sequence, None)
        if self.matches.pop(sequence, None) is None:
            (self.discards if discard else self.frees).append(sequence)

    def forget_worker(self, worker: int) -> None:
        """The worker is gone; if the cache has not heard of it yet, it never will."""
        waiting = len(self.added)
        self.added = [op for op in self.added if op.worker != worker]
        if len(self.added) == waiting:
            self.removed.append(worker)

    def add_commit(self, sequence: int, new_tokens: bytes, num_computed_tokens: int) -> None:
        """The sequence has new tokens, and so many of all its tokens are computed."""
        sequences, num_new_tokens, num_computed, tokens = self._commits
        sequences.append(sequence)
        num_new_tokens.append(len(new_tokens) // TOKEN_BYTES)
        num_computed.append(num_computed_tokens)
        tokens.append(new_tokens)

    def _add_gathered(self, ops: RepeatedCompositeFieldContainer[CacheOp], sent: Sent) -> None:
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
        if self.frees:
            ops.add().free.sequences.extend(self.frees)
            self.frees.clear()
        if self.discards:
            free = ops.add().free
            free.sequences.extend(self.discards)
            free.discard = True
            self.discards.clear()
        for worker in self.removed:
            ops.add().remove_worker.worker = worker
        for op in self.added:
            ops.add().add_worker.MergeFrom(op)
        self.removed.clear()
        self.added.clear()

    def compose(
        self, drafts: list[tuple[Worker, Draft]], askers: list[Worker], heads: list[Request], now_s: float
    ) -> CacheServiceLinkRequest | None:
        """The next exchange, or None if there is nothing to say. It asks anew for the matches of `heads`, the waiting
        requests that are looked at next."""
        if not (drafts or self.has_gathered):
            return None
        self.exchange += 1
        message = CacheServiceLinkRequest(epoch=self.epoch, exchange=self.exchange, now_ms=int(now_s * 1000))
        ops = message.ops  # filled in place: a message that is given to another one is copied, prompt and all
        self.sent = sent = Sent(askers=askers)
        self._add_gathered(ops, sent)
        for sequence, request in self.matches.items():
            sent.matches.append((len(ops), sequence))
            self._fill_match(ops.add().match, sequence, request)
        self.matches.clear()
        for worker, draft in drafts:
            extend, admits = -1, []
            if len(draft.decision.growth):
                extend = len(ops)
                ops.add().extend.sequences.extend(worker.slots.sequence[draft.decision.growth].tolist())
            if draft.decision.shares and draft.decision.admissions and draft.decision.chunks:
                self._fill_planned(ops.add().commit, worker, draft.decision.chunks)
            for admission in draft.decision.admissions:
                admits.append(len(ops))
                request, op = admission.request, ops.add()
                if request.swapped_on:
                    op.swap_in.sequence = request.sequence
                    continue
                admit = op.admit
                admit.sequence, admit.worker = request.sequence, worker.id
                admit.num_new_tokens = admission.num_new_tokens
                if request.parent is not None and request.can_fork_on(worker.id):
                    admit.fork_of = request.parent.sequence
                elif draft.decision.shares:
                    admit.num_planned_tokens = admission.num_tokens
                if request.scores_prompt:
                    admit.no_reuse = True
            sent.drafts.append((draft, extend, admits))
        known = [request.sequence for request in heads if request.matches is not None]
        if known:
            ops.add().rematch.sequences.extend(known)
        if self.rematches:
            rematch = ops.add().rematch
            rematch.sequences.extend(self.rematches)
            rematch.always = True
            self.rematches.clear()
        return message

    @staticmethod
    def _fill_planned(commit: CommitOp, worker: Worker, chunks: list[tuple[int, int, int]]) -> None:
        """What the step computes of sequences that run already."""
        commit.planned = True
        for slot, _, size in chunks:
            commit.sequences.append(int(worker.slots.sequence[slot]))
            commit.num_new_tokens.append(0)
            commit.num_computed_tokens.append(worker.prefills[slot].num_planned + size)

    def _fill_match(self, match: MatchOp, sequence: int, request: Request) -> None:
        match.sequence, match.token_ids = sequence, request.token_ids
        namespace = match.namespace
        namespace.model = self.model
        if request.lora:
            namespace.lora = request.lora
        if request.cache_salt:
            namespace.cache_salt = request.cache_salt
        if request.priority:
            match.priority = request.priority
        if request.cache_retention:
            match.retention.extend(request.cache_retention)

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
