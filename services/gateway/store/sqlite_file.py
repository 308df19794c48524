"""An SQLite file, which all gateways of a machine may share: opens it, and runs transactions in a thread."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from services.gateway.store.records import IN_PROGRESS, unavailable
from services.runtime.logs import get_logger

_log = get_logger(__name__)
T = TypeVar("T")

# In the file's user_version. A file of another version is refused.
_VERSION = 1
# SQLite cuts the file of the write-ahead log to this size when it starts the log anew. Without this limit, the log
# would keep the size of the largest transaction so far.
_LOG_BYTES = 64 * 2**20
# How long a write waits for the writes of other gateways.
_BUSY_S = 5.0
# What changes every second has its own table, `progress`, because SQLite writes a whole row anew, and a request may
# have megabytes. `documents.lease_until_s` is null for a document without work.
# Triggers count each owner's bytes of responses in the table `usage`. While that table is empty, opening the file fills
# it: a file from an earlier release, without the triggers, has responses and no counts.
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS responses (
  owner TEXT NOT NULL, id TEXT NOT NULL, model TEXT NOT NULL, created_s INTEGER NOT NULL, background INTEGER NOT NULL,
  fingerprint BLOB NOT NULL, request BLOB NOT NULL, work BLOB NOT NULL, status TEXT NOT NULL, result BLOB NOT NULL,
  expires_s REAL NOT NULL, num_bytes INTEGER NOT NULL,
  PRIMARY KEY (owner, id)
);
CREATE INDEX IF NOT EXISTS by_expiry ON responses (expires_s, num_bytes);
CREATE TABLE IF NOT EXISTS progress (
  owner TEXT NOT NULL, id TEXT NOT NULL, background INTEGER NOT NULL, lease_until_s REAL NOT NULL, tokens BLOB NOT NULL,
  PRIMARY KEY (owner, id),
  FOREIGN KEY (owner, id) REFERENCES responses ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS by_lease ON progress (lease_until_s) WHERE background;
CREATE INDEX IF NOT EXISTS ended ON responses (owner, expires_s, num_bytes) WHERE status <> '{IN_PROGRESS}';
CREATE TABLE IF NOT EXISTS usage (owner TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS use_added AFTER INSERT ON responses BEGIN
  INSERT INTO usage VALUES (NEW.owner, NEW.num_bytes)
  ON CONFLICT (owner) DO UPDATE SET num_bytes = num_bytes + NEW.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS use_changed AFTER UPDATE OF num_bytes ON responses BEGIN
  UPDATE usage SET num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes WHERE owner = NEW.owner;
END;
CREATE TRIGGER IF NOT EXISTS use_deleted AFTER DELETE ON responses BEGIN
  UPDATE usage SET num_bytes = num_bytes - OLD.num_bytes WHERE owner = OLD.owner;
  DELETE FROM usage WHERE owner = OLD.owner AND num_bytes <= 0;
END;
INSERT INTO usage SELECT owner, sum(num_bytes) FROM responses WHERE NOT EXISTS (SELECT 1 FROM usage) GROUP BY owner;
CREATE TABLE IF NOT EXISTS documents (
  kind TEXT NOT NULL, owner TEXT NOT NULL, id TEXT NOT NULL, label TEXT NOT NULL, created_s REAL NOT NULL,
  expires_s REAL NOT NULL, num_bytes INTEGER NOT NULL, data BLOB NOT NULL, version INTEGER NOT NULL, lease_until_s REAL,
  holder TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (kind, owner, id)
);
CREATE INDEX IF NOT EXISTS documents_by_time ON documents (kind, owner, created_s, id);
CREATE INDEX IF NOT EXISTS documents_by_expiry ON documents (expires_s);
CREATE INDEX IF NOT EXISTS documents_by_lease ON documents (kind, label, lease_until_s) WHERE lease_until_s IS NOT NULL;
CREATE TABLE IF NOT EXISTS pieces (
  kind TEXT NOT NULL, owner TEXT NOT NULL, id TEXT NOT NULL, number INTEGER NOT NULL, mark INTEGER NOT NULL,
  data BLOB NOT NULL,
  PRIMARY KEY (kind, owner, id, number),
  FOREIGN KEY (kind, owner, id) REFERENCES documents ON DELETE CASCADE
);
PRAGMA user_version = {_VERSION};
COMMIT;
"""


class SqliteFile:
    """The file is opened at the first use, because most gateways store nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # One thread: SQLite would let two threads of a process wait for each other's locks.
        self._thread = ThreadPoolExecutor(1, "store")
        self._opened: sqlite3.Connection | None = None
        self._locked_s = 0.0  # when a write last waited in vain for another process, by time.monotonic

    @property
    def has_content(self) -> bool:
        """Whether the file exists. If not, nothing was ever stored."""
        return self._opened is not None or self._path.exists()

    async def run(self, work: Callable[[sqlite3.Connection], T], *, reads: bool = False) -> T:
        """Run a transaction in the file's thread. `reads`: it writes nothing, so another process's lock cannot delay
        it. Raises ApiError 503 if the file fails."""
        asked_s = time.monotonic()

        def run() -> T:
            # When a write waits in vain for the lock, the writes that came meanwhile fail, too. Otherwise they would
            # wait one after the other, and a hundred requests would hang for minutes.
            if not reads and asked_s < self._locked_s:
                raise sqlite3.OperationalError("database is locked")
            try:
                db = self._connection()
                with db:  # commits, or rolls back
                    return work(db)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                    self._locked_s = time.monotonic()
                raise

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except (sqlite3.Error, OSError) as error:
            _log.error("the store failed", file=str(self._path), error=str(error))
            raise unavailable(error) from error

    async def close(self) -> None:
        """Close the file and end the thread."""

        def close() -> None:
            if self._opened is not None:
                self._opened.close()
                self._opened = None

        await asyncio.get_running_loop().run_in_executor(self._thread, close)
        self._thread.shutdown(wait=False)

    def _connection(self) -> sqlite3.Connection:
        if self._opened is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Responses are private. SQLite gives its other files the mode of this one.
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            db = sqlite3.connect(self._path, timeout=_BUSY_S, check_same_thread=False)
            try:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
                db.execute("PRAGMA foreign_keys = ON")
                db.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose the last writes, a crash loses none
                (version,) = db.execute("PRAGMA user_version").fetchone()
                if version not in (0, _VERSION):
                    raise sqlite3.DatabaseError(f"the file has version {version}, and this server reads {_VERSION}")
                db.executescript(_SCHEMA)
            except BaseException:
                db.close()
                raise
            self._opened = db
        return self._opened


def marks(count: int) -> str:
    """Placeholders of an SQL statement."""
    return ", ".join("?" * count)
