"""All that a policy imports, ours or a user's (docs/custom-policies.md). These names stay."""

from scheduler_svc.core.policy import (
    BatchPolicy,
    CapacityPolicy,
    KeyedOrder,
    OrderPolicy,
    PolicyError,
    PreemptionPolicy,
    Verdict,
)
from scheduler_svc.core.step import Step
from scheduler_svc.core.view import RequestView, Running

__all__ = [
    "BatchPolicy",
    "CapacityPolicy",
    "KeyedOrder",
    "OrderPolicy",
    "PolicyError",
    "PreemptionPolicy",
    "RequestView",
    "Running",
    "Step",
    "Verdict",
]
