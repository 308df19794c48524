"""Reserve a share of the tokens that may still be generated, and adapt the share (SGLang's `new_token_ratio`).

A request is admitted if its prompt, the tokens that it may generate (at most `clip_max_new_tokens` of them) and a block
fit the room that is left. That room is what remains after every decoding sequence is promised `ratio` of the tokens
that it may still generate, and every sequence in prefill all of them. The ratio falls a little with every decode step,
so admission gets bolder, down to `min_ratio_factor` of the initial ratio. A preemption shows that admission was too
bold. The new ratio is then (output tokens of the remaining sequences + `retract_decode_steps` for each of them) /
(tokens that they may generate in all). When nothing runs or waits, the ratio is the initial one again.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.policies.api import CapacityPolicy, RequestView, Step, Verdict
from scheduler_svc.policies.options import Count, Positive, PositiveShare


class TokenRatio(CapacityPolicy):
    """Reserves for each running sequence a share of the tokens that it may still generate; one share per worker."""

    def __init__(
        self,
        init_new_token_ratio: PositiveShare = 0.7,
        min_ratio_factor: PositiveShare = 0.14,
        ratio_decay_steps: Positive = 600,
        retract_decode_steps: Count = 20,
        clip_max_new_tokens: Positive = 4096,
    ) -> None:
        self.initial = init_new_token_ratio
        self.lowest = init_new_token_ratio * min_ratio_factor
        self.decay = (self.initial - self.lowest) / ratio_decay_steps
        self.retract_decode_steps = retract_decode_steps
        self.clip = clip_max_new_tokens
        self._ratios: dict[int, float] = {}  # by worker
        self._left_tokens = 0.0

    def ratio(self, step: Step) -> float:
        """The worker's current share."""
        return self._ratios.get(step.worker_id, self.initial)

    def begin(self, step: Step) -> None:
        """Compute the tokens that are left when every running sequence has got its share."""
        left = float(step.available_blocks * step.block_size)
        decoding = np.minimum(step.remaining_new_tokens(), self.clip).sum()
        for sequence in step.prefills:
            # Until the sequence decodes, its whole allowance is promised, as if it were admitted now with the rest of
            # its prompt.
            decoding -= min(sequence.request.max_total_tokens - sequence.num_tokens, self.clip)
            left -= (step.blocks_for(sequence.remaining_tokens) + 1) * step.block_size
            left -= min(self._allowed_tokens(step, sequence.request), self.clip)
        self._left_tokens = left - float(decoding) * self.ratio(step)

    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        """Take the request's prompt, its allowance and one block from the tokens left, or stop."""
        tokens = step.uncached_tokens(request)
        allowed = self._allowed_tokens(step, request)
        new_tokens = min(allowed - (request.num_tokens - request.num_prompt_tokens), self.clip)
        own_blocks = step.blocks_for(request.num_tokens) - step.cached_tokens(request) // step.block_size
        whole_need = step.need_blocks(request, tokens)
        # Its cached blocks that no sequence references are taken, too.
        left = self._left_tokens - (whole_need - own_blocks) * step.block_size
        if tokens + new_tokens + step.block_size >= left:
            return Verdict.STOP
        self._left_tokens = left - (own_blocks + 1) * step.block_size - min(allowed, self.clip)
        return Verdict.ADMIT

    def is_spent(self, step: Step) -> bool:
        """Whether no tokens are left."""
        return self._left_tokens <= 0

    def _allowed_tokens(self, step: Step, request: RequestView) -> int:
        """Tokens that it may generate, limited to what fits if it runs alone: so every request can start."""
        fitting = (step.total_blocks - 1) * step.block_size - request.num_prompt_tokens - 1
        return min(request.max_new_tokens, fitting)

    def planned(self, step: Step) -> None:
        """Lower the share after a decode step, compute a new one after a preemption, and return to the initial one when
        nothing runs or waits."""
        if step.preempted and step.running:
            out = sum(sequence.num_output_tokens for sequence in step.running)
            allowed = sum(sequence.request.max_new_tokens for sequence in step.running)
            ahead = self.retract_decode_steps * len(step.running)
            self._ratios[step.worker_id] = min(1.0, (out + ahead) / (allowed + 1))
        elif step.is_empty and not step.num_running and next(step.waiting(), None) is None:
            self._ratios.pop(step.worker_id, None)
        elif step.runs_decodes:
            self._ratios[step.worker_id] = max(self.lowest, self.ratio(step) - self.decay)
