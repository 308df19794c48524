"""Applies a step's result: tokens go to sessions, finished sequences end."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from paceline.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from paceline.v1.worker_pb2 import RowError, StepResult, TokenLogprobs
from scheduler_svc.core.arrays import Slots, Tokens, packed, unpacked
from scheduler_svc.core.cache.link import ProtocolError
from scheduler_svc.core.lifecycle.beam_groups import BeamGroups
from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.output.sessions import Publisher
from scheduler_svc.core.requests.request import TOKEN_BYTES, Request
from scheduler_svc.core.step.drafting import Drafting
from scheduler_svc.core.step.step_log import StepLog
from scheduler_svc.core.step.trace_log import TraceLog
from scheduler_svc.core.workers.state import WorkerState
from scheduler_svc.core.workers.steps import StepInFlight

Logprobs = dict[int, TokenLogprobs]  # by slot
Failures = dict[int, RowError]  # by slot


@dataclass(frozen=True, slots=True)
class ResultReader:
    """Applies step results to requests."""

    life: Lifecycle
    publisher: Publisher
    groups: BeamGroups
    drafting: Drafting
    step_log: StepLog
    trace_log: TraceLog

    def apply(self, worker: WorkerState, result: StepResult, now_s: float) -> int:
        """Apply the result of the oldest step in flight. Returns the number of new tokens, and of inputs pooled.

        Raises ProtocolError if the result is not of that step, or lacks tokens or an embedding.
        """
        step = self._matching_step(worker, result)
        seconds = (result.finished_us - result.started_us) * 1e-6
        if result.finished_us and step.step > 1:  # the first step of a link may compile kernels
            worker.step_fit.add(step.new_tokens, step.context_tokens, step.num_rows, seconds)
        if self.step_log.num_readers:
            self.step_log.add(worker.id, step, now_s, seconds if result.finished_us else 0.0)
        if self.trace_log.num_readers:
            self.trace_log.step_ended(worker.id, worker.registration.name, step, result, now_s)
        tokens = np.frombuffer(result.token_ids, np.int32)
        failed = {error.slot: error for error in result.errors} if result.errors else {}
        logprobs = {item.slot: item for item in result.logprobs} if result.logprobs else {}
        accepted = self._decodes(worker, step, tokens[: len(step.rows)], failed, logprobs)
        if worker.pools:
            accepted += self._embeddings(worker, step, result, failed, now_s)
        elif step.chunks:
            self._prompt_scores(worker, step, result)
            accepted += self._prefills(worker, step, tokens[len(step.rows) :], failed, logprobs, now_s)
        if step.drafts:
            accepted += self._drafts(worker, step, result, failed)
        if worker.may_draft:
            self.drafting.observe(worker, step)
        return accepted

    def _matching_step(self, worker: WorkerState, result: StepResult) -> StepInFlight:
        if not worker.in_flight:
            raise ProtocolError(f"result of step {result.step}, but no step is in flight")
        step = worker.in_flight.popleft()
        if result.step != step.step:
            raise ProtocolError(f"result of step {result.step}, expected {step.step}")
        if len(result.token_ids) != 4 * step.num_sampled:
            raise ProtocolError(f"step {step.step}: {len(result.token_ids)} bytes for {step.num_sampled} tokens")
        if step.drafts or result.draft_num_tokens:
            _check_drafts(step, result)
        return step

    def _decodes(
        self, worker: WorkerState, step: StepInFlight, tokens: Tokens, failed: Failures, logprobs: Logprobs
    ) -> int:
        slots, rows = worker.batch.slots, step.rows
        if not len(rows):
            return 0
        if failed:
            for slot in rows.slots[slots.generation[rows.slots] == rows.generations].tolist():
                if slot in failed:
                    self._fail(worker.batch.running[slot], failed[slot])
        occupied, handles, sessions = rows.slots, rows.handles, rows.sessions
        if slots.num_releases != step.num_releases:
            current = slots.generation[occupied] == rows.generations
            occupied, tokens = occupied[current], tokens[current]
            handles, sessions = handles[current], sessions[current]
        slots.write_tokens(step.decode_step, occupied, tokens)
        if len(occupied):
            self.publisher.tokens(rows.session, sessions, handles, tokens)
            for slot in occupied.tolist() if logprobs else ():
                if slot in logprobs:
                    self.publisher.score(worker.batch.running[slot], logprobs[slot])
            self._check_ends(worker, occupied, tokens)
        return len(occupied)

    def _check_ends(self, worker: WorkerState, rows: Slots, tokens: Tokens) -> None:
        slots = worker.batch.slots
        ended = set()
        for eos in worker.eos_token_ids:
            stopped = tokens == eos
            if stopped.any():
                ended |= set(rows[stopped & slots.stops_at_eos[rows]].tolist())
        if slots.extra_stops:
            by_slot = dict(zip(rows.tolist(), tokens.tolist(), strict=True))
            ended |= {slot for slot, stops in slots.extra_stops.items() if by_slot.get(slot) in stops}
        for slot in sorted(ended):
            self.life.end(worker.batch.running[slot], FINISH_REASON_STOP)
        for slot in sorted(worker.batch.finishing - ended):
            if slots.has_all_tokens(slot):
                self.life.end(worker.batch.running[slot], FINISH_REASON_LENGTH)

    def _drafts(self, worker: WorkerState, step: StepInFlight, result: StepResult, failed: Failures) -> int:
        """The draft rows. Tokens after one that ends the request are dropped, as if they had never been sampled."""
        batch, sampled = worker.batch, iter(unpacked(result.draft_token_ids))
        new: list[tuple[int, int, int]] = []  # session, handle, token
        for row, count in zip(step.drafts, unpacked(result.draft_num_tokens), strict=True):
            tokens = list(islice(sampled, count))
            if batch.slots.generation[row.slot] != row.generation:
                continue
            request = batch.running[row.slot]
            if row.slot in failed:
                self._fail(request, failed[row.slot])
                continue
            stop = next((i for i, token in enumerate(tokens) if self._stops(worker, row.slot, request, token)), None)
            if stop is not None:
                del tokens[stop + 1 :]
            self.drafting.verified(worker, row, count, len(tokens))
            self.life.holdings.flush_output(worker, row.slot)
            request.add_output(packed(tokens))
            new += [(int(batch.slots.session[row.slot]), request.handle, token) for token in tokens]
            if stop is not None:
                self.life.end(request, FINISH_REASON_STOP)
            elif request.num_tokens >= request.max_total_tokens:
                self.life.end(request, FINISH_REASON_LENGTH)
        self._publish(new)
        return len(new)

    @staticmethod
    def _stops(worker: WorkerState, slot: int, request: Request, token: int) -> bool:
        """Whether the token ends the request."""
        ends_at_eos = token in worker.eos_token_ids and bool(worker.batch.slots.stops_at_eos[slot])
        return ends_at_eos or token in request.extra_stop_ids

    def _publish(self, new: list[tuple[int, int, int]]) -> None:
        """`new`: session, handle and token of each new token."""
        if new:
            sessions, handles, tokens = zip(*new, strict=True)
            session = sessions[0] if len({*sessions}) == 1 else -1
            self.publisher.tokens(session, np.array(sessions), np.array(handles), np.array(tokens, np.int32))

    def _prompt_scores(self, worker: WorkerState, step: StepInFlight, result: StepResult) -> None:
        scores = {item.slot: item.logprobs for item in result.prompt_logprobs} if result.prompt_logprobs else {}
        for chunk in step.chunks if scores else ():
            if chunk.slot in scores and worker.batch.slots.generation[chunk.slot] == chunk.generation:
                self.publisher.prompt_scores(worker.batch.running[chunk.slot], scores[chunk.slot])

    def _prefills(
        self,
        worker: WorkerState,
        step: StepInFlight,
        tokens: Tokens,
        failed: Failures,
        logprobs: Logprobs,
        now_s: float,
    ) -> int:
        """The prefill rows. A row that computes the last known token of its sequence also samples."""
        sampled = iter(tokens.tolist())
        new: list[tuple[int, int, int]] = []  # session, handle, token
        for chunk in step.chunks:
            token = next(sampled) if chunk.samples else None
            if worker.batch.slots.generation[chunk.slot] != chunk.generation:
                continue
            request = worker.batch.running[chunk.slot]
            if chunk.slot in failed:
                self._fail(request, failed[chunk.slot])
                continue
            if request.trace is not None:
                request.trace.ended(worker.id, step.step, now_s)
            if token is None:
                continue
            if request.root.history.first_token_s is None:
                request.root.history.first_token_s = now_s
            if request.family.group is not None:
                self.groups.report(request, logprobs.get(chunk.slot))
                continue
            new.append((int(worker.batch.slots.session[chunk.slot]), request.handle, token))
            self._first_token(worker, chunk.slot, request, token, logprobs)
        self._publish(new)
        return len(new)

    def _embeddings(
        self, worker: WorkerState, step: StepInFlight, result: StepResult, failed: Failures, now_s: float
    ) -> int:
        """The prefill rows of an embedding model. A row that computes the last token of its input ends the request."""
        vectors = {item.slot: item.values for item in result.embeddings}
        num_ended = 0
        for chunk in step.chunks:
            if worker.batch.slots.generation[chunk.slot] != chunk.generation:
                continue
            request = worker.batch.running[chunk.slot]
            if request.trace is not None and chunk.slot not in failed:
                request.trace.ended(worker.id, step.step, now_s)
            if chunk.slot in failed:
                self._fail(request, failed[chunk.slot])
            elif chunk.samples:
                if chunk.slot not in vectors:
                    raise ProtocolError(f"step {step.step}: no embedding for slot {chunk.slot}")
                request.history.first_token_s = now_s
                self.publisher.embedding(request, vectors[chunk.slot])
                self.life.end(request, FINISH_REASON_STOP)
                num_ended += 1
        return num_ended

    def _first_token(self, worker: WorkerState, slot: int, request: Request, token: int, logprobs: Logprobs) -> None:
        request.add_output(token.to_bytes(TOKEN_BYTES, "little", signed=True))
        request.held.prompt_is_computed = True
        if request.needs_whole_prompt:  # the scores are reported, and are not asked for again
            request.needs_whole_prompt = request.sampling.prompt_logprobs = False
        if slot in logprobs:
            self.publisher.score(request, logprobs[slot])
        if self._stops(worker, slot, request, token):
            self.life.end(request, FINISH_REASON_STOP)
        elif request.num_tokens >= request.max_total_tokens:
            self.life.end(request, FINISH_REASON_LENGTH)

    def _fail(self, request: Request, error: RowError) -> None:
        if error.code:  # the request asks for something impossible; its KV is valid
            self.life.fail(request, error.message, error.code)
        else:
            self.life.invalidate_kv(request, error.message)


def _check_drafts(step: StepInFlight, result: StepResult) -> None:
    """Raises ProtocolError if the result does not have the right number of tokens for each draft row."""
    counts, failed = unpacked(result.draft_num_tokens), {error.slot for error in result.errors}
    fits = (
        len(counts) == len(step.drafts)
        and sum(counts) * TOKEN_BYTES == len(result.draft_token_ids)
        and all(
            (0 if row.slot in failed else 1) <= count <= 1 + len(row.draft_tokens)
            for row, count in zip(step.drafts, counts, strict=True)
        )
    )
    if not fits:
        sizes = [len(row.draft_tokens) for row in step.drafts]
        raise ProtocolError(f"step {step.step}: {counts} tokens of draft rows with {sizes} draft tokens")
