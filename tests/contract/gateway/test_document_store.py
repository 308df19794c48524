"""Both stores of files and batches behave alike: owners, versions, pieces, pages and leases."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from services.gateway.store.documents import ContentPiece, Document, DocumentName, DocumentStore, StoreUsage
from services.gateway.store.redis_documents import RedisDocuments
from services.gateway.store.redis_link import RedisLink
from services.gateway.store.sqlite_documents import SqliteDocuments
from services.gateway.store.sqlite_file import SqliteFile
from tests.contract.gateway.test_response_store import Clock
from tests.support.redis_server import RedisProcess, needs_redis

LEASE_S = 10.0
Stores = tuple[DocumentStore, DocumentStore]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def owner() -> str:
    """An owner for one test, because the tests share a redis-server."""
    return f"ann-{uuid4().hex}"


@pytest.fixture
def one(owner: str) -> Document:
    return Document(DocumentName("batch", owner, "batch_1"), f"model of {owner}", 900.5, 2000.0, 7, b'{"a":1}')


@pytest_asyncio.fixture(loop_scope="module", params=["sqlite", pytest.param("redis", marks=needs_redis)])
async def stores(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[Stores]:
    """The store as two gateways have it."""
    if request.param == "sqlite":
        files = [SqliteFile(tmp_path / "state" / "responses.db") for _ in range(2)]
        yield SqliteDocuments(files[0], clock=clock), SqliteDocuments(files[1], clock=clock)
        for file in files:
            await file.close()
        return
    server: RedisProcess = request.getfixturevalue("redis")
    links = [RedisLink(server.url) for _ in range(2)]
    yield RedisDocuments(links[0], clock=clock), RedisDocuments(links[1], clock=clock)
    for link in links:
        await link.close()


async def test_a_document_is_what_was_stored(stores: Stores, one: Document, clock: Clock) -> None:
    first, second = stores
    assert await second.get(one.name) is None
    assert await first.put(one)
    assert await second.get(one.name) == one
    assert not await second.put(replace(one, data=b"{}"))
    other = one.name._replace(owner="bob")
    assert await second.get(other) is None
    assert not await second.delete(other)
    clock.now_s = 2000.0
    assert await second.get(one.name) is None


async def test_only_the_newest_version_is_replaced(stores: Stores, one: Document) -> None:
    first, second = stores
    assert not await first.replace(one), "there is no document yet"
    await first.put(one)
    assert await first.replace(replace(one, label="x", data=b"2", num_bytes=8, expires_s=3000.0))
    assert not await second.replace(replace(one, data=b"3"))
    found = await second.get(one.name)
    assert found == replace(one, label="x", data=b"2", num_bytes=8, expires_s=3000.0, version=1)
    assert await second.replace(replace(found, data=b"3"))
    assert (await first.get(one.name)) == replace(found, data=b"3", version=2)


async def test_a_piece_never_changes(stores: Stores, one: Document) -> None:
    first, second = stores
    assert await first.add_pieces(one.name, [ContentPiece(1, 0, b"early")]) == 0, "there is no document yet"
    await first.put(one)
    assert await first.add_pieces(one.name, [ContentPiece(3, 1, b"c"), ContentPiece(1, 0, b"a")]) == 2
    assert await second.add_pieces(one.name, [ContentPiece(1, 1, b"other"), ContentPiece(2, 0, b"")]) == 1
    assert dict(await first.marks(one.name)) == {1: 0, 2: 0, 3: 1}
    assert await first.pieces(one.name, [3, 1, 2, 9]) == [b"c", b"a", b""]
    assert await first.pieces(one.name, []) == []
    many = list(range(10, 1500))
    await first.add_pieces(one.name, [ContentPiece(number, 0, b"%d" % number) for number in many])
    assert await second.pieces(one.name, many) == [b"%d" % number for number in many]
    await second.drop_pieces(one.name)
    assert not await first.marks(one.name)
    assert await first.get(one.name) == one
    await first.add_pieces(one.name, [ContentPiece(1, 0, b"a")])
    assert await first.delete(one.name)
    assert not await second.marks(one.name)
    assert await second.pieces(one.name, [1]) == []


async def test_pages_are_ordered_by_time(stores: Stores, one: Document, owner: str, clock: Clock) -> None:
    first, second = stores
    made = [
        Document(DocumentName("file", owner, f"file-{i}"), "ab"[i % 2], 100.0 + i // 2, 2000.0 + i, i, b"{}")
        for i in range(7)
    ]
    for document in made[::-1]:
        await first.put(document)
    await first.put(one)
    assert await second.page("file", owner, (), most=9) == made[::-1]
    assert await second.page("file", owner, ("a", "b"), most=3, newest_first=False) == made[:3]
    assert await second.page("file", owner, (), after=made[2], most=2, newest_first=False) == made[3:5]
    assert await second.page("file", owner, ("b",), after=made[5], most=9) == [made[3], made[1]]
    assert await second.page("file", "bob", (), most=9) == []
    assert await second.usage("file", owner) == StoreUsage(7, 21)
    clock.now_s = 2002.0  # three have expired
    assert await second.page("file", owner, (), most=9, newest_first=False) == made[3:]
    assert await second.usage("batch", "bob") == StoreUsage(0, 0)
    await first.purge()
    assert await second.page("file", owner, (), after=made[4], most=9, newest_first=False) == made[5:]
    await first.delete(made[4].name)
    assert await second.page("file", owner, (), after=made[4], most=9, newest_first=False) == made[5:]
    assert await second.page("file", owner, (), after=made[4], most=9) == [made[3]]
    assert await second.page("file", owner, (), after=made[0], most=9, newest_first=False) == [made[3], *made[5:]]


async def test_work_is_done_by_the_gateway_with_the_lease(stores: Stores, one: Document, clock: Clock) -> None:
    first, second = stores
    kind, label, owner = one.name.kind, one.label, one.name.owner
    await first.put(one, has_work=True)
    assert await second.waiting(kind, label, 9) == [one.name]
    assert await second.waiting(kind, "another model", 9) == []
    assert sum(await asyncio.gather(*(store.claim(one.name, LEASE_S) for store in (first, second) * 3))) == 1
    holder, other = (first, second) if await first.renew([one.name], LEASE_S) == [] else (second, first)
    assert await other.renew([one.name], LEASE_S) == [one.name], "the lease belongs to the other gateway"
    clock.now_s += 9
    assert await holder.renew([one.name], LEASE_S) == []
    clock.now_s += 9
    assert await other.waiting(kind, label, 9) == []
    assert not await other.claim(one.name, LEASE_S)
    clock.now_s += 2
    assert await other.waiting(kind, label, 9) == [one.name]
    assert await other.claim(one.name, LEASE_S)
    assert await holder.renew([one.name], LEASE_S) == [one.name], "another gateway has taken over"
    await other.renew([one.name], 0.0)
    assert await holder.claim(one.name, LEASE_S)
    assert await other.unfinished(kind, owner) == [one.name.id]
    assert await holder.replace(one, ends_work=True)
    assert await other.unfinished(kind, owner) == []
    clock.now_s += 20
    assert await other.waiting(kind, label, 9) == []
    assert not await other.claim(one.name, LEASE_S)
    assert await holder.renew([one.name], LEASE_S) == [one.name]


async def test_deleted_work_waits_no_longer(stores: Stores, one: Document) -> None:
    first, second = stores
    await first.put(one, has_work=True)
    assert await second.delete(one.name)
    assert await first.waiting(one.name.kind, one.label, 9) == []
    assert await first.unfinished(one.name.kind, one.name.owner) == []
    assert not await first.claim(one.name, LEASE_S)


async def test_the_longest_waiting_work_of_each_owner_is_next(stores: Stores, one: Document, clock: Clock) -> None:
    first, second = stores
    kind, owner, _ = one.name
    names = [DocumentName(kind, f"{key}-{owner}", f"batch_{i}") for i, key in enumerate(["ann", "ann", "bob", "ann"])]
    for name in names:
        await first.put(replace(one, name=name), has_work=True)
        clock.now_s += 1
    assert await second.waiting(kind, one.label, 9) == [names[0], names[2]]
    assert await second.waiting(kind, one.label, 1) == [names[0]]
    assert await second.claim(names[0], LEASE_S)
    assert await first.waiting(kind, one.label, 9) == [names[1], names[2]]
    await second.renew([names[0]], 0.0)
    assert await first.waiting(kind, one.label, 9) == [names[1], names[2]], "the first one is now last of its owner"
    await first.delete(names[1])
    assert await second.waiting(kind, one.label, 9) == [names[2], names[3]]


@needs_redis
async def test_names_of_expired_documents_leave_redis(
    redis: RedisProcess, one: Document, owner: str, clock: Clock
) -> None:
    link = RedisLink(redis.url)
    store, kept = RedisDocuments(link, clock=clock), one.name._replace(id="batch_2")
    sets = f"paceline:documents:batch:{owner}", f"paceline:unfinished:batch:{owner}"

    async def ids() -> list[set[bytes]]:
        return [set(await link.ask(read)) for read in (link.redis.zrange(sets[0], 0, -1), link.redis.smembers(sets[1]))]

    async def last_s() -> list[int]:
        return [round(await link.ask(link.redis.pttl(each)) / 1000) for each in sets]

    await store.put(replace(one, expires_s=clock.now_s + 0.05), has_work=True)
    await store.put(replace(one, name=kept, expires_s=clock.now_s + 60.0), has_work=True)
    while await link.ask(link.redis.exists(f"paceline:document:batch:{owner}:batch_1")):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert await ids() == [{b"batch_1", b"batch_2"}] * 2
    assert await store.usage("batch", owner) == StoreUsage(1, one.num_bytes)
    assert await store.unfinished("batch", owner) == ["batch_2"]
    assert await ids() == [{b"batch_2"}] * 2
    # An owner that never comes back leaves no set behind.
    assert all(50 <= each <= 60 for each in await last_s())
    found = await store.get(kept)
    assert found is not None
    assert await store.replace(replace(found, expires_s=clock.now_s + 120.0))
    assert all(110 <= each <= 120 for each in await last_s())
    await store.put(replace(one, expires_s=clock.now_s + 5.0), has_work=True)
    assert all(110 <= each <= 120 for each in await last_s()), "the last document decides"
    await link.close()


@pytest.mark.parametrize("how", ["deleted", "expired", "dropped"])
async def test_no_transaction_of_sqlite_deletes_a_large_document_as_a_whole(
    tmp_path: Path, one: Document, clock: Clock, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Otherwise writes of other gateways would fail, because they wait for 5 s at most."""
    file = SqliteFile(tmp_path / "responses.db")
    store, run, counts = SqliteDocuments(file, clock=clock), file.run, list[int]()
    await store.put(one)
    await store.add_pieces(one.name, [ContentPiece(number, 0, b"x" * 5000) for number in range(100)])

    async def counted(work: Any, **options: Any) -> Any:
        def count(db: sqlite3.Connection) -> Any:
            before = db.execute("SELECT count(*) FROM pieces").fetchone()[0]
            answer = work(db)
            counts.append(before - db.execute("SELECT count(*) FROM pieces").fetchone()[0])
            return answer

        return await run(count, **options)

    monkeypatch.setattr(file, "run", counted)
    if how == "expired":
        clock.now_s = one.expires_s
        await store.purge()
    elif how == "deleted":
        assert await store.delete(one.name)
    else:
        await store.drop_pieces(one.name)
    assert (sum(counts), max(counts)) == (100, 16)
    assert (await store.get(one.name) is None) == (how != "dropped")
    assert await store.put(one) == (how != "dropped")
    await file.close()
