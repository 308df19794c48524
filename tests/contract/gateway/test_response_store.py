"""The SQLite and Redis stores of responses behave alike: owners, leases, tokens and endings."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from services.gateway.errors import ApiError
from services.gateway.store import redis_link, sqlite_file
from services.gateway.store.opening import open_stores
from services.gateway.store.records import ResponseStore, StoredResponse
from services.gateway.store.redis_link import RedisLink
from services.gateway.store.redis_store import RedisStore
from services.gateway.store.sqlite_file import SqliteFile
from services.gateway.store.sqlite_store import SqliteStore
from services.gateway.store.urls import check_store_url
from tests.support.redis_server import RedisProcess, needs_redis

ONE = StoredResponse("ann", "resp_1", "demo", 1700000000, True, b"\0f", b'{"head":1}', b'{"chat":2}')
ENDED = replace(ONE, status="completed", work=b"", result=b"result")
LEASE_S = 10.0


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture(loop_scope="module", params=["sqlite", pytest.param("redis", marks=needs_redis)])
async def stores(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock
) -> AsyncIterator[tuple[ResponseStore, ResponseStore]]:
    """The store as two gateways have it."""
    if request.param == "sqlite":
        path = tmp_path / "state" / "responses.db"
        files = [SqliteFile(path), SqliteFile(path)]
        pair: list[ResponseStore] = [SqliteStore(file, ttl_s=100, max_bytes=2**20, clock=clock) for file in files]
        opened: list[SqliteFile | RedisLink] = [*files]
    else:
        server: RedisProcess = request.getfixturevalue("redis")
        links = [RedisLink(server.url), RedisLink(server.url)]
        pair = [RedisStore(link, ttl_s=100, clock=clock) for link in links]
        opened = [*links]
    yield pair[0], pair[1]
    await pair[0].delete(*ONE.name)
    for each in opened:
        await each.close()


Stores = tuple[ResponseStore, ResponseStore]


async def test_a_response_is_what_was_stored(stores: Stores) -> None:
    first, second = stores
    assert await second.get(*ONE.name) is None
    assert await first.put(ONE, LEASE_S)
    assert await second.get(*ONE.name) == ONE
    assert not await second.put(replace(ONE, request=b"other"), LEASE_S)
    assert await second.finish(*ONE.name, "completed", b"result")
    assert await first.get(*ONE.name) == replace(ONE, status="completed", work=b"", result=b"result")
    assert not await first.finish(*ONE.name, "failed", b"later")
    assert (await first.get(*ONE.name)) == replace(ONE, status="completed", work=b"", result=b"result")


async def test_an_ended_response_is_stored_at_once(stores: Stores) -> None:
    first, second = stores
    ended = replace(ONE, status="completed", work=b"", result=b"result")
    assert await first.put(ended, 0.0)
    assert await second.get(*ONE.name) == ended
    assert await second.abandoned(8) == []
    assert not await second.claim(*ONE.name, LEASE_S)
    assert await second.renew({ONE.name: b""}, LEASE_S) == [ONE.name]
    assert not await second.finish(*ONE.name, "failed", b"")


async def test_another_owner_neither_sees_nor_changes_a_response(stores: Stores) -> None:
    first, second = stores
    await first.put(ONE, 0.0)
    assert await second.get("bob", ONE.id) is None
    assert await second.get("", ONE.id) is None
    assert not await second.claim("bob", ONE.id, LEASE_S)
    assert not await second.finish("bob", ONE.id, "completed", b"")
    assert not await second.delete("bob", ONE.id)
    assert await second.renew({("bob", ONE.id): b"tokens"}, LEASE_S) == [("bob", ONE.id)]
    assert await first.get(*ONE.name) == ONE
    assert await second.put(replace(ONE, owner="bob"), LEASE_S)
    assert await second.delete("bob", ONE.id)


async def test_a_lease_keeps_others_away_until_it_is_over(stores: Stores, clock: Clock) -> None:
    first, second = stores
    await first.put(ONE, LEASE_S)
    clock.now_s += 9
    assert not await second.claim(*ONE.name, LEASE_S)
    assert await first.renew({ONE.name: b"\1\0\0\0"}, LEASE_S) == []
    clock.now_s += 9
    assert await second.abandoned(8) == []
    clock.now_s += 2
    assert await second.abandoned(8) == [ONE.name]
    assert await second.claim(*ONE.name, LEASE_S)
    assert not await first.claim(*ONE.name, LEASE_S)
    assert await first.abandoned(8) == []
    await second.renew({ONE.name: b""}, 0.0)
    assert await first.abandoned(8) == [ONE.name]
    await first.finish(*ONE.name, "completed", b"")
    assert await first.abandoned(8) == []
    assert not await first.claim(*ONE.name, LEASE_S)
    assert await first.renew({ONE.name: b""}, LEASE_S) == [ONE.name]


async def test_stored_tokens_only_grow_and_are_deleted_at_the_end(stores: Stores) -> None:
    first, second = stores
    await first.put(ONE, LEASE_S)
    await first.renew({ONE.name: b"12345678"}, LEASE_S)
    await second.renew({ONE.name: b"1234"}, LEASE_S)
    assert await first.get(*ONE.name) == replace(ONE, tokens=b"12345678")
    await first.finish(*ONE.name, "completed", b"r")
    assert await first.get(*ONE.name) == replace(ONE, status="completed", work=b"", result=b"r")


async def test_only_background_responses_are_taken_over_without_a_client(stores: Stores) -> None:
    first, _ = stores
    await first.put(replace(ONE, background=False), 0.0)
    assert await first.abandoned(8) == []
    assert await first.claim(*ONE.name, 0.0)
    assert await first.abandoned(8) == []


async def test_a_deleted_response_is_gone(stores: Stores) -> None:
    first, second = stores
    await first.put(ONE, 0.0)
    assert await second.delete(*ONE.name)
    assert await first.get(*ONE.name) is None
    assert await first.abandoned(8) == []
    assert not await first.finish(*ONE.name, "completed", b"")
    assert not await second.delete(*ONE.name)


async def test_two_claims_at_once_have_one_winner(stores: Stores) -> None:
    first, second = stores
    await first.put(ONE, 0.0)
    won = await asyncio.gather(*(store.claim(*ONE.name, LEASE_S) for store in (first, second) * 4))
    assert sum(won) == 1


async def test_sqlite_deletes_responses_above_the_limits_of_age_and_bytes(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "responses.db"
    file = SqliteFile(path)
    store = SqliteStore(file, ttl_s=100, max_bytes=1000, clock=clock)
    await store.purge()
    assert await store.abandoned(8) == []
    assert not path.exists(), "nothing was stored"
    for number in range(600):
        await store.put(replace(ENDED, id=f"resp_{number}", request=b"x" * 100, result=b""), LEASE_S)
        clock.now_s += 0.01
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await store.purge()
    left = [number for number in range(600) if await store.get("ann", f"resp_{number}") is not None]
    assert left == list(range(590, 600))
    clock.now_s += 101
    assert await store.get("ann", "resp_599") is None
    await store.purge()
    clock.now_s -= 101
    assert await store.get("ann", "resp_599") is None
    assert not await store.claim("ann", "resp_599", LEASE_S)
    await file.close()


async def test_sqlite_deletes_first_from_the_owner_with_the_most_bytes(tmp_path: Path, clock: Clock) -> None:
    file = SqliteFile(tmp_path / "responses.db")
    store = SqliteStore(file, ttl_s=100, max_bytes=1000, clock=clock)
    row = replace(ENDED, request=b"x" * 100, result=b"")
    for number in range(4):
        await store.put(replace(row, id=f"mine_{number}"), 0.0)
        clock.now_s += 0.01
    for number in range(30):  # bob's are younger
        assert await store.put(replace(row, owner="bob", id=f"resp_{number}"), 0.0)
        clock.now_s += 0.01
    await store.purge()
    assert await found(store, "ann", "mine", 4) == [0, 1, 2, 3]
    assert await found(store, "bob", "resp", 30) == list(range(24, 30))
    for number in range(4, 20):  # up to an equal share
        assert await store.put(replace(row, id=f"mine_{number}"), 0.0)
    assert await found(store, "ann", "mine", 20) == [15, 16, 17, 18, 19]
    assert await found(store, "bob", "resp", 30) == list(range(25, 30))
    await file.close()


async def found(store: ResponseStore, owner: str, name: str, count: int) -> list[int]:
    return [number for number in range(count) if await store.get(owner, f"{name}_{number}") is not None]


async def test_sqlite_deletes_no_response_in_progress(tmp_path: Path, clock: Clock) -> None:
    file = SqliteFile(tmp_path / "responses.db")
    store = SqliteStore(file, ttl_s=100, max_bytes=1000, clock=clock)
    row = replace(ENDED, request=b"x" * 100, result=b"")
    runs = replace(row, owner="bob", status="in_progress")
    for number in range(3):
        await store.put(replace(row, id=f"mine_{number}"), 0.0)
    for number in range(7):
        assert await store.put(replace(runs, id=f"resp_{number}"), LEASE_S)
    for refused in (replace(runs, id="resp_x"), replace(row, owner="bob", id="resp_x")):
        with pytest.raises(ApiError, match="the response store is full") as caught:
            await store.put(refused, LEASE_S)
        assert (caught.value.status, caught.value.code) == (429, "store_full")
    assert not await store.put(replace(runs, id="resp_0"), LEASE_S), "the store has this response already"
    with pytest.raises(ApiError, match="takes 1001 bytes in the response store, which holds 1000") as too_large:
        await store.put(replace(row, id="mine_x", request=b"x" * 1001), 0.0)
    assert (too_large.value.status, too_large.value.param) == (400, "store")
    assert await found(store, "ann", "mine", 3) == [0, 1, 2]
    for number in range(7):  # an ended response may take more than its reservation
        await store.finish("bob", f"resp_{number}", "completed", b"y" * 100)
    await store.purge()
    assert await found(store, "ann", "mine", 3) == [0, 1, 2]
    assert len(await found(store, "bob", "resp", 7)) == 3
    await file.close()


async def test_sqlite_counts_the_bytes_in_a_file_of_an_earlier_version(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "responses.db"
    options = {"ttl_s": 100.0, "max_bytes": 1000, "clock": clock}
    file = SqliteFile(path)
    store = SqliteStore(file, **options)  # type: ignore[arg-type]
    row = replace(ENDED, request=b"x" * 100, result=b"")
    for number in range(10):
        await store.put(replace(row, id=f"mine_{number}"), 0.0)
        clock.now_s += 0.01
    await file.close()
    with closing(sqlite3.connect(path)) as old:
        for trigger in ("use_added", "use_changed", "use_deleted"):
            old.execute(f"DROP TRIGGER {trigger}")
        old.execute("DROP TABLE usage")
        old.execute("DROP INDEX ended")
    file = SqliteFile(path)
    store = SqliteStore(file, **options)  # type: ignore[arg-type]
    await store.put(replace(row, id="mine_10"), 0.0)
    assert await found(store, "ann", "mine", 11) == list(range(1, 11))
    await file.close()


async def test_sqlite_asks_for_a_held_lease_without_a_write(tmp_path: Path) -> None:
    """Clients poll often, and a write would wait for the writes of all gateways."""
    file = SqliteFile(tmp_path / "responses.db")
    store = SqliteStore(file, ttl_s=100, max_bytes=2**20)
    await store.put(ONE, LEASE_S)
    with closing(sqlite3.connect(tmp_path / "responses.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with asyncio.timeout(2):
            assert not await store.claim(*ONE.name, LEASE_S)
    await file.close()


async def test_the_model_of_a_response_is_read_without_the_response(stores: Stores) -> None:
    first, second = stores
    assert await first.model_of(*ONE.name) is None
    await first.put(ONE, LEASE_S)
    assert await second.model_of(*ONE.name) == "demo"
    assert await second.model_of("bob", ONE.id) is None


@needs_redis
async def test_a_frozen_redis_delays_no_request_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_link, "_ANSWER_S", 0.5)
    server = RedisProcess(tmp_path).start()
    link = RedisLink(server.url)
    store = RedisStore(link, ttl_s=100)
    try:
        assert await store.put(ONE, LEASE_S)
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        large = replace(ONE, request=b"x" * 16_000_000)  # more than the kernel takes
        async with asyncio.timeout(5):
            for put in (store.put(ONE, LEASE_S), store.put(large, LEASE_S)):
                with pytest.raises(ApiError, match="does not answer"):
                    await put
    finally:
        await link.close()
        server.stop()


@needs_redis
async def test_redis_deletes_responses_above_the_limit_of_age(redis: RedisProcess) -> None:
    link = RedisLink(redis.url)
    store = RedisStore(link, ttl_s=0.05)
    await store.put(ONE, 0.0)
    async with asyncio.timeout(20):
        while await store.get(*ONE.name) is not None:  # noqa: ASYNC110 - the server's clock
            await asyncio.sleep(0.01)
    assert await store.abandoned(8) == [ONE.name]
    assert not await store.claim(*ONE.name, LEASE_S)
    assert await store.abandoned(8) == [], "the claim removed the name"
    await link.close()


async def test_a_store_that_fails_gives_503(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "other.db").write_text("no database, but long enough to be read as one" * 10)
    for url in (f"sqlite:///{tmp_path}/file/x.db", f"sqlite:///{tmp_path}/other.db", "redis://127.0.0.1:1"):
        stores = open_stores(url, ttl_s=100, max_bytes=2**20)
        assert stores is not None
        with pytest.raises(ApiError) as caught:
            await stores.responses.put(ONE, LEASE_S)
        assert (caught.value.status, caught.value.code) == (503, "store_unavailable")
        await stores.close()


async def test_a_locked_file_delays_no_request_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "_BUSY_S", 0.5)
    file = SqliteFile(tmp_path / "responses.db")
    store = SqliteStore(file, ttl_s=100, max_bytes=2**20)
    assert await store.put(ONE, LEASE_S)
    with closing(sqlite3.connect(tmp_path / "responses.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writes = [store.put(replace(ONE, id=f"resp_{i}"), LEASE_S) for i in range(20)]
        async with asyncio.timeout(5):
            *failed, found = await asyncio.gather(*writes, store.get(*ONE.name), return_exceptions=True)
        assert all(isinstance(error, ApiError) and error.status == 503 for error in failed)
        assert found == ONE, "a read needs no lock"
    assert await store.put(replace(ONE, id="resp_x"), LEASE_S)
    await file.close()


def test_a_setting_that_names_no_store_is_refused() -> None:
    assert open_stores("none", ttl_s=1, max_bytes=1) is None
    for good in ("none", "sqlite", "sqlite:////var/x.db", "redis://host/0", "rediss://host", "unix:///run/redis"):
        assert check_store_url(good) == good
    for bad in ("", "memory", "sqlite://", "sqlite:///", "/var/x.db", "postgres://host"):
        with pytest.raises(ValueError, match="must be"):
            check_store_url(bad)


async def test_a_deleted_response_leaves_no_progress_row(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "responses.db"
    file = SqliteFile(path)
    store = SqliteStore(file, ttl_s=100, max_bytes=2**20, clock=clock)
    await store.put(ONE, 0.0)
    await store.put(replace(ONE, id="resp_2"), 0.0)
    await store.delete(*ONE.name)
    assert await store.abandoned(8) == [("ann", "resp_2")]
    assert await store.abandoned(8, 1) == []
    clock.now_s += 101
    await store.purge()
    assert await store.abandoned(8) == []
    await file.close()
