"""Which policy failed, how often, and with what error, since the policies were set. For operators only."""

from __future__ import annotations

import os
import traceback
from abc import ABC
from dataclasses import dataclass, fields

from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.policy.order import PolicyError

MAX_ERROR_CHARS = 500


@dataclass(slots=True)
class PolicyFailure:
    """`kind` is a field name of Policies; empty if no policy raised the error."""

    kind: str
    count: int = 0
    last_error: str = ""


class PolicyFailures:
    """The failures of the current policies, by kind of policy."""

    def __init__(self, policies: Policies, num_steps: int = 0) -> None:
        """`num_steps`: steps that were planned before these policies were set."""
        self.by_kind: dict[str, PolicyFailure] = {}
        self.num_steps_before = num_steps
        self._kinds = {
            (base.__module__, base.__qualname__): field.name
            for field in fields(policies)
            for base in type(getattr(policies, field.name)).__mro__
            if base not in (object, ABC)
        }

    def add(self, error: Exception) -> None:
        kind, place = self._blamed(error)
        failure = self.by_kind.setdefault(kind, PolicyFailure(kind))
        failure.count += 1
        failure.last_error = f"{type(error).__name__}: {_text(error)[:MAX_ERROR_CHARS]}{place}"

    def _blamed(self, error: Exception) -> tuple[str, str]:
        """The kind of the policy that failed, and its source line. The core's own errors begin with the kind. Any other
        error is blamed on the innermost policy method: the batch policy calls the order and capacity policies."""
        named = _text(error).partition(":")[0]
        if isinstance(error, PolicyError) and named in self._kinds.values():
            return named, ""
        kind = place = ""
        for frame, line in traceback.walk_tb(error.__traceback__):
            code = frame.f_code
            # "Order.key", "Order.ordered.<locals>.<genexpr>"
            name = code.co_qualname.split(".<locals>")[0].rpartition(".")[0]
            found = self._kinds.get((frame.f_globals.get("__name__", ""), name))
            if found is not None:
                kind, place = found, f" ({os.path.basename(code.co_filename)}:{line})"
        return kind, place


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # a policy's exception may raise in __str__
        return "(no message)"
