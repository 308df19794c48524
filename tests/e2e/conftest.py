"""One running stack with the demo model for all tests that do no harm to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import stack as stack_module
from tests.support.fork_server import quickest_start
from tests.support.redis_server import RedisProcess, needs_redis
from tests.support.stack import Stack

stack_module.start_process = quickest_start()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("stack"))
    # By default 1 MiB. test_bad_http.py sends fields of up to 9 MB, which the checks of single fields must refuse.
    running.gateway_flags = ["--max-body-bytes", str(10 * 2**20)]
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


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=needs_redis)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """What gateways share as --response-store: each kind of store in turn."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/store.db"
        return
    server = RedisProcess(tmp_path).start()
    try:
        yield server.url
    finally:
        server.stop()
