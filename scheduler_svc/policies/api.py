"""All that a policy imports, ours or a user's (docs/custom-policies.md). These names stay."""

from scheduler_svc.core.policy.interfaces import (
    BatchPolicy,
    CapacityPolicy,
    KeyedOrder,
    OrderPolicy,
    PlacementPolicy,
    PolicyError,
    PreemptionPolicy,
    Verdict,
)
from scheduler_svc.core.policy.step import Step
from scheduler_svc.core.policy.views import RequestView, Running
from scheduler_svc.core.policy.worker_view import FleetView, WorkerView
from scheduler_svc.core.workers.step_time import StepTime

__all__ = [
    "BatchPolicy",
    "CapacityPolicy",
    "FleetView",
    "KeyedOrder",
    "OrderPolicy",
    "PlacementPolicy",
    "PolicyError",
    "PreemptionPolicy",
    "RequestView",
    "Running",
    "Step",
    "StepTime",
    "Verdict",
    "WorkerView",
]
