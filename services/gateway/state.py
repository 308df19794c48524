"""What both fronts of one gateway share."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.errors import ApiError
from services.gateway.metrics import GatewayMetrics
from services.gateway.request import RequestBuilder
from services.gateway.session import SchedulerSession


@dataclass(slots=True)
class Gateway:
    """A running gateway."""

    model_name: str
    builder: RequestBuilder
    session: SchedulerSession
    metrics: GatewayMetrics
    max_body_bytes: int = 10 * 2**20
    body_timeout_s: float = 60.0
    draining: bool = False

    @property
    def ready(self) -> bool:
        """A worker is attached, and we take requests."""
        return self.session.ready and not self.draining

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served; no name means the one that is."""
        if name and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name[:120]!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def check_open(self) -> None:
        """Raises ApiError 503 while the gateway drains."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", retry_after_s=1.0)
