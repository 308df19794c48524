"""Idempotency keys: a client's name for a request, with which it can ask for the same request again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson

from paceline.v1 import inference_pb2
from services.gateway.errors import ApiError, invalid

IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class RequestKey:
    """A client's name for a request, unique within its tenant and owner. `fingerprint`: differs if the requests differ.

    `owner`: the name of the API key, "" without keys. With the same idempotency key, another owner gets another
    answer id, other seeds and another stored request. So no API key can read or resume the requests of another API key,
    at any gateway.
    """

    tenant: str
    key: str
    fingerprint: bytes
    field: str  # where the client gave the key, for error messages
    owner: str

    @property
    def answer_id(self) -> str:
        """32 hexadecimal digits, the same at every gateway."""
        return self._digest("answer").hex()[:32]

    def seed(self, prompt: int) -> int:
        """A seed for each of the request's prompts, the same at every gateway."""
        return int.from_bytes(self._digest(f"seed {prompt}")[:8], "little")

    def other_request(self) -> ApiError:
        """The error if the key belongs to another request."""
        message = f"{self.field}: this key was used for another request; a new request needs a new key"
        return ApiError(422, message, param=self.field, code="idempotency_key_reused")

    def _digest(self, purpose: str) -> bytes:
        # The length of the tenant makes the text unambiguous: no two pairs of tenant and key give the same bytes. The
        # same holds for the owner: a name has no colon, and only texts with an owner begin with "owner ".
        owner = f"owner {self.owner}:" if self.owner else ""
        return sha256(f"{owner}{purpose}:{len(self.tenant)}:{self.tenant}:{self.key}".encode()).digest()


def check_key(values: Sequence[str], field: str) -> str | None:
    """The key, None if there is none. Raises ApiError 400."""
    if not values:
        return None
    if len(values) > 1:
        raise invalid(field, f"{field} is given {len(values)} times")
    key = values[0]
    if not 1 <= len(key) <= MAX_KEY_CHARS or not (key.isascii() and key.isprintable()):
        raise invalid(field, f"{field} has 1 to {MAX_KEY_CHARS} printable ASCII characters")
    return key


def body_fingerprint(path: str, body: Any) -> bytes:
    """The fingerprint of a decoded JSON body. The order of its fields does not matter. Raises ApiError 400."""
    try:
        written = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # orjson cannot write more than 254 levels, but it can read more. Unknown fields may be nested that deep.
        raise invalid(None, f"with an {IDEMPOTENCY_KEY} the body must not be nested deeper than 254 levels") from None
    return sha256(path.encode() + b"\0" + written).digest()


def message_fingerprint(request: inference_pb2.GenerateRequest) -> bytes:
    """The fingerprint of a gRPC request, the same for each attempt."""
    same = inference_pb2.GenerateRequest()
    same.CopyFrom(request)
    for attempt_only in ("request_id", "deadline_s", "ttft_slo_s", "resume_after", "resume_token_ids"):
        same.ClearField(attempt_only)
    return sha256(same.SerializeToString(deterministic=True)).digest()
