"""Certificates of a folder: which files belong to a service, what is wrong with them, and when they are read again."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import ssl
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from services.gateway.settings import GatewaySettings
from services.runtime.rpc import GrpcServer, open_channel
from services.runtime.settings import load_settings
from services.runtime.tls import credentials as tls_credentials
from services.runtime.tls.credentials import (
    Renewed,
    client_context,
    pinned_context,
    pinned_credentials,
    server_context,
    until_connected,
)
from services.runtime.tls.exposed import is_loopback
from services.runtime.tls.files import TlsError, TlsFiles, TlsPaths, name_of, read
from tests.support.certificates import DAY, authority_of, issue, make_certificates, stranger
from tests.unit.runtime.test_rpc import SERVING, health


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "set")


@pytest.fixture
def paths(folder: Path) -> TlsPaths:
    return TlsPaths.of(folder, "cache")


def test_the_files_of_a_service_come_before_the_common_ones(tmp_path: Path) -> None:
    assert TlsPaths.of(tmp_path, "cache") == TlsPaths(
        tmp_path / "cert.pem", tmp_path / "key.pem", (tmp_path / "ca.pem",)
    )
    own = tmp_path / "cache"
    own.mkdir()
    (own / "cert.pem").touch()
    assert TlsPaths.of(tmp_path, "cache") == TlsPaths(own / "cert.pem", own / "key.pem", (tmp_path / "ca.pem",))
    assert TlsPaths.of(tmp_path, "worker").cert == tmp_path / "cert.pem"
    (own / "ca.pem").touch()
    assert TlsPaths.of(tmp_path, "cache").cas == (own / "ca.pem",)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("cert.pem", None, "No such file or directory"),
        ("cert.pem", b"hello", "no certificate in PEM"),
        ("ca.pem", b"", "no certificate in PEM"),
        ("key.pem", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "no private key in PEM"),
        ("key.pem", None, "No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(paths: TlsPaths, file: str, content: bytes | None, message: str) -> None:
    broken = paths.cert.parent / file
    if content is None:
        broken.unlink()
    else:
        broken.write_bytes(content)
    with pytest.raises(TlsError, match=message) as error:
        TlsFiles(paths)
    assert str(error.value).startswith(f"{broken}: ")
    assert "\n" not in str(error.value)


def test_a_key_with_a_password_is_refused(paths: TlsPaths) -> None:
    key = load_pem_private_key(paths.key.read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    paths.key.write_bytes(locked)
    with pytest.raises(TlsError, match="without a password"):
        read(paths)


def test_a_certificate_is_read_only_while_it_is_valid(paths: TlsPaths) -> None:
    now = dt.datetime.now(dt.UTC)
    assert read(paths, now).expires > now + 29 * DAY
    for other in (now - DAY, now + 31 * DAY):
        with pytest.raises(TlsError, match=r"cert\.pem: is valid from .* to .* UTC, and now it is "):
            read(paths, other)


def test_files_that_have_not_changed_are_not_read_again(paths: TlsPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    files = TlsFiles(paths)
    monkeypatch.setattr("services.runtime.tls.files.read", lambda *_: pytest.fail("read again"))
    assert files.current() is files.current()


def test_a_renewal_in_two_steps_keeps_the_earlier_pair_in_between(
    folder: Path, paths: TlsPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    files = TlsFiles(paths)
    first = files.current()
    new = authority_of(folder).issue("cache", ["cache"], DAY)
    paths.key.write_bytes(new.key)
    for _ in range(3):
        assert files.current() is first
    assert capsys.readouterr().out.count("is not the key of") == 1
    paths.cert.write_bytes(new.cert)
    assert files.current().cert == new.cert
    assert files.current().key == new.key


def test_a_renewal_through_a_symbolic_link_is_noticed(folder: Path, tmp_path: Path) -> None:
    """Kubernetes renews the files of a secret like this: it points the link of their folder to another folder."""
    link = tmp_path / "..data"
    link.symlink_to(folder / "cache")
    files = TlsFiles(TlsPaths.of(link, "cache"))
    first = files.current()
    other = issue(authority_of(folder), tmp_path / "next")
    (tmp_path / "next-link").symlink_to(other)
    os.replace(tmp_path / "next-link", link)
    assert files.current().cert == (other / "cert.pem").read_bytes() != first.cert


def test_a_certificate_that_expires_soon_is_a_warning(
    folder: Path, paths: TlsPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    read(paths)
    assert "expires soon" not in capsys.readouterr().out
    issue(authority_of(folder), paths.cert.parent, lifetime=13 * DAY)
    read(paths)
    assert "a certificate expires soon" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        *[(host, True) for host in ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "::1%lo", "localhost")],
        *[(host, True) for host in ("::ffff:127.0.0.1", "Localhost", "ip6-localhost", "ip6-loopback")],
        *[(host, False) for host in ("0.0.0.0", "::", "10.0.0.3", "::ffff:10.0.0.3", "cache", "")],
    ],
)
def test_addresses_that_other_machines_reach(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside


def test_the_name_of_a_certificate(folder: Path) -> None:
    authority = authority_of(folder)
    assert name_of(authority.issue("x", ["a.example", "10.0.0.1"], DAY).cert) == "a.example"
    assert name_of(authority.issue("x", ["10.0.0.1"], DAY).cert) == "10.0.0.1"
    assert name_of(authority.issue("x", ["*.example"], DAY).cert) == "any.example"
    for bad in (b"", authority.pair.cert):
        with pytest.raises(TlsError, match="no certificate with a subject alternative name"):
            name_of(bad)


def test_contexts_ask_for_certificates_only_with_cas(paths: TlsPaths) -> None:
    strict, open_to_all = TlsFiles(paths), TlsFiles(TlsPaths(paths.cert, paths.key, ()))
    assert server_context(strict).verify_mode is ssl.CERT_REQUIRED
    assert server_context(open_to_all).verify_mode is ssl.CERT_NONE
    assert client_context(strict).verify_mode is ssl.CERT_REQUIRED
    assert client_context(strict).check_hostname
    assert pinned_context(paths.cert.read_bytes(), strict).verify_mode is ssl.CERT_REQUIRED


async def test_a_grpc_server_shows_renewed_certificates_and_asks_for_one_of_its_ca(
    folder: Path, paths: TlsPaths, tmp_path: Path
) -> None:
    server = GrpcServer("127.0.0.1", 0, tls=TlsFiles(paths))
    target = f"127.0.0.1:{await server.start()}"
    server.set_serving(True)
    client = TlsFiles(TlsPaths.of(folder, "cli"))
    try:
        for _ in range(2):
            pinned, options = pinned_credentials(paths.cert.read_bytes(), client)
            async with open_channel(target, [*options], credentials=pinned) as channel:
                assert await health(channel) == SERVING
            issue(authority_of(folder), paths.cert.parent, hosts=["elsewhere.example"])
        other = TlsFiles(TlsPaths.of(stranger(tmp_path / "x", folder), "cli"))
        async with open_channel(target, tls=other) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health(channel)
    finally:
        await server.stop(0)


async def test_a_channel_that_cannot_connect_is_given_up_after_a_renewal(
    folder: Path, paths: TlsPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_credentials, "RENEWAL_CHECK_S", 0.05)
    files = TlsFiles(paths)
    async with open_channel("127.0.0.1:1", tls=files) as channel:
        waiting = asyncio.create_task(until_connected(channel, files, files.current()))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        issue(authority_of(folder), paths.cert.parent)
        with pytest.raises(Renewed):
            await asyncio.wait_for(waiting, 10)


def test_one_variable_names_the_certificates_of_every_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_TLS_DIR", str(tmp_path))
    assert load_settings(GatewaySettings, []).tls_dir == tmp_path
    assert load_settings(GatewaySettings, ["--tls-dir", "/elsewhere"]).tls_dir == Path("/elsewhere")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--http-cert", "a.pem"], "--http-cert and --http-key belong together"),
        (["--http-key", "a.pem"], "--http-cert and --http-key belong together"),
        (["--tls-client-ca", "a.pem"], "--tls-client-ca needs --tls-dir, or --http-cert and --http-key"),
        (["--no-http-tls", "--tls-dir", "d", "--tls-client-ca", "a.pem"], "--no-http-tls contradicts"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_settings(GatewaySettings, flags)
    assert message in capsys.readouterr().err


def test_which_certificates_clients_see(tmp_path: Path) -> None:
    def public(*flags: str) -> TlsPaths | None:
        return load_settings(GatewaySettings, flags).public_tls

    inside, given = ("--tls-dir", "/d"), ("--http-cert", "/c.pem", "--http-key", "/k.pem")
    assert public() is None
    assert public(*inside) == TlsPaths(Path("/d/cert.pem"), Path("/d/key.pem"), ())
    assert public(*given) == public(*inside, *given) == TlsPaths(Path("/c.pem"), Path("/k.pem"), ())
    assert public(*inside, "--no-http-tls") is None
    asking = public(*inside, *given, "--tls-client-ca", "/clients.pem")
    assert asking is not None
    assert asking.cas == (Path("/clients.pem"), Path("/d/ca.pem"))
