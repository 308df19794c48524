"""How long a step of a worker takes."""

from __future__ import annotations

from typing import NamedTuple


class StepTime(NamedTuple):
    """A step takes base_s + token_s * new_tokens + context_s * context_tokens + row_s * rows. Seconds; all are >= 0."""

    base_s: float
    token_s: float  # for each prompt token that the step computes
    context_s: float  # for each token that its rows attend to
    row_s: float  # for each sequence in it

    def of(self, new_tokens: float, context_tokens: float, rows: float) -> float:
        """Seconds of a step with so many prompt tokens, tokens that its rows attend to, and rows."""
        return self.base_s + self.token_s * new_tokens + self.context_s * context_tokens + self.row_s * rows


# Before any worker has returned a result. Only the ratios count, and only for the first few steps.
UNKNOWN = StepTime(base_s=5e-3, token_s=5e-5, context_s=1e-8, row_s=5e-5)
