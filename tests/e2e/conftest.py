"""One running stack with the demo model for all tests that do no harm to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stack import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("stack"))
    running.gateway_flags = ["--max-body-bytes", str(10 * 2**20)]  # test_bad_http.py asks what much larger fields get
    try:
        yield running.up()
    finally:
        running.down()


@pytest.fixture
def own_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that is not started, for a test that kills services or needs its own flags."""
    stack = Stack(tmp_path_factory.mktemp("own"))
    try:
        yield stack
    finally:
        stack.down()
