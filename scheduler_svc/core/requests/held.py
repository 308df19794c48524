"""What a request holds: its worker and slot, its blocks, its sequence at the cache."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import partial

from scheduler_svc.core.requests.output_buffer import OutputBuffer


@dataclass(slots=True, eq=False)
class Held:
    """`sequence` is the cache's name for the current attempt. It is new each time the request enters the queue, so that
    an attempt never meets late blocks of an earlier one. 0: the cache does not know the request."""

    sequence: int = 0
    num_registered: int = 0  # tokens of that sequence that the cache knows
    num_committed: int = 0  # of these, tokens that the cache was told are computed by steps already sent
    worker: int = 0  # while ALLOCATING, RUNNING or PARKED
    slot: int = -1  # while RUNNING
    unflushed: tuple[OutputBuffer, int] | None = None  # while RUNNING: the buffer, and the slot in it
    prompt_is_computed: bool = False  # whether it is known that the current attempt has computed it
    # While RUNNING or PARKED. A new cache gets it. While RUNNING, the slot ledger may have noted more blocks.
    block_table: array[int] = field(default_factory=partial(array, "i"))
    swapped_on: int = 0  # the worker with its KV in host memory, while WAITING or ALLOCATING
    host_blocks: bytes = b""  # on that worker, once the cache has answered; packed int32
