"""AdminService: the current policies, why a request waited, and the names of cache namespaces."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

import grpc

from paceline.v1.admin_pb2 import (
    ExplainRequest,
    ExplainResponse,
    Explanation,
    GetCacheNamespaceRequest,
    GetCacheNamespaceResponse,
    GetPolicyRequest,
    GetPolicyResponse,
    MissedTokens,
    PolicyChoice,
    PolicyFailure,
    PrefixReuse,
    SetPolicyRequest,
    SetPolicyResponse,
)
from paceline.v1.admin_pb2_grpc import AdminServiceServicer
from scheduler_svc.core.output.prefix_use import PrefixUse
from scheduler_svc.core.output.timeline import SeveralOwners
from scheduler_svc.core.policy.order import PolicyError
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.policies.presets import DEFAULT, PRESETS, PolicySet
from scheduler_svc.policies.registry import KINDS, build, check_given, check_installed, choose, names
from services.runtime.logs import get_logger

log = get_logger(__name__)

MAX_TEXT_CHARS = 2000
MAX_SEQUENCES = 64  # sequences of one request that are explained at once
MAX_OWNERS = 8  # owners that an error names, if requests of several owners have the id
MAX_EXPLANATIONS = 10_000  # after this many, no further sequence is explained; about 150 bytes each

Context = grpc.aio.ServicerContext[Any, Any]


class Admin(AdminServiceServicer):
    """Serves AdminService for a scheduler core."""

    def __init__(self, core: SchedulerCore, choice: PolicySet) -> None:
        self.core = core
        self.choice = self._configured = choice
        self._order = core.policies.order  # the order that `choice` names; the core replaces it if it fails

    @property
    def policies(self) -> PolicyChoice:
        """The current policies. The default order replaces an order that failed."""
        choice = self._in_force
        return _as_message(next((name for name, known in PRESETS.items() if known == choice), ""), choice)

    async def GetPolicy(self, request: GetPolicyRequest, context: Context) -> GetPolicyResponse:
        return GetPolicyResponse(
            choice=self.policies,
            presets=list(PRESETS),
            orders=sorted(names("order")),
            capacities=sorted(names("capacity")),
            batches=sorted(names("batch")),
            preemptions=sorted(names("preemption")),
            placements=sorted(names("placement")),
            failed_order=self.choice.order if self._has_failed else "",
            failures=[
                PolicyFailure(
                    kind=failure.kind,
                    policy=getattr(self.choice, failure.kind, ""),
                    count=failure.count,
                    last_error=encodable(failure.last_error),
                )
                for failure in self.core.policy_failures.by_kind.values()
            ],
            num_steps=self.core.counters.steps - self.core.policy_failures.num_steps_before,
            fallback=_as_message(DEFAULT, PRESETS[DEFAULT]),
        )

    async def SetPolicy(self, request: SetPolicyRequest, context: Context) -> SetPolicyResponse:
        wanted = request.choice
        options = {}
        for name, text in wanted.options.items():
            try:
                options[name] = json.loads(text)
            except (ValueError, RecursionError):
                await _invalid(context, f"options.{name}: {text[:80]!r} is not JSON")
        overrides = {kind: getattr(wanted, kind) for kind in KINDS}
        try:
            check_installed(overrides, self._configured)
            choice = choose(wanted.preset, overrides, options, self._in_force)
            policies = build(choice)
            check_given(choice, options)
            self.core.set_policies(policies)
        except PolicyError as error:
            await _invalid(context, str(error))
        except Exception as error:  # a policy that cannot take over the waiting requests
            await _invalid(context, f"order: {error!r} when it took over the queue")
        self.choice, self._order = choice, policies.order
        log.info("policies changed", **{kind: getattr(choice, kind) for kind in KINDS}, options=choice.options)
        return SetPolicyResponse(choice=self.policies)

    async def Explain(self, request: ExplainRequest, context: Context) -> ExplainResponse:
        tenant = request.tenant if request.HasField("tenant") else None
        key = request.key if request.HasField("key") else None
        try:
            found = self.core.timeline.find(request.request_id, tenant, key)
        except SeveralOwners as several:
            owners = ", ".join(f"tenant {tenant!r} and key {key!r}" for tenant, key in several.owners[:MAX_OWNERS])
            name = request.request_id[:200]
            message = f"request_id: {name!r} is the id of several requests; name the tenant or key: {owners}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, encodable(message))
        if not found:
            message = f"request_id: nothing is known (any more) of {request.request_id[:200]!r}"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        answer = ExplainResponse(num_sequences=len(found))
        for record in found[:MAX_SEQUENCES]:
            if len(answer.explanations) >= MAX_EXPLANATIONS:
                break
            await asyncio.sleep(0)  # steps go on between two sequences
            answer.explanations.extend(
                Explanation(
                    first_decision=span.first,
                    last_decision=span.last,
                    from_s=span.from_s,
                    to_s=span.to_s,
                    reason=encodable(span.reason),
                    detail=encodable(span.detail),
                    worker=span.worker,
                    request_id=record.request_id,
                    behind=encodable(span.behind),
                )
                for span in self.core.timeline.explain_record(record, self.core.life.now_s)
            )
            if (prefix := record.prefix) is not None:
                answer.prefixes.append(_reuse(record.request_id, prefix))
        return answer

    async def GetCacheNamespace(self, request: GetCacheNamespaceRequest, context: Context) -> GetCacheNamespaceResponse:
        if request.tenant and self.core.namespaces.scope == "server":
            await _invalid(context, "tenant: all tenants share one cache namespace here (--cache-scope server)")
        return GetCacheNamespaceResponse(cache_salt=self.core.namespaces.name(request.tenant, request.cache_salt))

    @property
    def _has_failed(self) -> bool:
        """Whether the order of the choice has failed; then the default order has replaced it."""
        return self.core.policies.order is not self._order

    @property
    def _in_force(self) -> PolicySet:
        """The choice. If its order failed: with the default order, and without the options of the failed one."""
        if not self._has_failed:
            return self.choice
        return choose(overrides={"order": PRESETS[DEFAULT].order}, base=self.choice)


def _reuse(request_id: str, prefix: PrefixUse) -> PrefixReuse:
    return PrefixReuse(
        request_id=request_id,
        num_tokens=prefix.num_tokens,
        num_cached_tokens=prefix.num_cached_tokens,
        missed=[
            MissedTokens(reason=one.reason, num_tokens=one.num_tokens, detail=one.detail) for one in prefix.missed()
        ],
    )


def _as_message(preset: str, choice: PolicySet) -> PolicyChoice:
    return PolicyChoice(
        preset=preset,
        options={name: json.dumps(value) for name, value in choice.options.items()},
        **{kind: getattr(choice, kind) for kind in KINDS},
    )


def encodable(text: str) -> str:
    """A policy's text, cut to MAX_TEXT_CHARS, with surrogates escaped: they cannot be encoded as UTF-8."""
    return text[:MAX_TEXT_CHARS].encode("utf-8", "backslashreplace").decode()


async def _invalid(context: Context, message: str) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, encodable(message))
    raise AssertionError("abort never returns")
