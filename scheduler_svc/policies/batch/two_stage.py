"""TensorRT-LLM's second stage, the micro-batch: of those that may hold resources, who runs now.

Every decode costs a token of the budget. Without chunks a prompt runs whole, and the first that does not fit ends the
search. With chunks, decodes are charged first and the rest is shared out: first come, first served, or in equal
progress, unit by unit. `batch_wait_iters` and `batch_wait_max_tokens_ratio` hold prefills back while decodes run,
until enough of them have gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_svc.core.policy import BatchPolicy, Verdict
from scheduler_svc.core.step import Step
from scheduler_svc.core.view import RequestView, Running
from scheduler_svc.policies.options import Amount, Count


def first_come(remaining: list[int], unit: int, capacity: int, longest: int) -> list[int]:
    """Tokens for each in turn; a chunk that is cut short is a multiple of the unit."""
    sizes = []
    for tokens in remaining:
        size = min(tokens, capacity, longest)
        if size < tokens:
            size -= size % unit
        capacity -= size
        sizes.append(size)
    return sizes


def equal_progress(remaining: list[int], unit: int, capacity: int, longest: int) -> list[int]:
    """A unit for each, round by round, while the budget lasts."""
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
    """A prompt, or what is left of one, that could run."""

    item: Running | RequestView
    tokens: int


class TwoStage(BatchPolicy):
    shares_in_step = False  # as the originals: what is shared has been computed

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
        self._waited: dict[int, int] = {}  # by worker: steps for which prefills have been held back
        self._next_waited = 0

    def compose(self, step: Step) -> None:
        decodes, contexts = self._candidates(step)
        sizes = self._sizes(step, contexts, step.budget_tokens - len(decodes))
        if self._holds_back(step, len(decodes), sum(sizes)):
            sizes = [0] * len(contexts)
        if len(decodes) == step.num_decoding:
            step.run_decodes()
        else:
            for sequence in decodes:
                step.run(sequence, 1)
        for context, size in zip(contexts, sizes, strict=True):
            if not size:
                continue
            if isinstance(context.item, Running):
                step.run(context.item, size)
            else:
                step.place(context.item, size)

    def _candidates(self, step: Step) -> tuple[list[Running], list[Context]]:
        """Who fits the resources, and as many decodes and whole prompts as fit the budget."""
        decodes: list[Running] = []
        contexts: list[Context] = []
        budget = step.budget_tokens
        for sequence in step.running:
            cost = 1 if sequence.is_decoding else 0 if self.chunked_prefill else sequence.remaining_tokens
            if cost > budget:
                return decodes, contexts
            budget -= cost
            if sequence.is_decoding:
                decodes.append(sequence)
            else:
                contexts.append(Context(sequence, sequence.remaining_tokens))
        for request in step.waiting():
            tokens = step.uncached_tokens(request)
            if tokens > budget and not self.chunked_prefill:
                step.hold_back(request, Verdict.STOP, "budget", f"{tokens} tokens, {budget} are left")
                break
            match step.consider(request, tokens):
                case Verdict.STOP:
                    break
                case Verdict.ADMIT:
                    contexts.append(Context(request, tokens))
                    budget -= 0 if self.chunked_prefill else tokens
        return decodes, contexts

    def _sizes(self, step: Step, contexts: list[Context], capacity: int) -> list[int]:
        tokens = [context.tokens for context in contexts]
        longest = self.longest or step.max_batched_tokens
        if not self.chunked_prefill or (sum(tokens) <= capacity and max(tokens, default=0) <= longest):
            return tokens
        sizes = self.share_out(tokens, self.unit or step.block_size, capacity, longest)
        if not any(sizes) and capacity == step.max_batched_tokens:
            sizes[0] = min(tokens[0], capacity, longest)  # not even a unit fits, and nothing else runs: never would
        return sizes

    def _holds_back(self, step: Step, num_decodes: int, context_tokens: int) -> bool:
        waited = self._waited.get(step.worker_id, 0)
        self._next_waited = 0
        if not (num_decodes and context_tokens):
            self._next_waited = waited
            return False
        few = context_tokens + num_decodes < self.wait_ratio * step.max_batched_tokens
        if waited < self.wait_iters and few:
            self._next_waited = waited + 1
            return True
        return False

    def planned(self, step: Step) -> None:
        self._waited[step.worker_id] = self._next_waited
