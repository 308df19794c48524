"""An event loop with a virtual clock. The clock stops while a task can run; otherwise it jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoFiles(selectors.SelectSelector):
    """A selector without events. Instead of waiting, it moves the clock forward by the timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "deadlock: no task can run, and there is no timer"
        self.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._files = _NoFiles()
        super().__init__(self._files)

    def time(self) -> float:
        return self._files.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
