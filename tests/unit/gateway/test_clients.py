"""How connections are counted by client, and how a client that has disconnected is noticed."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys

import pytest

from services.gateway.http.clients import ConnectionCounts, has_gone
from services.runtime.clients import client_of


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells at once that a client has gone")
@pytest.mark.parametrize("reset", [False, True])
async def test_a_socket_tells_that_the_other_side_has_gone(reset: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
        assert not has_gone(ours)
        client.sendall(b"unread")
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        async with asyncio.timeout(20):
            while not has_gone(ours):  # noqa: ASYNC110 - the kernel's state
                await asyncio.sleep(0.002)
        ours.close()
        assert has_gone(ours)


def test_a_client_is_an_ipv4_address_or_an_ipv6_network() -> None:
    names = [
        client_of(host)
        for host in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8:1:2:3::4", "2001:db8:1:2:f::", "fe80::1%eth0")
    ]
    assert names == ["10.0.0.1", "10.0.0.1", "2001:db8:1:2::/64", "2001:db8:1:2::/64", "fe80::/64"]


def test_the_client_with_the_most_connections_is_found() -> None:
    clients = ConnectionCounts(3)
    assert clients.largest(but="a") is None
    for name in "aabbb":
        assert clients.enter(name)
    assert not clients.enter("b")
    assert [clients.largest(but=name) for name in "abc"] == ["b", None, "b"]
    clients.leave("b")
    assert clients.largest(but="a") is None
    assert clients.enter("b")
