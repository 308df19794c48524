"""What policies see of requests and of a step, read-only: a guest that writes to it gets an AttributeError."""

from __future__ import annotations

from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.state import Worker


class RequestView:
    """A request, wherever it is. Two views of the same request are equal; nothing of it can be changed through one."""

    __slots__ = ("__weakref__", "_request")  # who remembers one beyond its end does not keep its tokens
    _request: Request

    def __init__(self, request: Request) -> None:
        object.__setattr__(self, "_request", request)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a policy reads requests and changes nothing")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name}: a policy reads requests and changes nothing")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RequestView) and other._request is self._request

    def __hash__(self) -> int:
        return self._request.seniority

    def __repr__(self) -> str:
        return f"<request {self._request.request_id!r}, {self.num_prompt_tokens}+{self.num_output_tokens} tokens>"

    @property
    def seniority(self) -> int:
        """Names the request, and orders requests by arrival."""
        return self._request.seniority

    @property
    def place(self) -> int:
        """Where it stands among equals: its seniority, unless a preemption policy put it elsewhere."""
        return self._request.place

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def tenant(self) -> str:
        return self._request.tenant

    @property
    def client_request(self) -> int:
        """Names the client's request: the same for all its samples, and for all beams of its search."""
        return self._request.siblings.first

    @property
    def is_beam(self) -> bool:
        """It is a beam of a search: it runs for one token, and the search goes on when all beams have."""
        return self._request.is_member

    @property
    def num_running_siblings(self) -> int:
        """Sequences of the client's request that run or are about to, on any worker; this one too, if it does."""
        return self._request.siblings.num_bound

    @property
    def lora(self) -> str:
        return self._request.lora

    @property
    def namespace(self) -> tuple[str, str]:
        """Adapter and salt: only requests of one namespace can share what is cached, however equal their tokens."""
        return self._request.namespace

    @property
    def priority(self) -> float:
        """Larger is more urgent."""
        return self._request.priority

    @property
    def arrival_s(self) -> float:
        return self._request.arrival_s

    @property
    def deadline_s(self) -> float:
        """On the clock of `arrival_s`; inf if there is none."""
        return self._request.deadline_s

    @property
    def started_s(self) -> float | None:
        """When it first ran."""
        return self._request.started_s

    @property
    def has_run(self) -> bool:
        """It was let in before, and waits again or runs."""
        return self._request.has_run

    @property
    def num_preemptions(self) -> int:
        return self._request.num_preemptions

    @property
    def is_swapped(self) -> bool:
        """It was preempted and has its KV in a worker's host memory: to go on there it computes one token."""
        return self._request.swapped_on > 0

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Those that have arrived. `Running.num_output_tokens` also counts those in flight."""
        return self._request.num_generated_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        request = self._request
        if request.seat is None:  # then its own record is complete
            return request.num_tokens
        return request.num_prompt_tokens + request.num_generated_tokens

    @property
    def max_new_tokens(self) -> int:
        return self._request.max_new_tokens

    @property
    def ignores_eos(self) -> bool:
        """It generates `max_new_tokens` tokens, unless a stop token of its own comes first."""
        return self._request.sampling.ignore_eos

    @property
    def max_total_tokens(self) -> int:
        return self._request.max_total_tokens

    @property
    def token_ids(self) -> bytes:
        """Prompt and output, packed little-endian int32."""
        return self._request.token_ids

    @property
    def best_matched_tokens(self) -> int:
        """The most that any worker has of it in its cache, swapped out, or in a sequence that it is forked from."""
        return self._request.best_matched_tokens

    def matched_tokens(self, worker_id: int) -> int:
        """Tokens of it that the worker has in its cache."""
        return self._request.matched_tokens(worker_id)

    def live_tokens(self, worker_id: int) -> int:
        """Of these, tokens in blocks that others use: reusing them takes nothing from the pool."""
        return self._request.live_tokens(worker_id)


def view_of(request: Request) -> RequestView:
    """The one view of the request: a policy may compare views by identity, too."""
    view = request.view
    if view is None:
        view = request.view = RequestView(request)
    return view


class Running:
    """A sequence that holds a slot of the step's worker, as policies see it. Steps in flight count as done."""

    __slots__ = ("_request", "_slot", "_worker")

    def __init__(self, worker: Worker, slot: int, request: Request) -> None:
        self._worker = worker
        self._slot = slot
        self._request = request

    @property
    def slot(self) -> int:
        return self._slot

    @property
    def request(self) -> RequestView:
        return view_of(self._request)

    @property
    def is_decoding(self) -> bool:
        return self._slot not in self._worker.prefills

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self._worker.num_tokens(self._slot)

    @property
    def num_computed_tokens(self) -> int:
        prefill = self._worker.prefills.get(self._slot)
        return prefill.num_planned if prefill else self.num_tokens - 1

    @property
    def remaining_tokens(self) -> int:
        """To be computed before it samples again: 1 when it decodes."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self._request.num_prompt_tokens

    @property
    def num_blocks(self) -> int:
        return int(self._worker.slots.capacity[self._slot]) // self._worker.block_size
