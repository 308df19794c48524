"""Reads the multipart body of an upload: into a temporary file, within bounds of size, time and number."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import BinaryIO, NamedTuple

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.types import Message

from services.gateway.batches.files import INPUT, MAX_NAME_CHARS
from services.gateway.batches.schema import file_ttl_s
from services.gateway.errors import ApiError, invalid

# Starlette keeps an upload of up to 1 MiB in memory. A larger upload is in a temporary file as a whole. So these bound
# memory and disk.
MAX_UPLOADS, MAX_OWNER_UPLOADS = 16, 4
UPLOAD_S = 600.0  # for all of an upload; 200 MiB in 10 minutes are 350 KB/s
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_MAX_FIELDS, _MAX_FIELD_BYTES = 8, 1024
_FORM_BYTES = 16 * 1024  # of the body besides the file: boundaries, headers, fields


class Upload(NamedTuple):
    """`ttl_s` None: the client leaves the expiry to the server."""

    filename: str
    file: BinaryIO
    num_bytes: int
    ttl_s: float | None


class Uploads:
    """The uploads that a gateway reads. Each takes a request's body from the network only as fast as it is stored."""

    def __init__(self, max_bytes: int, idle_s: float) -> None:
        """`max_bytes`: of a file. `idle_s`: the longest pause between two pieces of data."""
        self._max_bytes, self._idle_s = max_bytes, idle_s
        self._reading: Counter[str] = Counter()  # by owner

    @asynccontextmanager
    async def read(self, request: Request, owner: str) -> AsyncIterator[Upload]:
        """The upload; its file exists inside the context. Raises ApiError 400, 408, 413, 415 and 429, ClientDisconnect,
        and what Starlette's parser raises (HTTPException 400)."""
        header, parameters = parse_options_header(request.headers.get("content-type"))
        kind, charset = header.decode("latin-1"), parameters.get(b"charset", b"utf-8").decode("latin-1")
        if kind != "multipart/form-data":
            raise ApiError(
                415, f"the body must be multipart/form-data, not {kind[:80]!r}", code="unsupported_media_type"
            )
        if charset.lower() not in ("utf-8", "utf8"):  # another charset would give wrong text, or fail
            message = f"the charset of the body must be utf-8, not {charset[:80]!r}"
            raise ApiError(415, message, code="unsupported_media_type")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes + _FORM_BYTES:
            raise self._too_large()
        with self._entering(owner):
            form = await self._parse(request)
            try:
                yield self._check(form)
            finally:
                await form.close()

    async def _parse(self, request: Request) -> FormData:
        num_bytes = 0

        async def receive() -> Message:
            nonlocal num_bytes
            async with asyncio.timeout(self._idle_s):
                message = await request.receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes + _FORM_BYTES:
                raise self._too_large()
            return message

        bounded = Request(request.scope, receive)
        try:
            async with asyncio.timeout(UPLOAD_S):
                return await bounded.form(max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES)
        except TimeoutError:
            message = f"the body did not arrive within {UPLOAD_S:g} s, or stopped for {self._idle_s:g} s"
            raise ApiError(408, message, code="request_timeout") from None

    def _check(self, form: FormData) -> Upload:
        for name in form:
            if name != "file" and name not in _FIELDS:
                raise invalid(
                    name[:80], f"{name[:80]!r} is no field of a file; possible are file, {', '.join(_FIELDS)}"
                )
            if len(form.getlist(name)) > 1:
                raise invalid(name, f"{name} is given more than once")
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise invalid("file", "file: a part with a filename is needed", code="missing_required_parameter")
        if purpose is None:
            raise invalid("purpose", "purpose is missing", code="missing_required_parameter")
        if purpose != INPUT:
            raise invalid("purpose", f"purpose: {str(purpose)[:80]!r} is not possible, only {INPUT!r}")
        filename = file.filename or ""
        if not 1 <= len(filename) <= MAX_NAME_CHARS or not filename.isprintable():
            raise invalid("file", f"file: its name must have 1 to {MAX_NAME_CHARS} printable characters")
        num_bytes = file.size or 0
        if num_bytes == 0:
            raise invalid("file", "file: it is empty")
        if num_bytes > self._max_bytes:
            raise self._too_large()
        ttl_s = file_ttl_s(form.get("expires_after[anchor]"), form.get("expires_after[seconds]"))
        return Upload(filename, file.file, num_bytes, ttl_s)

    @contextmanager
    def _entering(self, owner: str) -> Iterator[None]:
        if self._reading[owner] >= MAX_OWNER_UPLOADS or self._reading.total() >= MAX_UPLOADS:
            message = f"too many uploads: at most {MAX_OWNER_UPLOADS} of an API key at a time, and {MAX_UPLOADS} of all"
            raise ApiError(429, message, retry_after_s=1.0)
        self._reading[owner] += 1
        try:
            yield
        finally:
            self._reading[owner] -= 1
            if not self._reading[owner]:
                del self._reading[owner]

    def _too_large(self) -> ApiError:
        message = f"file: it is larger than {self._max_bytes} bytes (--max-file-bytes)"
        return ApiError(413, message, param="file", code="request_too_large")
