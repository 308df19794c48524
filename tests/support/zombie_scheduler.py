"""`paceline`, with a planted fault: the scheduler continues as the leader after its lease has ended."""

from __future__ import annotations

import asyncio
import sys

from scheduler_svc.election import Election
from services.cli.main import main

keep_lease = Election.lead


async def lead(self: Election) -> str:
    await keep_lease(self)
    await asyncio.Event().wait()
    raise AssertionError("for ever")


if __name__ == "__main__":
    Election.holds = property(lambda self: True)  # type: ignore[assignment, method-assign]
    Election.lead = lead  # type: ignore[method-assign]
    sys.exit(main())
