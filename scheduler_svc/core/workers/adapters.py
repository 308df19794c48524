"""The adapters in a worker's batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from scheduler_svc.core.requests.request import Request


@dataclass(slots=True, eq=False)
class Adapters:
    """Counts the bound requests of each adapter of a worker."""

    limit: int  # adapters that the worker serves at once
    num_bound: Counter[str] = field(default_factory=Counter)  # bound requests, by adapter

    def bind(self, request: Request) -> None:
        """The request runs, or is about to."""
        if request.metadata.lora:
            self.num_bound[request.metadata.lora] += 1

    def unbind(self, request: Request) -> None:
        """The request has left the worker."""
        if request.metadata.lora:
            self.num_bound[request.metadata.lora] -= 1
            if not self.num_bound[request.metadata.lora]:
                del self.num_bound[request.metadata.lora]

    def fit(self, request: Request) -> bool:
        """Whether the request has no adapter, its adapter is in the batch, or there is room for another adapter."""
        lora = request.metadata.lora
        return not lora or lora in self.num_bound or len(self.num_bound) < self.limit
