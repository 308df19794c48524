"""The error type of the HTTP and gRPC APIs: an HTTP status, error fields of OpenAI and vLLM, and a gRPC status code."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any, Literal

import grpc

from paceline.v1 import inference_pb2

QueueLimit = Literal["requests", "tokens"]
CLIENT_CLOSED_REQUEST = 499  # the client has gone, or has aborted the request
# An error names at most this many wrong fields, as vLLM's errors do. A field's path is cut to MAX_PATH_CHARS, because a
# client can put long names into it.
MAX_NAMED_FIELDS = 10
MAX_PATH_CHARS = 100
_GRPC_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    CLIENT_CLOSED_REQUEST: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
# google.rpc.Code of a failed request -> HTTP status. Any other code is an internal error, 500.
_HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: 400,
    grpc.StatusCode.OUT_OF_RANGE.value[0]: 400,
    grpc.StatusCode.FAILED_PRECONDITION.value[0]: 400,
    grpc.StatusCode.NOT_FOUND.value[0]: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: 429,
    grpc.StatusCode.UNAVAILABLE.value[0]: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED.value[0]: 504,
}
# vLLM's names. It has none for the last two statuses.
_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    429: "RateLimitError",
    504: "TimeoutError",
}
# OpenAI's clients compare `code` with this name. Every other `code` is the HTTP status, as vLLM's.
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
_REASONS = {429: "rate_limit_exceeded", 503: "service_unavailable", 504: "deadline_exceeded"}
QUEUE_LIMITS: dict[int, QueueLimit] = {
    inference_pb2.QUEUE_LIMIT_REQUESTS: "requests",
    inference_pb2.QUEUE_LIMIT_TOKENS: "tokens",
}
# A retry cannot succeed: the request itself failed, or its time is over. OpenAI's clients retry twice after any 5xx,
# and a request that kills its worker would kill a worker at each attempt.
_FINAL = (500, 504)
# RFC 6750 §3: only a call that shows a key gets an error code.
_CHALLENGES = {"missing_api_key": 'Bearer realm="paceline"'}
_WRONG_KEY = 'Bearer realm="paceline", error="invalid_token"'


class ApiError(Exception):
    """A request that fails.

    `status` is the HTTP status; `param` names the request field at fault; `code` is the machine-readable reason;
    `retry_after_s` tells the client when to come back.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code if code is not None else _REASONS.get(status)
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """vLLM's error type."""
        return _TYPES.get(self.status) or _phrase(self.status)

    @property
    def grpc_code(self) -> grpc.StatusCode:
        """The status code for the gRPC API."""
        return _GRPC_CODES.get(self.status, grpc.StatusCode.INTERNAL)

    @property
    def headers(self) -> dict[str, str]:
        """`retry-after` in whole seconds (standard HTTP) and `retry-after-ms` (OpenAI's clients read it). For a final
        error: `x-should-retry: false`. For a missing or unknown key: `www-authenticate`."""
        if self.status in _FINAL:
            return {"x-should-retry": "false"}
        if self.status == 401:
            return {"www-authenticate": _CHALLENGES.get(self.code or "", _WRONG_KEY)}
        if self.retry_after_s is None:
            return {}
        return {
            "retry-after": str(max(1, math.ceil(self.retry_after_s))),
            "retry-after-ms": str(math.ceil(1000 * self.retry_after_s)),
        }

    def body(self) -> dict[str, Any]:
        """The error object of vLLM, which OpenAI's clients read too, and `reason`: a name for the error, or null."""
        code = self.code if self.code == CONTEXT_LENGTH_EXCEEDED else self.status
        error = {"message": self.message, "type": self.type, "param": self.param, "code": code, "reason": self.code}
        return {"error": error}


class QueueFull(ApiError):
    """A 429: the gateway or the scheduler has no room for the request. `limit`: which limit of the
    queue was reached, that of requests or that of tokens."""

    def __init__(self, message: str, limit: QueueLimit, *, retry_after_s: float) -> None:
        super().__init__(429, message, retry_after_s=retry_after_s)
        self.limit = limit


class Gone(Exception):
    """The client has closed its connection before its request was submitted. No answer is due."""


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def unknown_parameter(path: str) -> ApiError:
    """A 400 for a field that the API does not have, in OpenAI's words. `path`: as the client wrote it."""
    path = path[:MAX_PATH_CHARS]
    return invalid(path, f"Unknown parameter: '{path}'", code="unknown_parameter")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "BadRequestError" if status < 500 else "InternalServerError"


def is_final(code: int) -> bool:
    """Whether this google.rpc.Code of an Ending stands for an internal error (HTTP status 500). Such a request must not
    run again for a retry: it may have caused the error."""
    return code not in _HTTP_STATUS


def from_scheduler(code: int, message: str, field: str, retry_after_s: float) -> ApiError:
    """The error for an Ending with FINISH_REASON_ERROR. `code` is a google.rpc.Code."""
    status = _HTTP_STATUS.get(code, 500)
    return ApiError(
        status,
        message or "the request failed",
        param=field or None,
        retry_after_s=retry_after_s if retry_after_s > 0 else (1.0 if status == 429 else None),
    )
