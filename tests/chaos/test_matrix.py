"""The cells of the kill matrix that the other tests here cover least: zombies and silence.

`make chaos` plays all cells.
"""

from __future__ import annotations

import asyncio

from tests.chaos.matrix import Outcome, new_stack, play_all, up
from tests.chaos.moments import Cell
from tests.support.stack import Stack

CELLS = [
    Cell("worker", "SIGSTOP", "swapped"),
    Cell("scheduler", "silent", "seeded"),
    Cell("gateway", "SIGSTOP", "streaming"),
]


async def test_streams_equal_those_of_an_undisturbed_run(stack: Stack) -> None:
    outcomes: list[Outcome] = []
    stack = new_stack(stack.folder)
    try:
        await asyncio.to_thread(up, stack)
        await play_all(stack, CELLS, outcomes.append)
    finally:
        stack.down()
    assert not [outcome for outcome in outcomes if outcome.problems]
    assert [outcome.cell for outcome in outcomes] == CELLS
