"""Errors in Anthropic's shape."""

from __future__ import annotations

from typing import Any

import orjson

from services.gateway.errors import ApiError
from services.gateway.openai.answers import JsonResponse

# Anthropic's names. Where its API answers 529, this server answers 503: the standard status, which proxies know.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    told: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code is not None:
        told["details"] = {"error_code": error.code}
    return {"type": "error", "error": told, "request_id": request_id}


def write_error(error: ApiError, request_id: str) -> JsonResponse:
    """The answer to a request that fails."""
    return JsonResponse(orjson.dumps(error_body(error, request_id)), error.status, error.headers)
