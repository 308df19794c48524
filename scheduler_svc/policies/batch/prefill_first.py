"""Prefill or decode, never both; prefill whenever there is anything to prefill (SGLang, vLLM V0).

Unfinished prompts continue first, then waiting requests are admitted. With chunks, the first prompt that does not fit
the budget is cut, and it is the only unfinished one. `prefill_decode_interval` delays a prefill until that many decode
steps have followed the previous one (SGLang's answer to starved decodes; 0: no delay).

Swapped-out requests resume beside the decodes. Until all of them have resumed, no other request is admitted (vLLM V0),
unless nothing runs in the step and none of them can resume.

Two rules are SGLang's alone, and can be switched off. `closes_when_full`: if there was no room for another
request while others decode, no request is offered a slot until a sequence has left (SGLang's `batch_is_full`); vLLM V0
tries again in every step. `charges_blocks`: the budgets are charged in whole blocks; vLLM V0 counts tokens.
"""

from __future__ import annotations

import itertools
import math

from scheduler_svc.policies.api import BatchPolicy, Step, Verdict
from scheduler_svc.policies.batch.rules import may_cut, reject_after_preemption
from scheduler_svc.policies.options import Count


class Left:
    """What is left of a step's budgets for prompts. They are charged in whole units: blocks, or tokens.

    With chunks, a prompt may begin while both budgets have tokens left, and gets at most `chunk_tokens` tokens. Without
    chunks, every prompt but the first must be smaller than `prefill_tokens`, and each must fit the step's budget. A
    prompt that fits no step is cut.
    """

    def __init__(self, step: Step, prefill_tokens: float, unit: int) -> None:
        self.chunk_tokens = step.budget_tokens
        self.prefill_tokens = prefill_tokens
        self._unit = unit

    def __str__(self) -> str:
        return str(max(0, min(self.chunk_tokens, self.prefill_tokens)))

    @property
    def is_spent(self) -> bool:
        """Whether no prompt may begin any more."""
        return min(self.chunk_tokens, self.prefill_tokens) <= 0

    def in_units(self, tokens: int) -> int:
        """The tokens, rounded up to whole units."""
        return -(-tokens // self._unit) * self._unit

    def largest_cut(self) -> int:
        """Tokens of the longest chunk that fits, rounded down to whole units if at least one unit fits."""
        return self.chunk_tokens // self._unit * self._unit or self.chunk_tokens

    def spend(self, tokens: int) -> None:
        """Charge both budgets for these tokens."""
        self.chunk_tokens -= self.in_units(tokens)
        self.prefill_tokens -= self.in_units(tokens)


class PrefillFirst(BatchPolicy):
    """SGLang's and vLLM V0's scheduler: a step runs either prompts or decodes."""

    shares_in_step = False  # as in the originals: only computed tokens are shared

    def __init__(
        self,
        chunked_prefill: bool = True,
        max_prefill_tokens: Count = 16384,
        prefill_decode_interval: Count = 0,
        charges_blocks: bool = True,
        closes_when_full: bool = True,
    ) -> None:
        """`max_prefill_tokens` 0: no limit but the step's budget."""
        self.chunked_prefill = chunked_prefill
        self.max_prefill_tokens = max_prefill_tokens or math.inf
        self.interval = prefill_decode_interval
        self.charges_blocks = charges_blocks
        self.closes_when_full = closes_when_full
        # By worker: decode steps since the last prefill; num_departed when a request was rejected.
        self._decodes_since: dict[int, int] = {}
        self._full_at: dict[int, int] = {}
        self._closes = False  # the current step's rejection closes the batch, once the step is accepted

    def schedule(self, step: Step) -> None:
        """Run prompts if there are any and the interval is over; otherwise run all decodes."""
        self._closes = False
        since = self._decodes_since.get(step.worker_id, self.interval)
        if not (step.num_decoding and since < self.interval):
            self._prefill(step)
        elif not step.num_swapped:
            step.reject_all("interval", f"{since} of {self.interval} decode steps since the last prompts")
        if step.budget_tokens == step.max_batched_tokens:
            step.run_decodes()
            if step.num_swapped:
                self._resume_swapped(step)
                if step.is_empty:  # the capacity policy prefers other requests: admit those
                    self._admit_waiting(step, self._left(step))

    def _left(self, step: Step) -> Left:
        return Left(step, self.max_prefill_tokens, step.block_size if self.charges_blocks else 1)

    def _resume_swapped(self, step: Step) -> None:
        for request in itertools.islice(step.waiting(), step.num_swapped):
            tokens = step.uncached_tokens(request)
            if tokens > step.budget_tokens:
                step.reject(request, Verdict.STOP, "budget", f"{tokens} tokens, {step.budget_tokens} are left")
                return
            if step.admit(request, tokens) is Verdict.STOP:
                return
        if not step.is_empty:
            step.reject_all("swapped", "swapped-out requests resume first")

    def _prefill(self, step: Step) -> None:
        left = self._left(step)
        unfinished = False
        for sequence in step.prefills:
            if left.chunk_tokens > 0:
                tokens = min(sequence.remaining_tokens, left.chunk_tokens)
                step.run(sequence, tokens)
                unfinished |= tokens < sequence.remaining_tokens
                left.spend(tokens)
        full = step.num_running and self._full_at.get(step.worker_id) == step.num_departed
        if unfinished:
            step.reject_all("prefill", "a prompt that is not finished goes first")
        elif step.preempted:
            reject_after_preemption(step)
        elif step.num_swapped and step.runs_prefills:
            step.reject_all("swapped", "swapped-out requests resume beside decodes, and this step runs prompts")
        elif full:
            step.reject_all("full", "there was no room for another request, and no sequence has left since")
        if unfinished or step.preempted or step.num_swapped or full:
            return
        if self._admit_waiting(step, left) and step.num_decoding and self.closes_when_full:
            self._closes = True

    def _admit_waiting(self, step: Step, left: Left) -> bool:
        """Offer slots to waiting requests until no more get one. Returns whether that is for want of room."""
        for request in step.waiting():
            if left.is_spent:
                step.reject(request, Verdict.STOP, "budget", "nothing of it is left")
                break
            tokens = step.uncached_tokens(request)
            cut = left.in_units(tokens) > left.chunk_tokens and may_cut(step, tokens, self.chunked_prefill)
            if cut:
                tokens = min(tokens, left.largest_cut())
            # Without chunks, the first prompt may exceed `max_prefill_tokens`; otherwise it would never be admitted.
            within = self.chunked_prefill or not step.num_admissions or left.in_units(tokens) < left.prefill_tokens
            fits = tokens <= step.budget_tokens and within
            # With `closes_when_full`, this also looks for a free slot and free blocks for a request that exceeds the
            # budget, because a lack of them closes the batch.
            if fits or self.closes_when_full:
                verdict = step.consider(request, tokens)
                if verdict is Verdict.STOP:
                    return True
                if verdict is Verdict.SKIP:
                    continue
            if not fits:
                step.reject(request, Verdict.STOP, "budget", f"{left.in_units(tokens)} tokens, {left} are left")
                return False
            step.place(request, tokens)
            left.spend(tokens)
            if cut:
                return False
        return bool(step.num_admissions or step.rejected) and step.capacity_is_spent

    def planned(self, step: Step) -> None:
        """Note whether the batch is closed, and count the decode steps since the worker's last prompts."""
        if self._closes:
            self._full_at[step.worker_id] = step.num_departed
        since = self._decodes_since.get(step.worker_id, self.interval)
        self._decodes_since[step.worker_id] = 0 if step.runs_prefills else since + 1
