"""Finds the leader among several schedulers by gRPC's health service (Watch), on real servers on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from services.runtime.leaders import find_leader
from services.runtime.rpc import GrpcServer, open_channel, transport_options
from tests.support.ports import free_port
from tests.unit.runtime import peers
from tests.unit.runtime.peers import NAME
from tests.unit.runtime.test_rpc import NOT_SERVING, SERVING, health


@pytest.fixture
async def standby() -> AsyncIterator[tuple[GrpcServer, str]]:
    server, _, port = await peers.start()
    server.set_serving(True, standby=True)
    yield server, f"127.0.0.1:{port}"
    await server.stop(0)


def look(*targets: str) -> asyncio.Task[str]:
    return asyncio.create_task(find_leader(",".join(targets), NAME, transport_options()))


async def test_a_single_target_is_not_asked() -> None:
    assert await look("nowhere.invalid:1") == "nowhere.invalid:1"


async def test_a_standby_is_healthy_but_serves_no_request(standby: tuple[GrpcServer, str]) -> None:
    async with open_channel(standby[1]) as channel:
        assert [await health(channel), await health(channel, NAME)] == [SERVING, NOT_SERVING]


async def test_the_leader_is_found_beside_dead_and_frozen_schedulers(standby: tuple[GrpcServer, str]) -> None:
    dead = f"127.0.0.1:{free_port()}"
    server, _, port = await peers.start()
    with socket.socket() as frozen:  # the kernel accepts connections, and no process answers
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()
        silent = f"127.0.0.1:{frozen.getsockname()[1]}"
        assert await look(dead, silent, standby[1], f"127.0.0.1:{port}") == f"127.0.0.1:{port}"
    await server.stop(0)


async def test_a_scheduler_elected_during_the_search_is_found(standby: tuple[GrpcServer, str]) -> None:
    looking = look(f"127.0.0.1:{free_port()}", standby[1])
    await asyncio.wait([looking], timeout=0.3)
    assert not looking.done()
    standby[0].set_serving(True)
    assert await asyncio.wait_for(looking, 10) == standby[1]


async def test_a_scheduler_started_during_the_search_is_found(standby: tuple[GrpcServer, str]) -> None:
    port = free_port()
    looking = look(f"127.0.0.1:{port}", standby[1])
    await asyncio.wait([looking], timeout=0.3)
    server = GrpcServer("127.0.0.1", port)
    server.add(NAME, peers.Echo().register)
    await server.start()
    server.set_serving(True)
    assert await asyncio.wait_for(looking, 10) == f"127.0.0.1:{port}"
    await server.stop(0)
