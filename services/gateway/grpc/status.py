"""Ends gRPC calls with a status that names the field at fault."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio

from services.gateway.errors import ApiError


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ApiError) -> NoReturn:
    """End the call with the error's status. The trailers have the field, and when to retry."""
    error.__traceback__ = error.__context__ = None  # their frames hold the request
    trailers = []
    if error.param:
        trailers.append(("field", error.param))
    if error.retry_after_s is not None:
        trailers.append(("retry-after-s", f"{error.retry_after_s:g}"))
    await context.abort(error.grpc_code, status_message(error), tuple(trailers))
    raise AssertionError("abort raises")


def status_message(error: ApiError) -> str:
    """The error's message, with the name of the field."""
    if error.param and error.param not in error.message:
        return f"{error.param}: {error.message}"
    return error.message


async def unimplemented(context: grpc.aio.ServicerContext[Any, Any], message: str) -> NoReturn:
    """End the call with UNIMPLEMENTED."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)
    raise AssertionError("abort raises")
