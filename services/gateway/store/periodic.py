"""Periods of the gateways' work on the stores (leases, deletion), and the loop that repeats such work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from services.gateway.errors import ApiError
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# A gateway renews its leases every TICK_S. A lease outlives several missed renewals.
LEASE_S, TICK_S, PURGE_S = 10.0, 1.0, 60.0


async def repeat(work: Callable[[], Awaitable[None]], every_s: float) -> NoReturn:
    """Do the work every `every_s` until cancelled. A failure is logged."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await work()
        except ApiError as error:
            _log.warning("the periodic work on the store failed and is tried again later", error=error.message)
        except Exception as error:  # a record that cannot be read must not end the gateway
            _log.error("the periodic work on the store failed", exc_info=error)
