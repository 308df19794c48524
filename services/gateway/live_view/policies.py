"""GET and POST /v1/policies: the scheduler's policies, as `paceline policy` shows and changes them.

Both the gateway and the scheduler check whether the caller may do this. The gateway passes on the caller's key, and
adds no rights of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import grpc
import grpc.aio
import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.v1.admin_pb2 import GetPolicyRequest, GetPolicyResponse, PolicyChoice, SetPolicyRequest
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from services.gateway.errors import ApiError, invalid
from services.gateway.live_view.admins import check_admin
from services.gateway.openai.answers import JsonResponse
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.middleware import OtherApi, caller_of
from services.gateway.openai.routes import BODY_ERRORS
from services.gateway.openai.schema import RequestBody
from services.gateway.openapi.description import described
from services.runtime.tls.exposed import is_loopback

if TYPE_CHECKING:  # in the stubs only
    from paceline.v1.admin_pb2_grpc import AdminServiceAsyncStub

PATH = "/v1/policies"
KINDS = ("order", "capacity", "batch", "preemption", "placement")
_WHY = "policies apply to all tenants"
_TIMEOUT_S = 10.0
_FROM_ELSEWHERE = (
    "without API keys, policies can be changed only from the gateway's own machine: configure API keys, and use an "
    "admin key (docs/keys.md)"
)
_NO_ANSWER = "the scheduler does not answer"
_Metadata = tuple[tuple[str, str | bytes], ...]
_NOT_ALLOWED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class PoliciesRequest(RequestBody):
    """POST /v1/policies. A preset, policies that replace its policies, and options by name. Without a preset, the
    changes apply to the policies in force."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[Mapping[str, str]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}

    preset: str | None = None
    order: str | None = None
    capacity: str | None = None
    batch: str | None = None
    preemption: str | None = None
    placement: str | None = None
    options: dict[str, Any] | None = None


class PoliciesAnswer(BaseModel):
    """The policies in force, and all policies and presets that the scheduler offers. `preset` is empty if the policies
    are those of no preset; `options` has all defaults filled in. `why_not_settable`: why this caller may not set them,
    and what to do; null if it may."""

    preset: str
    policies: dict[str, str]
    options: dict[str, Any]
    presets: list[str]
    known: dict[str, list[str]]
    why_not_settable: str | None


def policies_api(gateway: Gateway) -> OtherApi:
    """The two routes of one path."""

    @described(answer=PoliciesAnswer, errors=(401, 403, 503))
    async def policies(request: Request) -> Response:
        """The policies in force, all that the scheduler offers, and whether the caller may set them. With API keys,
        only an admin key may read them."""
        return _answer(await _call(gateway, request, _get), why_not_settable(request))

    @described(body=PoliciesRequest, answer=PoliciesAnswer, errors=(*BODY_ERRORS, 403, 503))
    async def set_policies(request: Request) -> Response:
        """Set policies, which apply from the next step on. No request is dropped. With API keys, only an admin key may
        set them."""
        check_admin(caller_of(request), _WHY)
        check_local(request)
        with gateway.held_body() as held:
            body, _ = await gateway.read_request(PoliciesRequest, request, held)
        choice = _choice(body)

        async def change(stub: AdminServiceAsyncStub, metadata: _Metadata) -> GetPolicyResponse:
            await stub.SetPolicy(SetPolicyRequest(choice=choice), timeout=_TIMEOUT_S, metadata=metadata)
            return await _get(stub, metadata)

        return _answer(await _call(gateway, request, change), None)

    return OtherApi(PATH, [Route(PATH, policies), Route(PATH, set_policies, methods=["POST"])], {})


def check_local(request: Request) -> None:
    """Raises ApiError 403 for a caller on another machine, if there are no keys."""
    if (why := why_not_settable(request)) is not None:
        raise ApiError(403, why, code="admin_required")


def why_not_settable(request: Request) -> str | None:
    """Why the caller may not set policies; None if it may. Without keys, a caller on another machine may not. The
    gateway checks this, because a scheduler on the gateway's machine would take the gateway's call for a local one.
    With keys, a caller that may read the policies may also set them: the scheduler asks for the same right."""
    host = request.client.host if request.client is not None else ""
    return _FROM_ELSEWHERE if caller_of(request).key is None and not is_loopback(host) else None


def _choice(body: PoliciesRequest) -> PolicyChoice:
    """Raises ApiError 400 for a body that asks for nothing."""
    given = {name: value for name in ("preset", *KINDS) if (value := getattr(body, name))}
    options = {name: orjson.dumps(value).decode() for name, value in (body.options or {}).items()}
    if not (given or options):
        raise invalid("preset", "give a preset, a policy or an option")
    return PolicyChoice(**given, options=options)


async def _get(stub: AdminServiceAsyncStub, metadata: _Metadata) -> GetPolicyResponse:
    return await stub.GetPolicy(GetPolicyRequest(), timeout=_TIMEOUT_S, metadata=metadata)


async def _call(
    gateway: Gateway, request: Request, work: Callable[[AdminServiceAsyncStub, _Metadata], Awaitable[GetPolicyResponse]]
) -> GetPolicyResponse:
    """Raises ApiError: 400 with the scheduler's message, 403 if the gateway or the scheduler refuses
    the caller, 503 for any other failure (no connection, no answer in time)."""
    check_admin(caller_of(request), _WHY)
    names = ("authorization", "x-api-key")
    metadata = tuple((name, value) for name in names if (value := request.headers.get(name)) and value.isascii())
    stub = AdminServiceStub(gateway.session.channel)
    try:
        return await work(stub, metadata)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise ApiError(
            503, _NO_ANSWER, code="service_unavailable", retry_after_s=1.0
        ) from None  # the channel was closed
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            raise invalid(details.partition(":")[0], details, code="invalid_policy") from error
        if error.code() in _NOT_ALLOWED:
            raise ApiError(
                403, f"the scheduler refuses the call: {details} (docs/keys.md)", code="admin_required"
            ) from error
        raise ApiError(503, _NO_ANSWER, code="service_unavailable", retry_after_s=1.0) from error


def _answer(found: GetPolicyResponse, why_not: str | None) -> Response:
    choice = found.choice
    shown = PoliciesAnswer(
        preset=choice.preset,
        policies={kind: getattr(choice, kind) for kind in KINDS},
        options={name: orjson.loads(value) for name, value in choice.options.items()},
        presets=list(found.presets),
        known={
            "order": list(found.orders),
            "capacity": list(found.capacities),
            "batch": list(found.batches),
            "preemption": list(found.preemptions),
            "placement": list(found.placements),
        },
        why_not_settable=why_not,
    )
    return JsonResponse(orjson.dumps(shown.model_dump()))
