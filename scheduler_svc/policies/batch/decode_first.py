"""Running sequences first, then waiting requests, until the token budget is spent (vLLM V1, after Sarathi-Serve).

Every sequence has tokens to compute: one token if it decodes, else a chunk of its prompt. Running sequences get theirs
in order of admission. Waiting requests get what the budget leaves, unless a sequence was preempted in this step.
"""

from __future__ import annotations

from itertools import islice

from scheduler_svc.policies.api import BatchPolicy, Step, Verdict
from scheduler_svc.policies.batch.rules import may_cut, reject_after_preemption
from scheduler_svc.policies.options import Count


class DecodeFirst(BatchPolicy):
    """vLLM V1's scheduler: running sequences first, then waiting requests, by one token budget."""

    def __init__(
        self, chunked_prefill: bool = True, long_prefill_token_threshold: Count = 0, share_in_step: bool = True
    ) -> None:
        """No chunk is longer than the threshold (0: no limit), unless there is no other request. Without chunks a
        prompt runs whole or waits (rules.py). `share_in_step`: equal prefixes that are admitted together are computed
        once."""
        self.shares_in_step = share_in_step
        self.chunked_prefill = chunked_prefill
        self.threshold = long_prefill_token_threshold
        self._longest_chunk = 0  # of the current step; 0: no limit

    def schedule(self, step: Step) -> None:
        """Run every running sequence, then admit waiting requests until the budget is spent."""
        # If there is only one request, no other waits for the budget, and chunks need no limit.
        is_alone = self.threshold and step.num_running + len(list(islice(step.waiting(), 2))) <= 1
        self._longest_chunk = 0 if is_alone else self.threshold
        self._run(step)
        if step.preempted:
            reject_after_preemption(step)
            return
        for request in step.waiting():
            left = step.budget_tokens
            if not left:
                step.reject(request, Verdict.STOP, "budget", f"{step.max_batched_tokens} tokens are spent")
                break
            tokens = self._limit(step.uncached_tokens(request))
            if tokens > left and not may_cut(step, tokens, self.chunked_prefill):
                step.reject(request, Verdict.STOP, "budget", f"{tokens} tokens, {left} are left")
                break
            if step.admit(request, min(tokens, left)) is Verdict.STOP:
                break

    def _run(self, step: Step) -> None:
        prefills = step.prefills
        wanted = step.num_decoding + sum(self._limit(sequence.remaining_tokens) for sequence in prefills)
        if wanted <= step.budget_tokens:  # everything fits, in any order
            step.run_decodes()
            for sequence in prefills:
                step.run(sequence, self._limit(sequence.remaining_tokens))
            return
        for sequence in step.running:
            if tokens := min(self._limit(sequence.remaining_tokens), step.budget_tokens):
                step.run(sequence, tokens)

    def _limit(self, tokens: int) -> int:
        return min(tokens, self._longest_chunk) if self._longest_chunk else tokens
