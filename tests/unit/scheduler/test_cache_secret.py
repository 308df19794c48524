"""Where a scheduler gets the key of the hash that names cache namespaces."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scheduler_svc import cache_secret
from scheduler_svc.cache_secret import FILE_NAME, own_secret, read_secret
from scheduler_svc.server import _cache_secret
from scheduler_svc.settings import SchedulerSettings
from services.runtime.service import CannotStart


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "paceline"


def test_the_first_start_makes_a_file_that_only_its_user_can_read(state: Path) -> None:
    first = own_secret()
    assert len(first) == 64
    assert own_secret() == first, "after a restart"
    assert stat.S_IMODE((state / FILE_NAME).stat().st_mode) == 0o600
    assert [path.name for path in state.iterdir()] == [FILE_NAME]


def test_schedulers_that_start_together_agree(state: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: own_secret(), range(32)))) == 1


def test_without_a_writable_folder_the_log_says_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    said: list[str] = []
    monkeypatch.setattr(cache_secret.log, "warning", lambda words, **fields: said.append(words))
    assert own_secret() != own_secret()
    assert all("after a restart, kept KV of tenants and salts is computed again" in words for words in said)
    assert len(said) == 2


@pytest.mark.parametrize(
    ("content", "words"), [(b"short", "has 5 bytes; a secret has 16 to 64"), (b"x" * 65, "65 bytes")]
)
def test_a_secret_of_another_size_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(CannotStart, match=words):
        read_secret(path)


def test_the_file_of_the_settings_comes_first(state: Path, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef\n")
    assert _cache_secret(SchedulerSettings(cache_secret_file=str(path))) == b"0123456789abcdef"
    assert _cache_secret(SchedulerSettings(etcd="http://127.0.0.1:2379")) == b"", "it comes with the election"
    assert not state.exists()
    assert _cache_secret(SchedulerSettings()) == own_secret()
    with pytest.raises(CannotStart, match="--cache-secret-file: /nowhere: No such file"):
        _cache_secret(SchedulerSettings(cache_secret_file="/nowhere"))
