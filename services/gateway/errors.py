"""One error type for both fronts: an HTTP status with OpenAI's error fields, and its gRPC status code."""

from __future__ import annotations

import math
from typing import Any

import grpc

CLIENT_CLOSED_REQUEST = 499  # the client has gone and does not read this status
_GRPC_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
# google.rpc.Code of a failed request -> HTTP status; every other code is a fault of ours, 500.
_HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: 400,
    grpc.StatusCode.OUT_OF_RANGE.value[0]: 400,
    grpc.StatusCode.FAILED_PRECONDITION.value[0]: 400,
    grpc.StatusCode.NOT_FOUND.value[0]: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: 429,
    grpc.StatusCode.UNAVAILABLE.value[0]: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED.value[0]: 504,
}
_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}
_CODES = {429: "rate_limit_exceeded", 503: "service_unavailable", 504: "deadline_exceeded"}
# The request failed by itself, or its time is over. OpenAI's clients ask twice more after any 5xx, and a request that
# kills its worker would kill one at each attempt of each of them.
_FINAL = (500, 504)


class ApiError(Exception):
    """A request that fails.

    `status` is the HTTP status; `param` names the request field at fault; `code` is OpenAI's machine-readable reason;
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
        self.code = code if code is not None else _CODES.get(status)
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's error type: whose fault it is."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def grpc_code(self) -> grpc.StatusCode:
        """The status code the gRPC front answers with."""
        return _GRPC_CODES.get(self.status, grpc.StatusCode.INTERNAL)

    @property
    def headers(self) -> dict[str, str]:
        """When to come back: in whole seconds, as HTTP has it, and more exactly for clients that know (OpenAI's do); or
        that it is no use (which they know as well)."""
        if self.status in _FINAL:
            return {"x-should-retry": "false"}
        if self.retry_after_s is None:
            return {}
        return {
            "retry-after": str(max(1, math.ceil(self.retry_after_s))),
            "retry-after-ms": str(math.ceil(1000 * self.retry_after_s)),
        }

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class Gone(Exception):
    """The client has closed its connection before its request was submitted. No answer is due."""


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def is_final(code: int) -> bool:
    """Whether a request that ended with this google.rpc.Code would meet the same fate again: it is a fault of ours, or
    of its own."""
    return code not in _HTTP_STATUS


def from_scheduler(code: int, message: str, field: str, retry_after_s: float) -> ApiError:
    """The error for an Ending with FINISH_REASON_ERROR (`code` is a google.rpc.Code)."""
    status = _HTTP_STATUS.get(code, 500)
    return ApiError(
        status,
        message or "the request failed",
        param=field or None,
        retry_after_s=retry_after_s if retry_after_s > 0 else (1.0 if status == 429 else None),
    )
