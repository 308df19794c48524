"""What a step's result means: tokens to sessions, whole blocks to the cache, sequences that are over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason
from paceline.v1.worker_pb2 import StepResult, TokenLogprobs
from scheduler_svc.core.arrays import Longs, Slots, Tokens
from scheduler_svc.core.cache_link import CacheLink, ProtocolError
from scheduler_svc.core.request import Request
from scheduler_svc.core.worker import Chunk, StepInFlight, Worker

Logprobs = dict[int, TokenLogprobs]  # by slot


@dataclass(frozen=True, slots=True)
class ResultReader:
    cache: CacheLink
    publish: Callable[[int, Longs, Longs, Tokens], None]  # session of all or -1, sessions, handles, tokens
    finish: Callable[[Request, FinishReason.ValueType], None]
    fail: Callable[[Request, str], None]
    publish_score: Callable[[Request, float], None]
    report_beam: Callable[[Request, TokenLogprobs | None], None]

    def apply(self, worker: Worker, result: StepResult) -> int:
        """Take in the result of the oldest step in flight; returns how many tokens were new.

        Raises ProtocolError if it is not the result of that step.
        """
        step = self._matching_step(worker, result)
        tokens = np.frombuffer(result.token_ids, np.int32)
        failed = {error.slot: error.message for error in result.errors} if result.errors else {}
        logprobs = {item.slot: item for item in result.logprobs} if result.logprobs else {}
        accepted = self._decodes(worker, step, tokens[: len(step.rows)], failed, logprobs)
        sampled = iter(tokens[len(step.rows) :].tolist() if step.chunks else ())
        for chunk in step.chunks:
            accepted += self._chunk(worker, chunk, next(sampled) if chunk.samples else None, failed, logprobs)
        return accepted

    def _matching_step(self, worker: Worker, result: StepResult) -> StepInFlight:
        if not worker.in_flight:
            raise ProtocolError(f"result of step {result.step}, but no step is in flight")
        step = worker.in_flight.popleft()
        if result.step != step.step:
            raise ProtocolError(f"result of step {result.step}, expected {step.step}")
        if len(result.token_ids) != 4 * step.num_sampled:
            raise ProtocolError(f"step {step.step}: {len(result.token_ids)} bytes for {step.num_sampled} tokens")
        return step

    def _decodes(
        self, worker: Worker, step: StepInFlight, tokens: Tokens, failed: dict[int, str], logprobs: Logprobs
    ) -> int:
        slots, rows = worker.slots, step.rows
        if not len(rows):
            return 0
        if failed:
            self._fail_rows(worker, rows.slots[slots.generation[rows.slots] == rows.generations], failed)
        seated, handles, sessions = rows.slots, rows.handles, rows.sessions
        if slots.num_releases != step.num_releases:
            current = slots.generation[seated] == rows.generations
            seated, tokens, handles, sessions = seated[current], tokens[current], handles[current], sessions[current]
        slots.write_tokens(step.decode_step, seated, tokens)
        if len(seated):
            self.publish(rows.session, sessions, handles, tokens)
            for slot in seated.tolist() if logprobs else ():
                if slot in logprobs:
                    self.publish_score(worker.running[slot], logprobs[slot].logprob)
            self._check_ends(worker, seated, tokens)
        return len(seated)

    def _check_ends(self, worker: Worker, rows: Slots, tokens: Tokens) -> None:
        slots = worker.slots
        ended = set()
        for eos in worker.registration.model.eos_token_ids:
            stopped = tokens == eos
            if stopped.any():
                ended |= set(rows[stopped & slots.stops_at_eos[rows]].tolist())
        if slots.extra_stops:
            by_slot = dict(zip(rows.tolist(), tokens.tolist(), strict=True))
            ended |= {slot for slot, stops in slots.extra_stops.items() if by_slot.get(slot) in stops}
        for slot in sorted(ended):
            self.finish(worker.running[slot], FINISH_REASON_STOP)
        for slot in sorted(worker.finishing - ended):
            if slots.has_all_tokens(slot):
                self.finish(worker.running[slot], FINISH_REASON_LENGTH)

    def _chunk(
        self, worker: Worker, chunk: Chunk, token: int | None, failed: dict[int, str], logprobs: Logprobs
    ) -> int:
        """A prefill row: its whole blocks are in place; if it was the last one, the first token is here."""
        slots, slot = worker.slots, chunk.slot
        if slots.generation[slot] != chunk.generation:
            return 0
        request = worker.running[slot]
        if slot in failed:
            self.fail(request, failed[slot])
            return 0
        self.cache.add_commit(request.sequence, b"", chunk.num_computed)
        if token is None:
            return 0
        if request.group is not None:
            self.report_beam(request, logprobs.get(slot))
            return 0
        row, tokens = np.array([slot], np.intp), np.array([token], np.int32)
        request.output += tokens.tobytes()
        request.prompt_is_computed = True
        self.publish(int(slots.session[slot]), slots.session[row], slots.handle[row], tokens)
        if slot in logprobs:
            self.publish_score(request, logprobs[slot].logprob)
        self._check_ends(worker, row, tokens)
        return 1

    def _fail_rows(self, worker: Worker, rows: Slots, failed: dict[int, str]) -> None:
        for slot in rows.tolist():
            if slot in failed:
                self.fail(worker.running[slot], failed[slot])
