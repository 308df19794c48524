"""The parts of a request that change while it is served: what it holds, and its history."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import partial

from paceline.v1.inference_pb2 import RequestTiming
from scheduler_svc.core.requests.output_buffer import OutputBuffer


@dataclass(slots=True, eq=False)
class Held:
    """`sequence` is the cache's name for the current attempt. A request that computes its tokens again gets a new one,
    so that late blocks of an earlier attempt are not taken for blocks of this one. A request that is swapped out, or
    that the cache had no room for, keeps its name. 0: the cache does not know the request."""

    sequence: int = 0
    num_registered: int = 0  # tokens of that sequence that the cache knows
    num_committed: int = 0  # of these, tokens that the cache knows as computed by steps already sent
    worker: int = 0  # while ALLOCATING, RUNNING or PARKED
    slot: int = -1  # while RUNNING
    unflushed: tuple[OutputBuffer, int] | None = None  # while RUNNING: the buffer, and the slot in it
    prompt_is_computed: bool = False  # True once the scheduler knows that this attempt has computed it
    # While RUNNING or PARKED. A new cache gets it. While RUNNING, the slot ledger may have noted more blocks.
    block_table: array[int] = field(default_factory=partial(array, "i"))
    swapped_on: int = 0  # the worker with its KV in host memory, while WAITING or ALLOCATING
    host_blocks: bytes = b""  # on that worker, once the cache has answered; packed int32


@dataclass(slots=True)
class History:
    """Times are on the scheduler's clock."""

    has_run: bool = False
    started_s: float | None = None  # time of the first admission; for a beam, of its search
    first_token_s: float | None = None  # for a beam search, the end of its first step
    cached_tokens: int | None = None  # reused at the first admission; the client sees it
    num_cached_host_tokens: int = 0  # the part of cached_tokens that was in host memory
    num_preemptions: int = 0
    num_losses: int = 0  # how often a lost worker or cache took its blocks

    def timing(self, arrival_s: float, now_s: float) -> RequestTiming:
        """The times of the request's phases, if it ends now."""
        started_s = now_s if self.started_s is None else self.started_s
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        return RequestTiming(
            queue_s=started_s - arrival_s,
            prefill_s=first_token_s - started_s,
            decode_s=now_s - first_token_s,
            num_preemptions=self.num_preemptions,
            num_cached_host_tokens=self.num_cached_host_tokens,
            num_losses=self.num_losses,
        )
