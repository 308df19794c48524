"""What clients send: a batch, a line of its input file, the expiry of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import orjson
from pydantic import AfterValidator, BaseModel, Field, PrivateAttr

from services.gateway.errors import invalid
from services.gateway.fields.closed import ClosedPart
from services.gateway.openai.schema import RequestBody, parse

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
ENDPOINTS: tuple[str, ...] = get_args(Endpoint)
WINDOW_S = 24 * 3600
MAX_CUSTOM_ID_CHARS = 256
# OpenAI's limits.
MIN_TTL_S, MAX_TTL_S = 3600, 30 * 86400
MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512
_ANCHOR = "created_at"


def _metadata(value: dict[str, str]) -> dict[str, str]:
    if len(value) > MAX_METADATA:
        raise ValueError(f"at most {MAX_METADATA} pairs are possible")
    for name, text in value.items():
        if len(name) > MAX_METADATA_KEY_CHARS or len(text) > MAX_METADATA_CHARS:
            raise ValueError(
                f"keys have at most {MAX_METADATA_KEY_CHARS} characters, and values {MAX_METADATA_CHARS} characters"
            )
    return value


Metadata = Annotated[dict[str, str], AfterValidator(_metadata)]


class ExpiresAfter(ClosedPart):
    """A file is deleted `seconds` after it was made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S)]


class BatchRequest(RequestBody):
    """POST /v1/batches."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[Mapping[str, str]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}

    input_file_id: Annotated[str, Field(max_length=256)]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class UploadForm(BaseModel):
    """The multipart body of POST /v1/files, for /openapi.json only: uploads.py parses the body."""

    file: Annotated[bytes, Field(json_schema_extra={"format": "binary"})]
    purpose: Literal["batch"]
    anchor: Annotated[Literal["created_at"] | None, Field(alias="expires_after[anchor]")] = None
    seconds: Annotated[int | None, Field(alias="expires_after[seconds]", ge=MIN_TTL_S, le=MAX_TTL_S)] = None


class BatchLine(RequestBody):
    """One line of an input file. `request`: its body as JSON, which the endpoint parses."""

    custom_id: Annotated[str, Field(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]
    _request: bytes = PrivateAttr(b"")

    @classmethod
    def from_body(cls, body: Any, max_model_len: int) -> Self:
        line = parse(cls, body, max_model_len)
        # A large line is parsed in the process for large bodies. So this call also encodes its JSON there.
        line._request = orjson.dumps(line.body)
        line.body = {name: line.body[name] for name in ("model", "stream", "background") if name in line.body}
        return line

    @property
    def request(self) -> bytes:
        return self._request


def file_ttl_s(anchor: object, seconds: object) -> float | None:
    """The time to live in seconds from the two fields of a form; None if neither is given. Raises ApiError 400."""
    if anchor is None and seconds is None:
        return None
    if anchor != _ANCHOR:
        raise invalid("expires_after[anchor]", f"expires_after[anchor] must be {_ANCHOR!r}")
    text = str(seconds)
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and MIN_TTL_S <= int(text) <= MAX_TTL_S):
        message = f"expires_after[seconds] must be a whole number between {MIN_TTL_S} and {MAX_TTL_S}"
        raise invalid("expires_after[seconds]", message)
    return float(text)
