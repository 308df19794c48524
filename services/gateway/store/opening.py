"""Opens the stores that a setting names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.gateway.store.documents import DocumentStore
from services.gateway.store.records import ResponseStore
from services.gateway.store.sqlite_documents import SqliteDocuments
from services.gateway.store.sqlite_file import SqliteFile
from services.gateway.store.sqlite_store import SqliteStore
from services.gateway.store.urls import NONE, REDIS, SQLITE, SQLITE_FILE
from services.runtime.processes import state_folder

if TYPE_CHECKING:
    from services.gateway.store.redis_link import RedisLink


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores of responses and of documents, and the file or server in which both keep their data."""

    responses: ResponseStore
    documents: DocumentStore
    _of: SqliteFile | RedisLink

    async def close(self) -> None:
        """End the connections and threads."""
        await self._of.close()


def open_stores(value: str, *, ttl_s: float, max_bytes: int) -> Stores | None:
    """The stores; None for `none`. `sqlite`: a file in the user's state folder; sqlite:////var/x.db is absolute.
    `ttl_s`, `max_bytes`: of responses; Redis ignores `max_bytes`.

    Connects at the first use. Raises OSError for `sqlite` if the user has no home.
    """
    if value == NONE:
        return None
    if value.startswith(REDIS):
        # The client is large, and imports OpenTelemetry where that is installed.
        from services.gateway.store.redis_documents import RedisDocuments
        from services.gateway.store.redis_link import RedisLink
        from services.gateway.store.redis_store import RedisStore

        link = RedisLink(value)
        return Stores(RedisStore(link, ttl_s=ttl_s), RedisDocuments(link), link)
    path = state_folder() / "responses.db" if value == SQLITE else Path(value.removeprefix(SQLITE_FILE))
    file = SqliteFile(path)
    return Stores(SqliteStore(file, ttl_s=ttl_s, max_bytes=max_bytes), SqliteDocuments(file), file)
