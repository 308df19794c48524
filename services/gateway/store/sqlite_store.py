"""Stores responses in an SQLite file, which all gateways of a machine may share."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping

from services.gateway.store.records import IN_PROGRESS, ResponseName, Status, StoredResponse
from services.gateway.store.sqlite_file import SqliteFile, marks

# Deleted at a time, so that other gateways' writes come between.
_BATCH = 256
_COLUMNS = "owner, id, model, created_s, background, fingerprint, request, work, status, result"


class SqliteStore:
    """`ttl_s`: seconds after which a response is deleted. Above `max_bytes` of all responses, the ones that would
    expire first are deleted."""

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
        sql = f"INSERT OR IGNORE INTO responses ({_COLUMNS}, expires_s, num_bytes) VALUES ({marks(len(row))})"
        progress = response.owner, response.id, response.background, now_s + lease_s, response.tokens

        def put(db: sqlite3.Connection) -> bool:
            if not db.execute(sql, row).rowcount:
                return False
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

    async def claim(self, owner: str, response_id: str, lease_s: float) -> bool:
        now_s = self._clock()
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
        first = "SELECT rowid, num_bytes FROM responses ORDER BY expires_s LIMIT ?"

        def shrink(db: sqlite3.Connection) -> bool:
            (total,) = db.execute("SELECT coalesce(sum(num_bytes), 0) FROM responses").fetchone()
            for rowid, num_bytes in db.execute(first, (_BATCH,)).fetchall():
                if total <= self._max_bytes:
                    return False
                db.execute("DELETE FROM responses WHERE rowid = ?", (rowid,))
                total -= num_bytes
            return bool(total > self._max_bytes)

        while await self._file.run(shrink):
            pass
