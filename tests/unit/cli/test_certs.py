"""`paceline certs`: what it makes, what it leaves alone, and what it refuses."""

from __future__ import annotations

import datetime as dt
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.verification import PolicyBuilder, Store

from services.cli.certs.authority import Authority, Pair
from services.cli.certs.folder import SERVICES, CannotMake, make_set
from services.cli.main import main
from services.runtime.tls.files import TlsFiles, TlsPaths

DAY = dt.timedelta(days=1)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_key_of_the_ca_may_lie_elsewhere(tmp_path: Path) -> None:
    folder, key = tmp_path / "set", tmp_path / "private" / "key.pem"
    make_set(folder, ca_key=key, lifetime=DAY)
    assert not list(folder.rglob("ca-key.pem"))
    assert make_set(folder, ca_key=key, lifetime=DAY, renew=True) == [*SERVICES]
    with pytest.raises(CannotMake, match=r"ca-key\.pem"):
        make_set(folder, lifetime=DAY, renew=True)


def test_each_service_gets_a_certificate_that_can_be_used(tmp_path: Path) -> None:
    assert make_set(tmp_path / "set", lifetime=DAY) == ["CA", *SERVICES]
    for service in SERVICES:
        TlsFiles(TlsPaths.of(tmp_path / "set", service))
    assert (tmp_path / "set" / "worker" / "ca.pem").read_bytes() == (tmp_path / "set" / "ca.pem").read_bytes()


@pytest.mark.parametrize("name", ["scheduler", "scheduler-2", "localhost", "extra.example"])
def test_a_certificate_is_of_the_ca_and_for_the_names_under_which_others_dial(tmp_path: Path, name: str) -> None:
    make_set(tmp_path, hosts=["extra.example"], lifetime=DAY)
    ca = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    cert = x509.load_pem_x509_certificate((tmp_path / "scheduler" / "cert.pem").read_bytes())
    policy = PolicyBuilder().store(Store([ca]))
    assert policy.build_server_verifier(x509.DNSName(name)).verify(cert, [])
    assert policy.build_client_verifier().verify(cert, []).subjects


def test_only_the_owner_may_read_the_files(tmp_path: Path) -> None:
    make_set(tmp_path / "set", lifetime=DAY)
    for path in (tmp_path / "set").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_nothing_is_overwritten_unless_asked_for(tmp_path: Path) -> None:
    make_set(tmp_path, lifetime=DAY)
    first = contents(tmp_path)
    assert make_set(tmp_path, lifetime=DAY) == []
    assert contents(tmp_path) == first
    (tmp_path / "worker" / "cert.pem").unlink()
    (tmp_path / "worker" / "key.pem").unlink()
    assert make_set(tmp_path, lifetime=DAY) == ["worker"]
    changed = {name for name, content in contents(tmp_path).items() if first[name] != content}
    assert changed == {"worker/cert.pem", "worker/key.pem"}


def test_a_renewal_keeps_the_ca_and_force_makes_a_new_one(tmp_path: Path) -> None:
    make_set(tmp_path, lifetime=DAY)
    first = contents(tmp_path)
    assert make_set(tmp_path, lifetime=DAY, renew=True) == [*SERVICES]
    second = contents(tmp_path)
    same = {name for name in first if first[name] == second[name]}
    assert same == {name for name in first if name.endswith(("ca.pem", "ca-key.pem"))}
    make_set(tmp_path, lifetime=DAY, force=True)
    assert not {*second.values()} & {*contents(tmp_path).values()}


def test_a_certificate_ends_with_its_ca_at_the_latest() -> None:
    now = dt.datetime.now(dt.UTC)
    authority = Authority.make("short", DAY, now)
    cert = x509.load_pem_x509_certificate(authority.issue("x", ["x"], 30 * DAY, now).cert)
    assert cert.not_valid_after_utc == authority.expires


@pytest.mark.parametrize(
    ("left", "message"),
    [
        (["worker/cert.pem"], "has certificates for worker, but not their CA; --force makes a new CA"),
        (["ca.pem"], "ca-key.pem: No such file or directory; only the CA's key can sign certificates"),
    ],
)
def test_a_folder_without_its_ca_is_not_touched(tmp_path: Path, left: list[str], message: str) -> None:
    make_set(tmp_path, lifetime=DAY)
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        if str(path.relative_to(tmp_path)) not in left:
            path.unlink()
    before = contents(tmp_path)
    with pytest.raises(CannotMake, match=message):
        make_set(tmp_path, lifetime=DAY)
    assert contents(tmp_path) == before


def test_a_ca_with_an_encrypted_key_signs_nothing(tmp_path: Path) -> None:
    authority = Authority.make("ours", DAY, dt.datetime.now(dt.UTC))
    key = serialization.load_pem_private_key(authority.pair.key, None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    (tmp_path / "ca.pem").write_bytes(authority.pair.cert)
    (tmp_path / "ca-key.pem").write_bytes(encrypted)
    with pytest.raises(CannotMake, match="encrypted"):
        make_set(tmp_path, lifetime=DAY)


def test_a_ca_that_has_expired_signs_nothing(tmp_path: Path) -> None:
    authority = Authority.make("old", DAY, dt.datetime.now(dt.UTC) - 2 * DAY)
    (tmp_path / "ca.pem").write_bytes(authority.pair.cert)
    (tmp_path / "ca-key.pem").write_bytes(authority.pair.key)
    with pytest.raises(CannotMake, match="expired on"):
        make_set(tmp_path, lifetime=DAY)


def test_a_key_of_another_ca_is_refused() -> None:
    one, other = Authority.make("a", DAY), Authority.make("b", DAY)
    with pytest.raises(ValueError, match="the key is not the CA's"):
        Authority(Pair(one.pair.cert, other.pair.key))


def test_the_command_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my set"
    assert main(["certs", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"made in {folder}: CA, cache, scheduler, worker, gateway, etcd, cli\n")
    assert f"paceline up --tls-dir '{folder}'" in said
    assert f"curl --cacert '{folder}/ca.pem' https://127.0.0.1:8000/v1/models" in said
    assert main(["certs", str(folder)]) == 0
    assert f"{folder} is complete, and nothing was changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--days", "0"], "--days: 0 is not within 1..825"),
        (["--days", "826"], "--days: 826 is not within 1..825"),
        (["--host", "no host"], "--host: 'no host' is neither a DNS name nor an IP address"),
        (["--host", ""], "--host: '' is neither a DNS name nor an IP address"),
        (["--host", "-a"], "argument --host: expected one argument"),
    ],
)
def test_bad_flags_get_one_error_line(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["certs", str(tmp_path / "set"), *flags])
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said
    assert not (tmp_path / "set").exists()


def test_a_folder_that_cannot_be_written_gets_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    assert main(["certs", str(tmp_path / "file")]) == 2
    assert "file" in capsys.readouterr().err
