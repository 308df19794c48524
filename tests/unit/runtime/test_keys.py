"""API keys: entries of a key file, lookup, hot reload, keys of the environment, and where a server may listen."""

from __future__ import annotations

import errno
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_svc import server as cache_server
from paceline.v1 import admin_pb2, cache_pb2, inference_pb2, live_pb2, worker_pb2
from scheduler_svc import server as scheduler_server
from services.runtime.keys import source
from services.runtime.keys.admin_gate import AdminGate
from services.runtime.keys.entries import (
    MAX_FILE_BYTES,
    ApiKey,
    InvalidKeys,
    entry_text,
    hash_of,
    make_key,
    new_secret,
    parse_keys,
)
from services.runtime.keys.keyring import MAX_SECRET_CHARS, Keyring, NoCredential, shown_secret
from services.runtime.keys.listen import is_local_peer, safe_host
from services.runtime.keys.source import KeySource, are_configured, keys_from, open_keys
from services.runtime.service import CannotStart

SECRET = "pl-" + "a" * 43
DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED


def entry(name: str = "a", secret: str = SECRET, **fields: Any) -> str:
    return entry_text(make_key(name, sha256=hash_of(secret), **fields))


# ── entries ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_new_key_is_random_and_stored_as_its_hash() -> None:
    first, second = new_secret(), new_secret()
    assert first != second
    assert len(first) == len("pl-") + 43  # 32 bytes in base64
    assert first not in entry(secret=first)
    assert hash_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_an_entry_without_options_allows_little() -> None:
    (key,) = parse_keys(entry())
    assert (key.tenant, key.any_tenant, key.admin, key.metrics, key.max_priority) == ("a", False, False, False, 0.0)
    assert not key.has_quotas


@given(
    st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
    st.text(max_size=128),
    st.booleans(),
    st.floats(allow_nan=False),
    st.none() | st.integers(1, 2**53),
)
def test_an_entry_reads_back(name: str, tenant: str, may: bool, priority: float, quota: int | None) -> None:
    if any(0xD800 <= ord(c) <= 0xDFFF for c in tenant):  # TOML has no lone surrogates
        return
    key = make_key(name, sha256=hash_of(name), tenant=tenant, admin=may, max_priority=priority, max_requests=quota)
    assert parse_keys(entry_text(key)) == [key]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "the file is not TOML"),
        (entry() + "max_requests = " + "9" * 5000, "the file is not TOML"),
        ("[key.a]\nsha256 = ''", "key: unknown; a key is a table"),
        ("keys = 3", "one table"),
        ("keys.a = 3", "one table"),
        ("[keys.a]", "keys.a.sha256: field required"),
        ("[keys.a]\nsha256 = 'x'", "keys.a.sha256: string should match"),
        (entry() + "quota = 3", "keys.a.quota: unknown field"),
        (entry() + "name = 'b'", "keys.a.name: unknown"),
        (r'"a\nb" = 3', r"'a\\nb': unknown; a key is a table"),
        (r'[keys."a\nb"]' + "\nname = 'b'", r"keys.'a\\nb'.name: unknown"),
        (entry() + r'"a\nb" = 3', r"keys.a.'a\\nb': unknown field"),
        (entry() + "max_requests = 0", "keys.a.max_requests: input should be greater than or equal to 1"),
        (entry() + "max_requests = '3'", "keys.a.max_requests: input should be a valid integer"),
        (entry() + "max_priority = nan", "keys.a.max_priority: must be a number"),
        (entry().replace('"a"', f'"{"t" * 129}"'), "keys.a.tenant: string should have at most 128"),
        (entry().replace("keys.a", 'keys."a b"'), "a name has 1 to 64 letters"),
        (entry() + entry("b"), "keys.b.sha256: the same as of keys.a"),
        (entry() + entry(secret="other" * 9), "not TOML"),
        ("[keys.a]\nsha256 = " + "[" * 100_000, "nested|not TOML"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InvalidKeys, match=message) as refused:
        parse_keys(text)
    assert "\n" not in str(refused.value)


