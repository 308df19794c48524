"""Decides when a running child that does not answer is killed, so that it starts again."""

from __future__ import annotations

from dataclasses import dataclass

from services.cli.up.health import PROBE_TIMEOUT_S

PROBE_EVERY_S = 1.0


@dataclass(slots=True)
class Watchdog:
    """The health record of one process. A process that has never answered is not killed: it may be loading."""

    hang_s: float  # 0: never kill it
    _has_answered: bool = False
    _silent_s: float = 0.0

    def probed(self, answered: bool, seconds: float) -> bool:
        """A probe has ended, `seconds` after the last one. Returns whether to kill the process.

        `seconds` counts only up to PROBE_EVERY_S + PROBE_TIMEOUT_S: the pause before a probe and the longest probe. If
        it is longer, `up` itself was stopped and could not receive answers.
        """
        if answered:
            self._has_answered, self._silent_s = True, 0.0
        elif self._has_answered:
            self._silent_s += min(seconds, PROBE_EVERY_S + PROBE_TIMEOUT_S)
        return bool(self.hang_s) and self._silent_s >= self.hang_s
