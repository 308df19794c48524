"""Files: JSONL that clients upload, and what batches write."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import orjson

from services.gateway.errors import ApiError
from services.gateway.store.documents import ContentPiece, Document, DocumentKind, DocumentName, DocumentStore

PIECE_BYTES = 2**20
MAX_LINES = 50_000  # OpenAI's limit of a batch
MAX_FILES = 1000  # of one owner
MAX_NAME_CHARS = 255
INPUT, OUTPUT = "batch", "batch_output"  # purposes
# Kinds of documents with a size that counts for their owner's limit. A batch counts the size of its results until its
# output files are stored.
_KINDS: tuple[DocumentKind, ...] = ("file", "batch")
# The label of a file that is being written. Such a file counts for its owner, and no client sees it. If its gateway
# dies meanwhile, the file is deleted after this time.
_WRITING, _WRITING_S = "writing", 3600.0


@dataclass(frozen=True, slots=True)
class FileLimits:
    """The limits of files. `max_bytes`: of one file. `max_owner_bytes`: of all files of one owner and the results of
    its running batches. `ttl_s`: the time until a file without `expires_after` is deleted."""

    max_bytes: int = 200 * 2**20
    max_owner_bytes: int = 2 * 2**30
    ttl_s: float = 30 * 86400.0


class StoredFile(NamedTuple):
    """What is known of a file besides its content."""

    name: DocumentName
    num_bytes: int
    num_pieces: int
    created_s: int
    expires_s: int
    filename: str
    purpose: str

    def shown(self) -> dict[str, Any]:
        """The file object."""
        return {
            "id": self.name.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Line(NamedTuple):
    """`number` counts from 1. `text` None: the line is longer than allowed."""

    number: int
    text: bytes | None


class Files:
    """The files of all owners. Raises ApiError 503 where the store fails."""

    def __init__(self, store: DocumentStore, limits: FileLimits) -> None:
        self._store = store
        self.limits = limits

    async def add(self, owner: str, filename: str, file: BinaryIO, num_bytes: int, ttl_s: float | None) -> StoredFile:
        """Store an uploaded file. Raises ApiError 400 and 413 that name the limit."""
        num_lines = await asyncio.to_thread(_count_lines, file)
        if num_lines > MAX_LINES:
            raise ApiError(400, f"file: it has {num_lines} lines, and at most {MAX_LINES} are possible", param="file")
        # Checked before the file is stored: a refused upload must not count, because it could end a running batch.
        await self.check_usage(owner, "file", num_bytes)
        name = DocumentName("file", owner, f"file-{uuid.uuid4().hex}")
        begun = await self._begin(name, filename, INPUT, ttl_s or self.limits.ttl_s, num_bytes)
        assert begun is not None
        try:
            await self.check_usage(owner, "file")  # again, with what is uploaded meanwhile
            number = 0
            while data := await asyncio.to_thread(file.read, PIECE_BYTES):
                await self._store.add_pieces(name, [ContentPiece(number, 0, data)])
                number += 1
            return await self._end(begun, num_bytes, number)
        except BaseException:
            await asyncio.shield(self._store.delete(name))
            raise

    async def write(self, owner: str, file_id: str, filename: str, ttl_s: float, chunks: AsyncIterator[bytes]) -> None:
        """Store the output of a batch. Another gateway may write the same file, or have written it: the pieces are the
        same. Reads all chunks in any case, because their source counts tokens."""
        name = DocumentName("file", owner, file_id)
        begun = await self._begin(name, filename, OUTPUT, ttl_s, 0)
        if begun is None and (begun := await self._store.get(name)) is None:
            raise ApiError(503, f"the file {file_id} has just expired", retry_after_s=1.0)
        if begun.label != _WRITING:
            async for _ in chunks:
                pass
            return
        buffer, number, num_bytes = bytearray(), 0, 0
        async for chunk in chunks:
            buffer += chunk
            num_bytes += len(chunk)
            while len(buffer) >= PIECE_BYTES:
                await self._store.add_pieces(name, [ContentPiece(number, 0, bytes(buffer[:PIECE_BYTES]))])
                del buffer[:PIECE_BYTES]
                number += 1
        if buffer:
            await self._store.add_pieces(name, [ContentPiece(number, 0, bytes(buffer))])
            number += 1
        await self._end(begun, num_bytes, number)

    async def find(self, owner: str, file_id: str, *, param: str = "file_id") -> StoredFile:
        """The file. Raises ApiError 404 if this owner has none of this id."""
        document = await self._store.get(DocumentName("file", owner, file_id))
        if document is None or document.label == _WRITING:
            raise _unknown(file_id, param)
        return _file(document)

    async def page(
        self, owner: str, purpose: str | None, *, after: str | None, most: int, newest_first: bool
    ) -> list[StoredFile]:
        """The owner's files by time, behind the one with the id `after`. Raises ApiError 404 for an unknown `after`."""
        last = None
        if after is not None and (last := await self._store.get(DocumentName("file", owner, after))) is None:
            raise _unknown(after, "after")
        labels = [purpose] if purpose is not None else [INPUT, OUTPUT]
        found = await self._store.page("file", owner, labels, after=last, most=most, newest_first=newest_first)
        return [_file(document) for document in found]

    async def delete(self, file: StoredFile) -> None:
        """Delete the file at once."""
        await self._store.delete(file.name)

    async def content(self, file: StoredFile) -> AsyncIterator[bytes]:
        """The bytes of the file, in pieces. Raises ApiError 404 if it is deleted meanwhile."""
        for number in range(file.num_pieces):
            found = await self._store.pieces(file.name, [number])
            if not found:
                raise _unknown(file.name.id, "file_id")
            yield found[0]

    async def lines(self, file: StoredFile, max_bytes: int) -> AsyncIterator[Line]:
        """The lines of the file except empty ones. Holds one piece and one line. `max_bytes`: of a line."""
        number, rest, is_long = 1, bytearray(), False
        async for piece in self.content(file):
            *ends, last = piece.split(b"\n")
            for end in ends:
                rest += end
                if is_long or len(rest) > max_bytes:
                    yield Line(number, None)
                elif text := rest.strip():
                    yield Line(number, bytes(text))
                number, rest, is_long = number + 1, bytearray(), False
            rest += last
            if len(rest) > max_bytes:
                is_long, rest = True, bytearray()
        if is_long:
            yield Line(number, None)
        elif text := rest.strip():
            yield Line(number, bytes(text))

    async def check_usage(self, owner: str, param: str, more_bytes: int = 0) -> None:
        """Raises ApiError 413 if the owner's files, with `more_bytes` more, exceed a limit. Files that are being
        written count, too."""
        what = ""
        if (await self._store.usage("file", owner)).num_documents > MAX_FILES:
            what = f"you may have at most {MAX_FILES} files"
        elif await self.exceed_bytes(owner, more_bytes):
            what = "all your files and the results of your running batches together may have at most "
            what += f"{self.limits.max_owner_bytes} bytes (--max-files-bytes)"
        if what:
            message = f"{param}: {what}; delete files that you do not need"
            raise ApiError(413, message, param=param, code="files_limit_exceeded")

    async def exceed_bytes(self, owner: str, more_bytes: int = 0) -> bool:
        """Whether the owner's files and the results of its running batches, with `more_bytes` more, are above the
        limit."""
        sizes = [(await self._store.usage(kind, owner)).num_bytes for kind in _KINDS]
        return sum(sizes) + more_bytes > self.limits.max_owner_bytes

    async def _begin(
        self, name: DocumentName, filename: str, purpose: str, ttl_s: float, num_bytes: int
    ) -> Document | None:
        """The document of a file that is being written. None if the file exists already."""
        now_s = time.time()
        data = orjson.dumps({"filename": filename, "purpose": purpose, "ttl_s": ttl_s})
        document = Document(name, _WRITING, now_s, now_s + _WRITING_S, num_bytes, data)
        return document if await self._store.put(document) else None

    async def _end(self, begun: Document, num_bytes: int, num_pieces: int) -> StoredFile:
        data = orjson.loads(begun.data)
        expires_s = begun.created_s + data["ttl_s"]
        written = orjson.dumps({**data, "num_pieces": num_pieces})
        whole = Document(begun.name, data["purpose"], begun.created_s, expires_s, num_bytes, written, begun.version)
        await self._store.replace(whole)  # no effect if another gateway has already stored the same file
        return _file(whole)


def _file(document: Document) -> StoredFile:
    data = orjson.loads(document.data)
    return StoredFile(
        document.name,
        document.num_bytes,
        data["num_pieces"],
        int(document.created_s),
        int(document.expires_s),
        data["filename"],
        data["purpose"],
    )


def _unknown(file_id: str, param: str) -> ApiError:
    return ApiError(404, f"{param}: there is no file {file_id[:120]!r} here", param=param, code="file_not_found")


def _count_lines(file: BinaryIO) -> int:
    """Count the lines, and go back to the beginning of the file."""
    count, last = 0, b"\n"
    while data := file.read(PIECE_BYTES):
        count, last = count + data.count(b"\n"), data[-1:]
    file.seek(0)
    return count + (last != b"\n")
