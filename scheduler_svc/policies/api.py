"""Everything that a user's policy imports (docs/custom-policies.md). These names stay. Our own policies import more."""

from scheduler_svc.core.policy.interfaces import BatchPolicy, PlacementPolicy, PreemptionPolicy
from scheduler_svc.core.policy.order import KeyedOrder, OrderPolicy, PolicyError
from scheduler_svc.core.policy.step import CapacityPolicy, Step, Verdict
from scheduler_svc.core.policy.views import Running
from scheduler_svc.core.policy.worker_view import FleetView, WorkerView
from scheduler_svc.core.requests.request import RequestView
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