# ── lookup ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_the_whole_key_is_found() -> None:
    keys = Keyring(parse_keys(entry() + entry("b", "other" * 9)))
    found = keys.find(SECRET)
    assert found is not None
    assert found.name == "a"
    for wrong in ("", SECRET[:-1], SECRET + "a", SECRET.upper(), hash_of(SECRET), "x" * 10**6, "ü" * 46):
        assert keys.find(wrong) is None
    long = "k" * (MAX_SECRET_CHARS + 1)
    assert Keyring([make_key("long", sha256=hash_of(long))]).find(long) is None


@pytest.mark.parametrize(
    "fields",
    [
        [("authorization", f"Bearer {SECRET}")],
        [(b"authorization", f"bearer  {SECRET} ".encode())],
        [(b"x-api-key", SECRET.encode())],
        [("x-api-key", SECRET), ("authorization", f"Bearer {SECRET}")],
        [("authorization", "Basic dTpw"), ("x-api-key", SECRET)],  # a proxy's own credentials
        [("accept", "*/*"), ("x-api-key", SECRET)],
    ],
)
def test_a_key_is_read_from_either_header(fields: list[tuple[str | bytes, str | bytes]]) -> None:
    assert shown_secret(fields) == SECRET


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "an API key is needed"),
        ([("authorization", "Bearer ")], "must be: Bearer KEY"),
        ([("authorization", "Basic dTpw")], "must be: Bearer KEY"),
        ([("authorization", SECRET)], "must be: Bearer KEY"),
        ([("authorization", f"Bearer {SECRET}"), ("x-api-key", "b")], "different keys"),
        ([("x-api-key", "a"), ("x-api-key", "b")], "different keys"),
    ],
)
def test_the_error_says_how_to_send_a_key(fields: list[tuple[str | bytes, str | bytes]], message: str) -> None:
    with pytest.raises(NoCredential, match=message):
        shown_secret(fields)


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes the key file in one step, as editors do."""

    def write_file(text: str) -> Path:
        path, new = tmp_path / "keys.toml", tmp_path / "new"
        new.write_text(text, "utf-8")
        os.replace(new, path)
        return path

    return write_file


def names(keys: KeySource) -> set[str]:
    return {key.name for key in keys.current.keys}


def test_a_changed_file_is_in_force_after_two_looks(write: Callable[[str], Path]) -> None:
    keys = KeySource(write(entry()), [])
    write(entry() + entry("b", "other" * 9))
    keys.look()  # it may be half written
    assert names(keys) == {"a"}
    keys.look()
    assert names(keys) == {"a", "b"}
    write("")
    keys.look()
    keys.look()
    assert names(keys) == set()


@pytest.mark.parametrize("text", ["[keys", "[keys.a]\nsha256 = 'short'", "# " + "x" * MAX_FILE_BYTES])
def test_an_invalid_file_keeps_the_old_keys_and_is_logged_once(
    write: Callable[[str], Path], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(source._log, "error", lambda message, **fields: logged.append(f"{message}: {fields['error']}"))
    keys = KeySource(write(entry()), [])
    write(text)
    for _ in range(4):
        keys.look()
    assert names(keys) == {"a"}
    assert len(logged) == 1
    assert "the old keys stay in force" in logged[0]
    write(entry("c"))
    keys.look()
    keys.look()
    assert names(keys) == {"c"}


def test_a_removed_file_keeps_the_old_keys(write: Callable[[str], Path]) -> None:
    path = write(entry())
    keys = KeySource(path, [])
    path.unlink()
    keys.look()
    keys.look()
    assert names(keys) == {"a"}


def test_a_file_that_becomes_readable_is_read(write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A chmod changes neither the time of the last write nor the size."""
    path = write(entry())
    keys = KeySource(path, [])

    def denied(_: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(source, "_read_text", denied)
        write(entry("b"))
        for _ in range(3):
            keys.look()
    assert names(keys) == {"a"}
    path.chmod(0o644 if path.stat().st_mode & 0o777 != 0o644 else 0o600)
    keys.look()
    keys.look()
    assert names(keys) == {"b"}


def test_a_link_to_another_file_is_a_change(write: Callable[[str], Path], tmp_path: Path) -> None:
    """Kubernetes changes a mounted file in this way."""
    link = tmp_path / "link"
    link.symlink_to(write(entry()))
    keys = KeySource(link, [])
    (tmp_path / "second").write_text(entry("b"))
    (tmp_path / "link2").symlink_to(tmp_path / "second")
    os.replace(tmp_path / "link2", link)
    keys.look()
    keys.look()
    assert names(keys) == {"b"}


def test_a_service_does_not_start_with_a_wrong_file(write: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"--keys-file .*missing.toml: No such file"):
        open_keys(str(tmp_path / "missing.toml"), {})
    with pytest.raises(CannotStart, match=r"--keys-file .*keys.toml: keys.a.sha256"):
        open_keys(str(write("[keys.a]\nsha256 = 3")), {})
    path = write("")
    path.write_bytes(b"\xff")
    with pytest.raises(CannotStart, match="not UTF-8"):
        open_keys(str(path), {})


# ── the environment ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_keys_of_the_environment() -> None:
    environment = {"PACELINE_API_KEYS": f" {SECRET} ,{'b' * 16},", "PACELINE_ADMIN_KEYS": "c" * 16}
    keys = open_keys(None, environment)
    assert keys is not None
    first, second, admin = (keys.current.find(secret) for secret in (SECRET, "b" * 16, "c" * 16))
    assert first is not None
    assert second is not None
    assert admin is not None
    assert (first.admin, second.admin, admin.admin) == (False, False, True)
    assert all(key.any_tenant and key.max_priority == float("inf") and not key.has_quotas for key in (first, admin))
    assert len({first.name, second.name, admin.name}) == 3
    assert first.name == f"env-{hash_of(SECRET)[:12]}"  # the same at every gateway


def test_without_keys_there_is_no_source() -> None:
    assert open_keys(None, {"PACELINE_API_KEYS": " , "}) is None
    assert not are_configured(None, {})
    assert are_configured("f", {})
    assert are_configured(None, {"PACELINE_ADMIN_KEYS": "x"})


@pytest.mark.parametrize("secret", ["short", "x" * 513, "schlüssel-schlüssel"])
def test_a_weak_key_of_the_environment_is_refused(secret: str) -> None:
    with pytest.raises(InvalidKeys, match="PACELINE_ADMIN_KEYS: a key has 16 to 512 printable ASCII characters"):
        keys_from({"PACELINE_ADMIN_KEYS": secret})


def test_a_key_in_the_file_and_in_the_environment_is_refused(write: Callable[[str], Path]) -> None:
    with pytest.raises(CannotStart, match=r"the same as of keys\.a"):
        open_keys(str(write(entry())), {"PACELINE_API_KEYS": SECRET})


# ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "ip6-localhost", "::ffff:127.0.0.1"])
def test_loopback_needs_no_key(host: str) -> None:
    assert safe_host(host, has_keys=False, insecure=False) == (host, "")
    assert safe_host(f"[{host}]", has_keys=False, insecure=False) == (host, "")


@pytest.mark.parametrize(
    ("host", "instead"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.5", "127.0.0.1"), ("box", "127.0.0.1")]
)
def test_other_addresses_need_keys_or_the_insecure_flag(host: str, instead: str) -> None:
    used, why = safe_host(host, has_keys=False, insecure=False)
    assert used == instead
    assert host in why
    assert "--keys-file" in why
    assert "--insecure" in why
    assert "\n" not in why
    assert safe_host(host, has_keys=True, insecure=False) == (host, "")
    assert safe_host(host, has_keys=False, insecure=True) == (host, "")


@pytest.mark.parametrize(
    ("peer", "is_local"),
    [
        ("ipv4:127.0.0.1:5000", True),
        ("ipv6:%5B::1%5D:5000", True),
        ("ipv6:[::1]:5000", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:5000", True),
        ("unix:", True),
        ("unix:/run/x", True),
        ("ipv4:10.0.0.127:5000", False),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5000", False),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", False),
        ("vsock:1", False),
        ("", False),
    ],
)
def test_peers_of_this_machine(peer: str, is_local: bool) -> None:
    assert is_local_peer(peer) is is_local


# ── admin calls ──────────────────────────────────────────────────────────────────────────────────────────────────────

LOCAL, REMOTE = "ipv4:127.0.0.1:5000", "ipv4:10.0.0.1:5000"


def refused(gate: AdminGate, peer: str, secret: str = "") -> grpc.StatusCode | None:
    checked = gate.check(peer, [("x-api-key", secret)] if secret else [])
    return None if isinstance(checked, str) else checked[0]


def test_without_keys_admin_calls_come_from_this_machine() -> None:
    gate = AdminGate(None, admin=["/x/"])
    assert refused(gate, LOCAL) is None
    assert refused(gate, REMOTE) is DENIED
    assert refused(AdminGate(None, admin=["/x/"], insecure=True), REMOTE) is None


def test_with_keys_admin_calls_need_an_admin_key_from_anywhere(write: Callable[[str], Path]) -> None:
    keys = KeySource(write(entry("user", "u" * 20) + entry("boss", admin=True)), [])
    for insecure in (False, True):
        gate = AdminGate(keys, admin=["/x/"], insecure=insecure)
        for peer in (LOCAL, REMOTE):
            assert refused(gate, peer) is UNKNOWN
            assert refused(gate, peer, "wrong") is UNKNOWN
            assert refused(gate, peer, "u" * 20) is DENIED
            assert refused(gate, peer, SECRET) is None
    write(entry("user", "u" * 20))
    keys.look()
    keys.look()
    assert refused(AdminGate(keys, admin=["/x/"]), LOCAL, SECRET) is UNKNOWN  # revoked


# Calls between services, which need no API key. With --tls-dir, certificates authenticate them.
LINKS = {
    "/paceline.v1.InferenceService/Session",
    "/paceline.v1.InferenceService/ReleaseConversation",  # a gateway calls it for one of its clients
    "/paceline.v1.LiveViewService/Watch",  # the gateway requires an admin key from its client
    "/paceline.v1.LiveViewService/Trace",  # the gateway requires an admin key from its client
    "/paceline.v1.LiveViewService/GetTimeline",  # a gateway calls it for the owner of the request
    "/paceline.v1.WorkerService/Link",
    "/paceline.v1.KvTransferService/Fetch",
    "/paceline.v1.CacheService/Link",
    "/paceline.v1.CacheService/WatchBlocks",  # like LiveViewService/Watch; the answers have no token ids
}


def test_every_method_of_the_protocol_is_a_link_or_guarded() -> None:
    """A new method must be named in LINKS or by a server's gate."""
    files = (admin_pb2, cache_pb2, inference_pb2, live_pb2, worker_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    guards = (*scheduler_server.ADMIN_METHODS, *scheduler_server.KEYED_METHODS, *cache_server.ADMIN_METHODS)
    assert {method for method in methods if not method.startswith(guards)} == LINKS


def test_entries_equal_those_of_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "keys.md").read_text("utf-8")
    block = page.partition("```toml\n")[2].partition("```")[0]
    assert set(tomllib.loads(block)["keys"]["acme-app"]) == set(ApiKey.model_fields) - {"name"}
    assert parse_keys(block)
