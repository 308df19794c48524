"""Decides when an ended child is started again, and describes why it ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from services.runtime.exit_status import CONFIGURATION_ERROR, NO_MEMORY, REFUSED

# After these statuses another start would end the same way, if the child has never been ready.
_FINAL_AT_START = (CONFIGURATION_ERROR, NO_MEMORY)
STABLE_S = 30.0
MAX_EARLY_DEATHS = 3


@dataclass(slots=True)
class Restarts:
    """The starts and exits of one child. Times are seconds of any monotonic clock."""

    started_s: float
    early_deaths: int = 0
    backoff_s: float = 0.1
    was_ready: bool = False

    def after_exit(self, status: int, now_s: float) -> float | None:
        """How long to wait before the next start. None: do not start the child again.

        Three deaths without ever being ready are final, however long each life was: a large model may load for minutes
        before the kernel kills the process.
        """
        if self.was_ready and now_s - self.started_s >= STABLE_S:
            self.early_deaths, self.backoff_s = 0, 0.1
        self.early_deaths += 1
        if status == REFUSED:
            return None
        if not self.was_ready and (status in _FINAL_AT_START or self.early_deaths >= MAX_EARLY_DEATHS):
            return None
        wait_s, self.backoff_s = self.backoff_s, min(5.0, self.backoff_s * 2)
        return wait_s


def describe_exit(status: int, last_lines: Sequence[str], oom_kills: int | None, killed_here: bool) -> str:
    """Why a child ended, in one line.

    `last_lines`: its last output lines. `oom_kills`: processes that the kernel has killed for lack of memory since the
    child started; None if unknown. `killed_here`: the supervisor killed the child.
    """
    if status == -signal.SIGKILL and not killed_here:
        cause = "the kernel may have been out of memory"
        if oom_kills:
            cause = f"the kernel was out of memory and killed {oom_kills} process(es) since the start"
        return f"was killed by signal 9 (SIGKILL): {cause}"
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    # A service that ends for a known reason prints a line like "paceline serve worker: ..." before it ends.
    reasons = [line for line in last_lines if line.startswith("paceline ")]
    return f"{how}: {reasons[-1].split(': ', 1)[-1]}" if status > 0 and reasons else how
