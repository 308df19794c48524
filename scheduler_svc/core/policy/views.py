"""A policy's read-only view of a running sequence."""

from __future__ import annotations

from scheduler_svc.core.requests.request import Request, RequestView, view_of
from scheduler_svc.core.workers.state import WorkerState


class Paused(Exception):
    """A policy asks to preempt running sequences, and then to schedule the step again."""

    def __init__(self, victims: list[Running]) -> None:
        super().__init__(f"{len(victims)} sequences are to be preempted")
        self.victims = victims


class Running:
    """A policy's view of a sequence that holds a slot of the step's worker. Steps in flight count as done."""

    __slots__ = ("_request", "_slot", "_worker")

    def __init__(self, worker: WorkerState, slot: int, request: Request) -> None:
        self._worker = worker
        self._slot = slot
        self._request = request

    @property
    def slot(self) -> int:
        """Index in the worker's batch, 0 to `max_num_seqs` - 1."""
        return self._slot

    @property
    def request(self) -> RequestView:
        """The request to which the sequence belongs."""
        return view_of(self._request)

    @property
    def is_decoding(self) -> bool:
        """Whether its prefill has ended: from then on each step computes one token."""
        return self._slot not in self._worker.batch.prefills

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self._worker.batch.num_tokens(self._slot)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that are computed, or will be by the steps in flight."""
        prefill = self._worker.batch.prefills.get(self._slot)
        return prefill.num_planned if prefill else self.num_tokens - 1

    @property
    def remaining_tokens(self) -> int:
        """Tokens to compute before it samples again: 1 when it decodes."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens, after the steps in flight."""
        return self.num_tokens - self._request.num_prompt_tokens

    @property
    def num_blocks(self) -> int:
        """Device blocks that it holds. Some may be shared with other sequences."""
        return int(self._worker.batch.slots.capacity[self._slot]) // self._worker.block_size
