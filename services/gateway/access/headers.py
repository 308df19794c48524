"""What the headers of a request say, as llm-d's router and the Gateway API's inference extension write them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Protocol

from paceline.request_fields import METADATA
from paceline.v1 import inference_pb2
from services.gateway.errors import invalid
from services.runtime.tracing.context import TRACEPARENT, TRACESTATE

SESSION_ID = "x-session-id"
SLO_TTFT = "x-llm-d-slo-ttft-ms"
OBJECTIVE = "x-llm-d-inference-objective"
FAIRNESS_IDS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")  # llm-d's name, and the older one
LOAD_REPORT_FORMAT = "endpoint-load-metrics-format"
# Headers of generation and embedding requests, and their meaning (for /openapi.json). Some routes add others.
HEADERS = {
    SESSION_ID: "the session that the request continues; 1 to 128 printable ASCII characters",
    SLO_TTFT: "milliseconds within which the first token is wanted (ttft_slo_s)",
    OBJECTIVE: "priority: a number, or the name of an objective of the server",
    **dict.fromkeys(FAIRNESS_IDS, "tenant, where the API key allows it"),
    TRACEPARENT: "W3C trace context; its trace id is in the log lines of the request, and on its spans",
    TRACESTATE: "the rest of that context; it is on the spans",
    LOAD_REPORT_FORMAT: "TEXT or JSON: the answer reports the server's load in endpoint-load-metrics (ORCA)",
}
MAX_SESSION_CHARS = 128
_MAX_SLO_MS = 24 * 3600 * 1000.0
_MAX_PRIORITY = 1e30  # the messages have 32-bit floats


class Headers(Protocol):
    """Starlette's headers, for example."""

    def getlist(self, key: str, /) -> Sequence[str]:
        """All values of a header."""


def apply_headers(
    headers: Headers,
    metadata: inference_pb2.Submission,
    named_tenant: str | None,
    *,
    owner: str,
    objectives: Mapping[str, float],
) -> str | None:
    """Adds to the metadata what the headers say. Returns the tenant that the request names: that of its body
    (`named_tenant`), or that of a header.

    `owner`: the name of the API key. `objectives`: priorities by name. Raises ApiError 400 that names the header, also
    if header and body disagree.
    """
    if (session := _one(headers, SESSION_ID)) is not None:
        metadata.conversation = conversation_name(session, owner)
    if (slo := _one(headers, SLO_TTFT)) is not None:
        slo_s = _milliseconds(SLO_TTFT, slo) / 1000
        _check_same(SLO_TTFT, "ttft_slo_s", metadata.ttft_slo_s, slo_s)
        metadata.ttft_slo_s = slo_s
    if (objective := _one(headers, OBJECTIVE)) is not None:
        priority = _priority(objective, objectives)
        _check_same(OBJECTIVE, "priority", metadata.priority, priority)
        metadata.priority = priority
    for name in FAIRNESS_IDS:
        if (tenant := _one(headers, name)) is not None:
            if len(tenant) > (most := METADATA["tenant"].max_chars):
                raise invalid(name, f"{name} has {len(tenant)} characters; at most {most} are possible")
            if named_tenant and named_tenant != tenant:
                raise invalid(name, f"{name}: the request also names another tenant, {named_tenant[:128]!r}")
            named_tenant = metadata.tenant = tenant
    return named_tenant


def conversation_name(session_id: str, owner: str) -> str:
    """The scheduler's name for a session of this owner. Raises ApiError 400 for an invalid id."""
    if not 1 <= len(session_id) <= MAX_SESSION_CHARS or not (session_id.isascii() and session_id.isprintable()):
        raise invalid(SESSION_ID, f"{SESSION_ID} has 1 to {MAX_SESSION_CHARS} printable ASCII characters")
    # A key's name has no colon, so two different pairs never give the same text.
    return sha256(f"{owner}:{session_id}".encode()).hexdigest()


def _one(headers: Headers, name: str) -> str | None:
    values = headers.getlist(name)
    if len(values) > 1:
        raise invalid(name, f"{name} is given {len(values)} times")
    if values and not values[0].strip():
        raise invalid(name, f"{name} is empty")
    return values[0].strip() if values else None


def _check_same(header: str, field: str, given: float, value: float) -> None:
    if given and not math.isclose(given, value, rel_tol=1e-6):  # the messages have 32-bit floats
        raise invalid(header, f"{header} says {value:g}, but {field} in the body is {given:g}")


def _milliseconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MAX_SLO_MS:
        raise invalid(name, f"{name} is a number of milliseconds above 0, at most {_MAX_SLO_MS:g}, not {text[:40]!r}")
    return value


def _priority(text: str, objectives: Mapping[str, float]) -> float:
    if text in objectives:
        return objectives[text]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= _MAX_PRIORITY:
        known = ", ".join(sorted(objectives)) or "none"
        message = f"{OBJECTIVE}: {text[:128]!r} is no number, and no objective of this server (--objectives): {known}"
        raise invalid(OBJECTIVE, message, code="unknown_objective")
    return value
