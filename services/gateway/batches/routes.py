"""The paths of files and batches."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from services.gateway.batches.files import INPUT, OUTPUT, StoredFile
from services.gateway.batches.records import BatchRecord
from services.gateway.batches.schema import BatchRequest, UploadForm
from services.gateway.batches.service import Batches
from services.gateway.batches.uploads import Uploads
from services.gateway.errors import invalid
from services.gateway.openai.answers import JsonResponse
from services.gateway.openai.middleware import OtherApi, caller_of
from services.gateway.openapi.answers import BatchObject, BatchPage, DeletedFile, FileObject, FilePage
from services.gateway.openapi.description import described

FILES, BATCHES = "/v1/files", "/v1/batches"
# OpenAI's limits and defaults.
_MOST_FILES, _MOST_BATCHES, _FEW_BATCHES = 10_000, 100, 20
_READ_ERRORS = (400, 401, 404, 429, 500, 503)
_AFTER = {"after": "the id of the last entry of the page before"}
IDLE_S = 60.0  # an upload without any data for so long is ended


def files_api(batches: Batches) -> OtherApi:
    """The API of files."""
    gateway = batches.gateway
    uploads = Uploads(batches.limits.max_bytes, IDLE_S)

    @described(form=UploadForm, answer=FileObject, errors=(400, 401, 404, 408, 413, 415, 429, 500, 503))
    async def create_file(request: Request) -> Response:
        """Store a file of requests."""
        caller = caller_of(request)
        with gateway.access.quotas.entering(caller.key, new=False):
            files = batches.files
            async with uploads.read(request, caller.owner) as upload:
                stored = await files.add(caller.owner, *upload)
        return _json(stored.shown())

    @described(
        answer=FilePage,
        errors=_READ_ERRORS,
        query=_AFTER
        | {"limit": f"1 to {_MOST_FILES}", "order": "asc or desc, by time", "purpose": f"{INPUT} or {OUTPUT}"},
    )
    async def list_files(request: Request) -> Response:
        """Files of this API key."""
        order, purpose = request.query_params.get("order", "desc"), request.query_params.get("purpose")
        if order not in ("asc", "desc"):
            raise invalid("order", "order must be asc or desc")
        if purpose not in (None, INPUT, OUTPUT):
            raise invalid("purpose", f"purpose must be {INPUT} or {OUTPUT}")
        limit = _limit(request, _MOST_FILES, _MOST_FILES)
        found = await batches.files.page(
            caller_of(request).owner,
            purpose,
            after=request.query_params.get("after"),
            most=limit + 1,
            newest_first=order == "desc",
        )
        return _page([file.shown() for file in found], limit)

    async def found(request: Request) -> StoredFile:
        return await batches.files.find(caller_of(request).owner, request.path_params["file_id"])

    @described(answer=FileObject, errors=_READ_ERRORS)
    async def retrieve_file(request: Request) -> Response:
        """A file, without its content."""
        return _json((await found(request)).shown())

    @described(text="application/octet-stream", errors=_READ_ERRORS)
    async def file_content(request: Request) -> Response:
        """The content of a file."""
        file = await found(request)
        headers = {
            "content-length": str(file.num_bytes),
            "content-disposition": f"attachment; filename*=utf-8''{quote(file.filename)}",
        }
        media_type = "application/octet-stream"
        if request.method == "HEAD":
            return Response(headers=headers, media_type=media_type)
        return StreamingResponse(batches.files.content(file), headers=headers, media_type=media_type)

    @described(answer=DeletedFile, errors=(*_READ_ERRORS, 409))
    async def delete_file(request: Request) -> Response:
        """Delete a file that no batch reads."""
        file = await found(request)
        await batches.delete_file(file)
        return _json({"id": file.name.id, "object": "file", "deleted": True})

    routes = [
        Route(FILES, create_file, methods=["POST"]),
        Route(FILES, list_files, methods=["GET"]),
        Route(FILES + "/{file_id}", retrieve_file, methods=["GET"]),
        Route(FILES + "/{file_id}", delete_file, methods=["DELETE"]),
        Route(FILES + "/{file_id}/content", file_content, methods=["GET"]),
    ]
    return OtherApi(FILES, routes, {})


def batches_api(batches: Batches) -> OtherApi:
    """The API of batches."""
    gateway = batches.gateway

    @described(body=BatchRequest, answer=BatchObject, errors=(400, 401, 404, 408, 413, 415, 429, 500, 503))
    async def create_batch(request: Request) -> Response:
        """Run the requests of a file."""
        caller = caller_of(request)
        with gateway.access.quotas.entering(caller.key, new=False), gateway.held_body() as held:
            parsed, _ = await gateway.read_request(BatchRequest, request, held)
            batch = await batches.create(parsed, caller.owner)
        return _json(batch.shown())

    @described(answer=BatchPage, errors=_READ_ERRORS, query=_AFTER | {"limit": f"1 to {_MOST_BATCHES}"})
    async def list_batches(request: Request) -> Response:
        """Batches of this API key, the newest first."""
        limit, after = _limit(request, _MOST_BATCHES, _FEW_BATCHES), request.query_params.get("after")
        found = await batches.page(caller_of(request).owner, after=after, most=limit + 1)
        return _page([batch.shown() for batch in found], limit)

    async def found(request: Request) -> BatchRecord:
        return await batches.find(caller_of(request).owner, request.path_params["batch_id"])

    @described(answer=BatchObject, errors=_READ_ERRORS)
    async def retrieve_batch(request: Request) -> Response:
        """A batch, and how far it is."""
        return _json((await found(request)).shown())

    @described(answer=BatchObject, errors=_READ_ERRORS)
    async def cancel_batch(request: Request) -> Response:
        """End a batch; the lines with a result stay."""
        batch = await batches.cancel(caller_of(request).owner, request.path_params["batch_id"])
        return _json(batch.shown())

    routes = [
        Route(BATCHES, create_batch, methods=["POST"]),
        Route(BATCHES, list_batches, methods=["GET"]),
        Route(BATCHES + "/{batch_id}", retrieve_batch, methods=["GET"]),
        Route(BATCHES + "/{batch_id}/cancel", cancel_batch, methods=["POST"]),
    ]
    return OtherApi(BATCHES, routes, {})


def _json(value: Any) -> JsonResponse:
    return JsonResponse(orjson.dumps(value))


def _limit(request: Request, most: int, default: int) -> int:
    text = request.query_params.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= 6 and 1 <= int(text) <= most):
        raise invalid("limit", f"limit must be between 1 and {most}")
    return int(text)


def _page(entries: list[dict[str, Any]], limit: int) -> JsonResponse:
    """The first `limit` entries."""
    page = entries[:limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return _json({"object": "list", "data": page, **ends, "has_more": len(entries) > limit})
