"""Every test kills the processes that it has started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import stack as stack_module
from tests.support.fork_server import quickest_start
from tests.support.stack import Stack

stack_module.start_process = quickest_start()


@pytest.fixture
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("chaos"))
    try:
        yield stack
    finally:
        stack.down()
