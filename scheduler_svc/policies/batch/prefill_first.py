"""Prefill or decode, never both; prefill whenever anything can be prefilled (SGLang, vLLM V0).

Unfinished prompts go on first, then waiting ones come in. With chunks, the first prompt that does not fit the budget is
cut, and it is the only unfinished one. `prefill_decode_interval` makes a prefill wait until that many decode steps have
followed the one before (SGLang's answer to starved decodes; 0: never waits).

Once a waiting request was refused for want of room, nobody is offered a place until somebody has left (SGLang's
`batch_is_full`).
"""

from __future__ import annotations

from scheduler_svc.core.policy import BatchPolicy, Verdict
from scheduler_svc.core.step import Step
from scheduler_svc.policies.options import Count, Positive


class PrefillFirst(BatchPolicy):
    def __init__(
        self,
        chunked_prefill: bool = True,
        max_prefill_tokens: Positive = 16384,
        prefill_decode_interval: Count = 0,
    ) -> None:
        self.chunked_prefill = chunked_prefill
        self.max_prefill_tokens = max_prefill_tokens
        self.interval = prefill_decode_interval
        # By worker: decode steps since the last prefill; how many had left when a request was refused.
        self._decodes_since: dict[int, int] = {}
        self._full_at: dict[int, int] = {}

    def compose(self, step: Step) -> None:
        if not (step.num_decoding and self._decodes_since.get(step.worker_id, self.interval) < self.interval):
            self._prefill(step)
        if step.budget_tokens == step.max_batched_tokens:
            step.run_decodes()

    def _prefill(self, step: Step) -> None:
        budget = min(self.max_prefill_tokens, step.budget_tokens)
        unfinished = False
        for sequence in step.prefills:
            if budget > 0:
                tokens = min(sequence.remaining_tokens, budget)
                step.run(sequence, tokens)
                unfinished |= tokens < sequence.remaining_tokens
                budget -= self._charge(step, tokens)
        full = step.num_running and self._full_at.get(step.worker_id) == step.num_departed
        if unfinished or step.preempted or full:
            return
        for request in step.waiting():
            tokens = step.uncached_tokens(request)
            if budget <= 0 or (tokens > budget and not self.chunked_prefill and step.num_admissions):
                step.hold_back(request, Verdict.STOP, "budget", f"{tokens} tokens, {max(budget, 0)} are left")
                break
            cut = tokens > budget and self.chunked_prefill
            if cut:
                tokens = budget // step.block_size * step.block_size or budget
            if not 0 < tokens <= step.budget_tokens:
                step.hold_back(request, Verdict.STOP, "budget", f"{tokens} tokens, {step.budget_tokens} are left")
                break
            verdict = step.admit(request, tokens)
            if verdict is Verdict.ADMIT:
                budget -= self._charge(step, tokens)
            if verdict is Verdict.STOP:
                self._full_at[step.worker_id] = step.num_departed
            if verdict is Verdict.STOP or (cut and verdict is Verdict.ADMIT):
                break

    @staticmethod
    def _charge(step: Step, tokens: int) -> int:
        return step.blocks_for(tokens) * step.block_size

    def planned(self, step: Step) -> None:
        since = self._decodes_since.get(step.worker_id, self.interval)
        self._decodes_since[step.worker_id] = 0 if step.runs_prefills else since + 1
