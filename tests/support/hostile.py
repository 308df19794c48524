"""Policies that misbehave."""

from __future__ import annotations

from scheduler_svc.policies.api import CapacityPolicy, RequestView, Step, Verdict


class Raises(CapacityPolicy):
    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        raise ZeroDivisionError("division by zero")
