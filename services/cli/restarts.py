"""When a child that ended is started again, and when that is pointless."""

from __future__ import annotations

from dataclasses import dataclass

CONFIGURATION_ERROR = 2  # exit status of a service that cannot use its settings
STABLE_S = 30.0
MAX_EARLY_DEATHS = 3


@dataclass(slots=True)
class Restarts:
    """The record of one child. Times in seconds on any monotonic clock."""

    started_s: float
    early_deaths: int = 0
    backoff_s: float = 0.1
    was_ready: bool = False

    def after_exit(self, status: int, now_s: float) -> float | None:
        """How long to wait before the next start; None if it should not be started again."""
        if now_s - self.started_s >= STABLE_S:
            self.early_deaths, self.backoff_s = 0, 0.1
        self.early_deaths += 1
        if not self.was_ready and (status == CONFIGURATION_ERROR or self.early_deaths >= MAX_EARLY_DEATHS):
            return None
        wait_s, self.backoff_s = self.backoff_s, min(5.0, self.backoff_s * 2)
        return wait_s
