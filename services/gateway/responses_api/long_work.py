"""Work on a whole response, in a thread if it is long: the event loop serves other requests meanwhile.

Most of it is Python code, which gives up the GIL every 5 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from services.gateway.responses_api.pieces import OutputPiece

T = TypeVar("T")
# The work on a response below these limits takes at most 3 ms.
_SHORT_BYTES, _SHORT_PIECES = 64 * 1024, 512


async def with_bytes(num_bytes: int, work: Callable[[], T]) -> T:
    """The result of the work on a record of so many bytes."""
    return work() if num_bytes <= _SHORT_BYTES else await asyncio.to_thread(work)


async def with_pieces(pieces: Sequence[OutputPiece], work: Callable[[], T]) -> T:
    """The result of the work on these pieces. They must not change meanwhile."""
    return work() if len(pieces) <= _SHORT_PIECES else await asyncio.to_thread(work)
