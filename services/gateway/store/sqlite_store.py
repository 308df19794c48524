"""Stores responses in an SQLite file, which all gateways of a machine may share."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping

from services.gateway.store.records import IN_PROGRESS, ResponseName, Status, StoredResponse, full, too_large
from services.gateway.store.sqlite_file import SqliteFile, marks

# The most responses that one transaction of `purge` deletes. Between two transactions, other gateways can write.
_BATCH = 256
_COLUMNS = "owner, id, model, created_s, background, fingerprint, request, work, status, result"


class SqliteStore:
    """Stores responses in SQLite. `ttl_s`: seconds from when a response ended (in progress: from when it was stored)
    until it is deleted. Above `max_bytes` of all responses, ended responses of the owner with the most bytes are
    deleted, the first to expire first. A new response displaces only responses of its own owner, and of owners that
    have more bytes than its owner."""

    def __init__(
        self, file: SqliteFile, *, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._file = file
        self._ttl_s, self._max_bytes = ttl_s, max_bytes
        self._clock = clock

    async def put(self, response: StoredResponse, lease_s: float) -> bool:
        now_s = self._clock()
        row = (
            *(response.owner, response.id, response.model, response.created_s, response.background),
            *(response.fingerprint, response.request, response.work, response.status, response.result),
            *(now_s + self._ttl_s, response.num_bytes),
        )
        if response.num_bytes > self._max_bytes:
            raise too_large(response.num_bytes, self._max_bytes)
        sql = f"INSERT INTO responses ({_COLUMNS}, expires_s, num_bytes) VALUES ({marks(len(row))})"
        progress = response.owner, response.id, response.background, now_s + lease_s, response.tokens

        def put(db: sqlite3.Connection) -> bool:
            db.execute("BEGIN IMMEDIATE")
            if db.execute("SELECT 1 FROM responses WHERE owner = ? AND id = ?", response.name).fetchone():
                return False
            self._make_room(db, response.owner, response.num_bytes)
            db.execute(sql, row)
            if response.status == IN_PROGRESS:
                db.execute("INSERT INTO progress VALUES (?, ?, ?, ?, ?)", progress)
            return True

        return await self._file.run(put)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        sql = (
            f"SELECT {_COLUMNS}, coalesce(tokens, x'') FROM responses LEFT JOIN "
            "(SELECT owner, id, tokens FROM progress) USING (owner, id) WHERE owner = ? AND id = ? AND expires_s > ?"
        )
        values = owner, response_id, self._clock()
        row = await self._file.run(lambda db: db.execute(sql, values).fetchone(), reads=True)
        if row is None:
            return None
        owner, id_, model, created_s, background, *texts = row
        return StoredResponse(owner, id_, model, created_s, bool(background), *texts)

    async def model_of(self, owner: str, response_id: str) -> str | None:
        sql = "SELECT model FROM responses WHERE owner = ? AND id = ?"
        row = await self._file.run(lambda db: db.execute(sql, (owner, response_id)).fetchone(), reads=True)
        return row[0] if row is not None else None

    async def claim(self, owner: str, response_id: str, lease_s: float) -> bool:
        now_s = self._clock()
        # This is called each time that a client polls a response in progress. Only a lease that is over is worth a
        # write, which waits for the writes of all gateways.
        is_over = "SELECT 1 FROM progress WHERE owner = ? AND id = ? AND lease_until_s <= ?"
        asked = owner, response_id, now_s
        if not await self._file.run(lambda db: db.execute(is_over, asked).fetchone() is not None, reads=True):
            return False
        sql = "UPDATE progress SET lease_until_s = ? WHERE owner = ? AND id = ? AND lease_until_s <= ?"
        values = now_s + lease_s, owner, response_id, now_s
        return await self._file.run(lambda db: db.execute(sql, values).rowcount > 0)

    async def renew(self, progress: Mapping[ResponseName, bytes], lease_s: float) -> list[ResponseName]:
        until_s = self._clock() + lease_s
        prolong = "UPDATE progress SET lease_until_s = ? WHERE owner = ? AND id = ?"
        save = "UPDATE progress SET tokens = ? WHERE owner = ? AND id = ? AND length(tokens) < ?"

        def renew(db: sqlite3.Connection) -> list[ResponseName]:
            ended = []
            for name, tokens in progress.items():
                if db.execute(prolong, (until_s, *name)).rowcount == 0:
                    ended.append(name)
                elif tokens:
                    db.execute(save, (tokens, *name, len(tokens)))
            return ended

        return await self._file.run(renew)

    async def finish(self, owner: str, response_id: str, status: Status, result: bytes) -> bool:
        sql = (
            "UPDATE responses SET status = ?, result = ?, work = x'', num_bytes = length(request) + ?, expires_s = ? "
            "WHERE owner = ? AND id = ? AND status = ?"
        )
        expires_s = self._clock() + self._ttl_s
        values = status, result, len(result), expires_s, owner, response_id, IN_PROGRESS

        def finish(db: sqlite3.Connection) -> bool:
            if not db.execute(sql, values).rowcount:
                return False
            db.execute("DELETE FROM progress WHERE owner = ? AND id = ?", (owner, response_id))
            return True

        return await self._file.run(finish)

    async def delete(self, owner: str, response_id: str) -> bool:
        sql = "DELETE FROM responses WHERE owner = ? AND id = ?"
        return await self._file.run(lambda db: db.execute(sql, (owner, response_id)).rowcount > 0)

    async def abandoned(self, most: int, skip: int = 0) -> list[ResponseName]:
        if not self._file.has_content:  # nothing was ever stored
            return []
        now_s = self._clock()
        sql = (
            "SELECT owner, id FROM progress WHERE background AND lease_until_s <= ? ORDER BY lease_until_s "
            "LIMIT ? OFFSET ?"
        )
        return await self._file.run(lambda db: db.execute(sql, (now_s, most, skip)).fetchall(), reads=True)

    async def purge(self) -> None:
        if not self._file.has_content:
            return
        old = f"DELETE FROM responses WHERE rowid IN (SELECT rowid FROM responses WHERE expires_s <= ? LIMIT {_BATCH})"
        while await self._file.run(lambda db: db.execute(old, (self._clock(),)).rowcount):
            pass

        def shrink(db: sqlite3.Connection) -> bool:
            usage = dict(db.execute("SELECT owner, num_bytes FROM usage").fetchall())
            excess = sum(usage.values()) - self._max_bytes
            return self._delete_ended(db, usage, excess, most=_BATCH) == _BATCH

        while await self._file.run(shrink):
            pass

    def _make_room(self, db: sqlite3.Connection, owner: str, num_bytes: int) -> None:
        """Delete ended responses until `num_bytes` more of the owner fit: responses of this owner, or of owners with
        more bytes than this owner will have. Raises ApiError 429 if they are too few; then nothing is deleted."""
        usage: dict[str, int] = dict(db.execute("SELECT owner, num_bytes FROM usage").fetchall())
        usage[owner] = usage.get(owner, 0) + num_bytes
        excess = sum(usage.values()) - self._max_bytes
        self._delete_ended(db, usage, excess, for_owner=owner)
        if sum(usage.values()) > self._max_bytes:
            raise full()

    def _delete_ended(
        self, db: sqlite3.Connection, usage: dict[str, int], excess: int, *, for_owner: str | None = None, most: int = 0
    ) -> int:
        """Delete ended responses of the owner with the most bytes, until `excess` bytes are gone. Returns how many, at
        most `most` (0: no limit). Responses in progress stay: clients wait for them. `for_owner`: nothing is deleted of
        another owner that uses no more bytes than this one."""
        sql = (
            "SELECT rowid, num_bytes FROM responses INDEXED BY ended "
            f"WHERE owner = ? AND status <> '{IN_PROGRESS}' ORDER BY expires_s LIMIT 1"
        )
        num_deleted, rest = 0, set(usage)
        while excess > 0 and rest and not (most and num_deleted == most):
            largest = max(rest, key=lambda owner: (usage[owner], owner == for_owner))
            if for_owner is not None and largest != for_owner and usage[largest] <= usage[for_owner]:
                break
            if (found := db.execute(sql, (largest,)).fetchone()) is None:
                rest.discard(largest)
                continue
            rowid, num_bytes = found
            db.execute("DELETE FROM responses WHERE rowid = ?", (rowid,))
            usage[largest] -= num_bytes
            excess -= num_bytes
            num_deleted += 1
        return num_deleted
