"""Opens the store that a setting names."""

from __future__ import annotations

from pathlib import Path

from services.gateway.store.records import ResponseStore
from services.gateway.store.redis_store import RedisStore
from services.gateway.store.sqlite_store import SqliteStore
from services.gateway.store.urls import NONE, REDIS, SQLITE, SQLITE_FILE
from services.runtime.processes import state_folder


def open_store(value: str, *, ttl_s: float, max_bytes: int) -> ResponseStore | None:
    """The store; None for `none`. `sqlite`: a file in the user's state folder; sqlite:////var/x.db is absolute.

    Connects at the first use. Raises OSError if the user has no home.
    """
    if value == NONE:
        return None
    if value.startswith(REDIS):
        return RedisStore(value, ttl_s=ttl_s)
    path = state_folder() / "responses.db" if value == SQLITE else Path(value.removeprefix(SQLITE_FILE))
    return SqliteStore(path, ttl_s=ttl_s, max_bytes=max_bytes)
