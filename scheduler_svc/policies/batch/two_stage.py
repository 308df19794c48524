"""TensorRT-LLM's second stage, the micro-batch: which of the requests that may hold resources run now.

Every decode costs a token of the budget, and is charged first. Without chunks a prompt runs whole (rules.py names the
exceptions), and the first prompt that does not fit ends the search. With chunks the rest of the budget is shared out:
first come, first served, or in equal progress, unit by unit. `batch_wait_iters` and `batch_wait_max_tokens_ratio` delay
prefills while decodes run, until enough prompt tokens have gathered, but for at most `batch_wait_iters` steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_svc.policies.api import BatchPolicy, RequestView, Running, Step, Verdict
from scheduler_svc.policies.batch.rules import may_cut
from scheduler_svc.policies.options import Amount, Count


def first_come(remaining: list[int], unit: int, capacity: int, longest: int) -> list[int]:
    """Tokens for each request in turn. A chunk that is cut is a multiple of the unit."""
    sizes = []
    for tokens in remaining:
        size = min(tokens, capacity, longest)
        if size < tokens:
            size -= size % unit
        capacity -= size
        sizes.append(size)
    return sizes


def equal_progress(remaining: list[int], unit: int, capacity: int, longest: int) -> list[int]:
    """A unit for each request, round by round, while the budget lasts."""
    sizes = [0] * len(remaining)
    progress = True
    while progress:
        progress = False
        for i, tokens in enumerate(remaining):
            more = min(unit, tokens - sizes[i])
            if more and more <= capacity and sizes[i] + more <= longest:
                sizes[i] += more
                capacity -= more
                progress = True
    return sizes


@dataclass(frozen=True, slots=True)
class Context:
    """A prompt, or the rest of one, that could run."""

    item: Running | RequestView
    tokens: int
    at_least: int  # tokens of the budget that it gets unless prefills are delayed; later prompts cannot have them


class TwoStage(BatchPolicy):
    """TensorRT-LLM's MicroBatchScheduler: decodes first, then prompts, whole or in chunks of a unit."""

    shares_in_step = False  # as in the originals: only computed tokens are shared

    def __init__(
        self,
        chunked_prefill: bool = False,
        chunking: Literal["first-come", "equal-progress"] = "first-come",
        chunk_unit_tokens: Count = 0,
        max_context_tokens: Count = 0,
        batch_wait_iters: Count = 0,
        batch_wait_max_tokens_ratio: Amount = 0.0,
    ) -> None:
        """`chunk_unit_tokens` 0: a block; `max_context_tokens` 0: no limit to a chunk but the budget."""
        self.chunked_prefill = chunked_prefill
        self.share_out = equal_progress if chunking == "equal-progress" else first_come
        self.unit = chunk_unit_tokens
        self.longest = max_context_tokens
        self.wait_iters = batch_wait_iters
        self.wait_ratio = batch_wait_max_tokens_ratio
        self._waited: dict[int, int] = {}  # by worker: steps for which prefills have been delayed
        self._next_waited = 0

    def schedule(self, step: Step) -> None:
        """Run all decodes, then share out the rest of the budget among prompts, or delay the prompts."""
        step.run_decodes()  # first, so that no waiting request is offered the blocks that decodes grow by
        contexts = self._contexts(step)
        sizes = self._sizes(step, contexts)
        reason, detail = "budget", "what is left is less than a chunk"
        if self._delays_prefills(step, sum(sizes)):
            reason = "batch-wait"
            detail = f"{sum(sizes)} tokens, for {self._next_waited} of {self.wait_iters} iterations"
            sizes = [0] * len(contexts)
        for context, size in zip(contexts, sizes, strict=True):
            if isinstance(context.item, Running):
                if size:
                    step.run(context.item, size)
            elif size:
                step.place(context.item, size)
            else:
                step.reject(context.item, Verdict.STOP, reason, detail)

    def _contexts(self, step: Step) -> list[Context]:
        """Prompts that fit the resources: unfinished ones, then waiting ones while the budget may have tokens."""
        contexts: list[Context] = []
        left = step.budget_tokens
        for sequence in step.prefills:
            contexts.append(self._context(step, sequence, sequence.remaining_tokens, left))
            left -= contexts[-1].at_least
        for request in step.waiting():
            tokens = step.uncached_tokens(request)
            if left <= 0 or (tokens > left and not may_cut(step, tokens, self.chunked_prefill)):
                step.reject(request, Verdict.STOP, "budget", f"{tokens} tokens, {left} are left")
                break
            context = self._context(step, request, tokens, left)
            match step.consider(request, context.tokens):
                case Verdict.STOP:
                    break
                case Verdict.ADMIT:
                    contexts.append(context)
                    left -= context.at_least
        return contexts

    def _context(self, step: Step, item: Running | RequestView, tokens: int, left: int) -> Context:
        if not self.chunked_prefill:
            return Context(item, tokens, min(tokens, left))
        unit, longest = self._limits(step)
        wanted = min(tokens, unit) if self.share_out is equal_progress else tokens
        [at_least] = self.share_out([wanted], unit, left, longest)
        return Context(item, tokens, at_least)

    def _sizes(self, step: Step, contexts: list[Context]) -> list[int]:
        tokens, capacity = [context.tokens for context in contexts], step.budget_tokens
        unit, longest = self._limits(step)
        if not self.chunked_prefill:
            return [context.at_least for context in contexts]
        if sum(tokens) <= capacity and max(tokens, default=0) <= longest:
            return tokens
        sizes = self.share_out(tokens, unit, capacity, longest)
        if not any(sizes) and capacity == step.max_batched_tokens:
            # not even a unit fits, though nothing else runs: without this the prompt would never run
            sizes[0] = min(tokens[0], capacity, longest)
        return sizes

    def _limits(self, step: Step) -> tuple[int, int]:
        """The unit of a chunk, and the longest one."""
        return self.unit or step.block_size, self.longest or step.max_batched_tokens

    def _delays_prefills(self, step: Step, context_tokens: int) -> bool:
        waited = self._waited.get(step.worker_id, 0)
        if not (step.num_decoding and context_tokens):
            self._next_waited = waited
            return False
        few = context_tokens + step.num_decoding < self.wait_ratio * step.max_batched_tokens
        delays = waited < self.wait_iters and few
        self._next_waited = waited + 1 if delays else 0
        return delays

    def planned(self, step: Step) -> None:
        """Note for how many steps the worker's prompts have been delayed."""
        self._waited[step.worker_id] = self._next_waited
