"""TLS handshakes of HTTP connections, on both event loops: limits, clients without a handshake, new certificates."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from services.gateway.http import handshake
from services.gateway.http.server import HttpServer
from tests.contract.gateway.conftest import until
from tests.support.certificates import authority_of, issue, make_certificates, serial_of, server_tls, stranger, trusting

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE = 30_000_000
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return asyncio.run if request.param == "asyncio" else uvloop.run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "set")


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Says the scheme; /large answers with LARGE bytes."""
    body = b"x" * LARGE if scope["path"] == "/large" else scope["scheme"].encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(tls: handshake.ServerTls, **limits: Any) -> Any:
    server = HttpServer(app, "127.0.0.1", 0, tls=tls, **limits)
    port = await server.start()
    try:
        yield server, port
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("host", "has_tls", "warns"), [("0.0.0.0", False, 1), ("127.0.0.1", False, 0), ("0.0.0.0", True, 0)]
)
def test_http_without_tls_that_others_can_reach_is_announced(
    run: Run, folder: Path, host: str, has_tls: bool, warns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = []

    async def body() -> None:
        server = HttpServer(app, host, 0, tls=server_tls(folder) if has_tls else None)
        ports.append(await server.start())
        await server.stop()

    run(body())
    lines = [line for line in capsys.readouterr().out.splitlines() if "not encrypted" in line]
    assert len(lines) == warns
    assert all(f"{host}:{ports[0]}" in line and "http" in line for line in lines)


async def ask(port: int, context: ssl.SSLContext, data: bytes = GET) -> bytes:
    """The answer to one request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(data)
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            return head + await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    finally:
        writer.close()


def dial(port: int, source: str = "127.0.0.1") -> socket.socket:
    """A client that says nothing."""
    client = socket.create_connection(("127.0.0.1", port), source_address=(source, 0))
    client.settimeout(10)
    return client


def dial_tls(port: int, ca: Path) -> ssl.SSLSocket:
    return trusting(ca).wrap_socket(dial(port), server_hostname="127.0.0.1")


def read_all(client: socket.socket) -> bytes:
    with client:
        try:
            return b"".join(iter(lambda: client.recv(4096), b""))
        except ConnectionResetError:
            return b"reset"


async def in_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(work)


def test_many_clients_are_served_at_once(run: Run, folder: Path) -> None:
    async def body() -> None:
        async with serving(server_tls(folder)) as (server, port):
            context = trusting(folder / "ca.pem")
            answers = await asyncio.gather(*(ask(port, context) for _ in range(100)))
            assert all(answer.endswith(b"https") for answer in answers)
            await until(lambda: not server.connections.open)

    run(body())


def test_connections_count_before_their_handshake(run: Run, folder: Path) -> None:
    async def body() -> None:
        async with serving(server_tls(folder), max_per_client=2) as (server, port):
            silent = [dial(port), dial(port)]
            await until(lambda: len(server.connections.open) == 2)
            assert await in_thread(lambda: read_all(dial(port))) in (b"", b"reset")
            silent.pop().close()
            await until(lambda: len(server.connections.open) == 1)
            assert (await ask(port, trusting(folder / "ca.pem"))).startswith(b"HTTP/1.1 200 ")
            silent.pop().close()

    run(body())


def test_a_connection_without_a_handshake_makes_room_for_another_client(run: Run, folder: Path) -> None:
    async def body() -> None:
        async with serving(server_tls(folder), max_connections=3, max_per_client=3) as (server, port):
            silent = [dial(port, "127.0.0.2") for _ in range(3)]
            await until(lambda: len(server.connections.open) == 3)
            assert (await ask(port, trusting(folder / "ca.pem"))).startswith(b"HTTP/1.1 200 ")
            await until(lambda: len(server.connections.open) == 2)
            for client in silent:
                client.close()
            await until(lambda: not server.connections.open)

    run(body())


def test_a_handshake_has_a_time_limit(run: Run, folder: Path) -> None:
    async def body() -> None:
        async with serving(server_tls(folder, handshake_timeout_s=0.2)) as (server, port):
            assert await in_thread(lambda: read_all(dial(port))) in (b"", b"reset")
            await until(lambda: not server.connections.open)

    run(body())


@pytest.mark.parametrize(
    ("said", "answer"), [(GET, b"HTTP/1.1 400 "), (b"\x00garbage" * 9, b""), (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"")]
)
def test_an_http_client_without_tls_gets_400(run: Run, folder: Path, said: bytes, answer: bytes) -> None:
    async def body() -> None:
        async with serving(server_tls(folder)) as (server, port):
            files = 0
            for _ in range(handshake._MAX_TOLD + 1):
                client = dial(port)
                client.sendall(said)
                got = await asyncio.to_thread(read_all, client)
                assert got.startswith(answer)
                if answer:
                    error = json.loads(got.partition(b"\r\n\r\n")[2])["error"]
                    assert error.pop("message") == "this port speaks HTTPS only"
                    assert error == {"type": "BadRequestError", "param": None, "code": 400, "reason": "needs_tls"}
                await until(lambda: not server.connections.open)
                files = files or len(os.listdir("/proc/self/fd"))
            assert len(os.listdir("/proc/self/fd")) <= files

    run(body())


def test_renewed_certificates_are_shown_to_new_connections(run: Run, folder: Path) -> None:
    async def body() -> None:
        ca = folder / "ca.pem"
        async with serving(server_tls(folder)) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(ca))
            serials = [await in_thread(lambda: serial_of(port, ca))]
            issue(authority_of(folder), folder / "gateway")
            serials.append(await in_thread(lambda: serial_of(port, ca)))
            (folder / "gateway" / "key.pem").write_text("half a")
            serials.append(await in_thread(lambda: serial_of(port, ca)))
            assert serials[0] != serials[1] == serials[2]
            writer.write(GET)  # the connection from before
            assert (await asyncio.wait_for(reader.readline(), 10)) == b"HTTP/1.1 200 OK\r\n"
            writer.close()

    run(body())


def test_a_client_must_show_a_certificate_where_the_gateway_demands_one(run: Run, folder: Path, tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(server_tls(folder, clients=folder / "ca.pem")) as (server, port):
            for shown, is_served in ((folder / "cli", True), (None, False), (stranger(tmp_path / "x", folder), False)):
                context = trusting(folder / "ca.pem")
                if shown is not None:
                    context.load_cert_chain(shown / "cert.pem", shown / "key.pem")
                if is_served:
                    assert (await ask(port, context)).endswith(b"https")
                else:
                    with pytest.raises((OSError, EOFError)):
                        await ask(port, context)
            await until(lambda: not server.connections.open)

    run(body())


def test_a_client_that_does_not_read_is_cut_off(run: Run, folder: Path) -> None:
    async def body() -> None:
        async with serving(server_tls(folder), send_timeout_s=0.4) as (server, port):
            watching = asyncio.create_task(server.watch())
            client = await in_thread(
                lambda: trusting(folder / "ca.pem").wrap_socket(dial(port), server_hostname="127.0.0.1")
            )
            with client:
                await in_thread(lambda: client.sendall(GET.replace(b"/ ", b"/large ")))
                await until(lambda: server.has_unsent)
                await until(lambda: not server.connections.open)
            watching.cancel()

    run(body())


def test_the_rest_of_an_answer_counts_as_unsent_until_the_client_has_it(run: Run, folder: Path) -> None:
    """asyncio hides up to 64 KiB of encrypted bytes; a drain must not cut them off."""

    async def body() -> None:
        async with serving(server_tls(folder)) as (server, port):
            client = await in_thread(
                lambda: trusting(folder / "ca.pem").wrap_socket(dial(port), server_hostname="127.0.0.1")
            )
            with client:
                await in_thread(lambda: client.sendall(GET.replace(b"/ ", b"/large ")))
                [connection] = server.connections.open
                await until(lambda: server.has_unsent)
                num_bytes = 0
                while num_bytes < LARGE:
                    num_bytes += len(await in_thread(lambda: client.recv(1 << 20)))
                    if connection.transport.get_write_buffer_size() == 0 and num_bytes < LARGE - (8 << 20):
                        assert server.has_unsent
                await until(lambda: not server.has_unsent)

    run(body())


def test_too_many_open_files_pause_the_listener(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_EXHAUSTED_PAUSE_S", 0.1)

    class Exhausted:
        """A listening socket, where accept() fails once."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock, self.failures = sock, 1

        def accept(self) -> tuple[socket.socket, Any]:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self._sock.accept()

        def fileno(self) -> int:
            return self._sock.fileno()

    async def body() -> None:
        async with serving(server_tls(folder)) as (server, port):
            exhausted = Exhausted(server._sock)
            server._listener._sock = exhausted
            assert (await ask(port, trusting(folder / "ca.pem"))).endswith(b"https")
            assert not exhausted.failures

    run(body())
