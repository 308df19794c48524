"""Keeps documents in an SQLite file."""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.gateway.store.documents import ContentPiece, Document, DocumentKind, DocumentName, StoreUsage
from services.gateway.store.sqlite_file import SqliteFile, marks

_COLUMNS = "kind, owner, id, label, created_s, expires_s, num_bytes, data, version"
_NAMED = "kind = ? AND owner = ? AND id = ?"
# Pieces that one transaction deletes. SQLite takes 1.4 s to delete 200 MiB (measured). Other gateways must be able to
# write in between.
_PIECES_DELETED = 16
_MOST_VARIABLES = 500  # in one statement; SQLite's limit was 999 before 3.32


class SqliteDocuments:
    """The DocumentStore of gateways on one machine."""

    def __init__(self, file: SqliteFile, *, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock = clock
        self._holder = uuid.uuid4().hex

    async def put(self, document: Document, *, has_work: bool = False) -> bool:
        row = (*_row(document), self._clock() if has_work else None)
        sql = f"INSERT OR IGNORE INTO documents ({_COLUMNS}, lease_until_s) VALUES ({marks(len(row))})"
        return await self._file.run(lambda db: db.execute(sql, row).rowcount > 0)

    async def get(self, name: DocumentName) -> Document | None:
        sql, values = f"SELECT {_COLUMNS} FROM documents WHERE {_NAMED} AND expires_s > ?", (*name, self._clock())
        row = await self._file.run(lambda db: db.execute(sql, values).fetchone(), reads=True)
        return None if row is None else _document(row)

    async def page(
        self,
        kind: DocumentKind,
        owner: str,
        labels: Sequence[str],
        *,
        after: Document | None = None,
        most: int,
        newest_first: bool = True,
    ) -> list[Document]:
        sql = f"SELECT {_COLUMNS} FROM documents WHERE kind = ? AND owner = ? AND expires_s > ?"
        values: list[Any] = [kind, owner, self._clock()]
        if labels:
            sql += f" AND label IN ({marks(len(labels))})"
            values += labels
        if after is not None:
            sql += f" AND (created_s, id) {'<' if newest_first else '>'} (?, ?)"
            values += [after.created_s, after.name.id]
        direction = "DESC" if newest_first else "ASC"
        sql += f" ORDER BY created_s {direction}, id {direction} LIMIT ?"
        rows = await self._file.run(lambda db: db.execute(sql, [*values, most]).fetchall(), reads=True)
        return [_document(row) for row in rows]

    async def usage(self, kind: DocumentKind, owner: str) -> StoreUsage:
        sql = (
            "SELECT count(*), coalesce(sum(num_bytes), 0) FROM documents WHERE kind = ? AND owner = ? AND expires_s > ?"
        )
        values = kind, owner, self._clock()
        return StoreUsage(*await self._file.run(lambda db: db.execute(sql, values).fetchone(), reads=True))

    async def replace(self, document: Document, *, ends_work: bool = False) -> bool:
        sql = "UPDATE documents SET label = ?, expires_s = ?, num_bytes = ?, data = ?, version = version + 1"
        sql += ", lease_until_s = NULL" if ends_work else ""
        sql += f" WHERE {_NAMED} AND version = ?"
        stored = document.label, document.expires_s, document.num_bytes, document.data
        values = *stored, *document.name, document.version
        return await self._file.run(lambda db: db.execute(sql, values).rowcount > 0)

    async def delete(self, name: DocumentName) -> bool:
        # The document is gone at once. If the gateway dies before the pieces are deleted, purge() deletes the rest.
        sql = f"UPDATE documents SET expires_s = 0, lease_until_s = NULL WHERE {_NAMED} AND expires_s > 0"
        if is_there := await self._file.run(lambda db: db.execute(sql, name).rowcount > 0):
            await self._remove(name)
        return is_there

    async def add_pieces(self, name: DocumentName, pieces: Sequence[ContentPiece]) -> int:
        known = f"SELECT 1 FROM documents WHERE {_NAMED}"
        sql = "INSERT OR IGNORE INTO pieces (kind, owner, id, number, mark, data) VALUES (?, ?, ?, ?, ?, ?)"

        def add(db: sqlite3.Connection) -> int:
            # The foreign key would fail for a document that is deleted meanwhile.
            db.execute("BEGIN IMMEDIATE")
            if db.execute(known, name).fetchone() is None:
                return 0
            return sum(db.execute(sql, (*name, *piece)).rowcount for piece in pieces)

        return await self._file.run(add)

    async def marks(self, name: DocumentName) -> Mapping[int, int]:
        sql = f"SELECT number, mark FROM pieces WHERE {_NAMED}"
        return dict(await self._file.run(lambda db: db.execute(sql, name).fetchall(), reads=True))

    async def pieces(self, name: DocumentName, numbers: Sequence[int]) -> list[bytes]:
        def read(db: sqlite3.Connection) -> dict[int, bytes]:
            found: dict[int, bytes] = {}
            for begin in range(0, len(numbers), _MOST_VARIABLES):
                some = numbers[begin : begin + _MOST_VARIABLES]
                sql = f"SELECT number, data FROM pieces WHERE {_NAMED} AND number IN ({marks(len(some))})"
                found.update(db.execute(sql, (*name, *some)))
            return found

        found = await self._file.run(read, reads=True)
        return [found[number] for number in numbers if number in found]

    async def drop_pieces(self, name: DocumentName) -> None:
        some = f"SELECT rowid FROM pieces WHERE {_NAMED} LIMIT {_PIECES_DELETED}"
        sql = f"DELETE FROM pieces WHERE rowid IN ({some})"
        while await self._file.run(lambda db: db.execute(sql, name).rowcount) == _PIECES_DELETED:
            pass

    async def waiting(self, kind: DocumentKind, label: str, most: int) -> list[DocumentName]:
        if not self._file.has_content:
            return []
        sql = (
            # SQLite takes the id from the row with the minimum.
            "SELECT kind, owner, id, min(lease_until_s) AS since_s FROM documents WHERE kind = ? AND label = ? "
            "AND lease_until_s <= ? AND expires_s > ? GROUP BY owner ORDER BY since_s LIMIT ?"
        )
        now_s = self._clock()
        values = kind, label, now_s, now_s, most
        rows = await self._file.run(lambda db: db.execute(sql, values).fetchall(), reads=True)
        return [DocumentName(*name) for *name, _ in rows]

    async def unfinished(self, kind: DocumentKind, owner: str) -> list[str]:
        sql = "SELECT id FROM documents WHERE kind = ? AND owner = ? AND lease_until_s IS NOT NULL AND expires_s > ?"
        values = kind, owner, self._clock()
        return [id_ for (id_,) in await self._file.run(lambda db: db.execute(sql, values).fetchall(), reads=True)]

    async def claim(self, name: DocumentName, lease_s: float) -> bool:
        now_s = self._clock()
        sql = f"UPDATE documents SET lease_until_s = ?, holder = ? WHERE {_NAMED} AND lease_until_s <= ?"
        values = now_s + lease_s, self._holder, *name, now_s
        return await self._file.run(lambda db: db.execute(sql, values).rowcount > 0)

    async def renew(self, names: Sequence[DocumentName], lease_s: float) -> list[DocumentName]:
        sql = f"UPDATE documents SET lease_until_s = ? WHERE {_NAMED} AND lease_until_s IS NOT NULL AND holder = ?"
        until_s = self._clock() + lease_s

        def renew(db: sqlite3.Connection) -> list[DocumentName]:
            return [name for name in names if not db.execute(sql, (until_s, *name, self._holder)).rowcount]

        return await self._file.run(renew)

    async def purge(self) -> None:
        if not self._file.has_content:
            return
        old, values = "SELECT kind, owner, id FROM documents WHERE expires_s <= ? LIMIT 256", (self._clock(),)
        while rows := await self._file.run(lambda db: db.execute(old, values).fetchall(), reads=True):
            for row in rows:
                await self._remove(DocumentName(*row))

    async def _remove(self, name: DocumentName) -> None:
        """Delete a document that has expired, and its pieces."""
        await self.drop_pieces(name)
        sql, values = f"DELETE FROM documents WHERE {_NAMED} AND expires_s <= ?", (*name, self._clock())
        await self._file.run(lambda db: db.execute(sql, values))


def _row(document: Document) -> tuple[Any, ...]:
    sizes = document.created_s, document.expires_s, document.num_bytes
    return (*document.name, document.label, *sizes, document.data, document.version)


def _document(row: Sequence[Any]) -> Document:
    kind, owner, id_, label, created_s, expires_s, num_bytes, data, version = row
    return Document(DocumentName(kind, owner, id_), label, created_s, expires_s, num_bytes, data, version)
