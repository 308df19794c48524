"""All that a policy imports, ours or a user's (docs/custom-policies.md). These names stay."""

from scheduler_svc.core.policy import (
    BatchPolicy,
    CapacityPolicy,
    KeyedOrder,
    OrderPolicy,
    PlacementPolicy,
    PolicyError,
    PreemptionPolicy,
    Verdict,
)
from scheduler_svc.core.step import Step
from scheduler_svc.core.step_time import StepTime
from scheduler_svc.core.view import RequestView, Running
from scheduler_svc.core.worker_view import FleetView, WorkerView

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
