"""Decodes first, prefill in chunks with what the token budget leaves (Sarathi-Serve; vLLM V1)."""

from __future__ import annotations

from collections.abc import Sequence


class DecodeFirst:
    """Every decoding sequence gets its token in every step; prefills share the rest, first come first served."""

    def prefill_budget(self, budget_tokens: int, num_decodes: int) -> int:
        return max(0, budget_tokens - num_decodes)

    def chunks(self, remaining: Sequence[int], budget_tokens: int) -> list[int]:
        sizes = []
        for tokens in remaining:
            size = min(tokens, budget_tokens)
            budget_tokens -= size
            sizes.append(size)
        return sizes
