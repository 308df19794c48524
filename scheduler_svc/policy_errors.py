"""Logs the errors of policies. All errors are counted, but a policy that fails at every step does not fill the disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SAME_ERROR_S = 10.0  # after this time, the same error is logged again, with the number of repetitions
MAX_ERRORS = 64  # log lines in SAME_ERROR_S at most, even if each error is a different one


class PolicyErrors:
    """Logs each kind of error at most once per interval."""

    def __init__(self, log: Callable[..., Any], clock: Callable[[], float] = time.monotonic) -> None:
        """`log` takes an event, `exc_info` and fields."""
        self._log = log
        self._clock = clock
        self._seen: dict[tuple[type, str, int], tuple[float, int]] = {}  # time of the log line; errors suppressed since

    def __call__(self, error: Exception) -> None:
        now_s, key = self._clock(), self._place(error)
        logged_s, suppressed = self._seen.get(key, (float("-inf"), 0))
        if now_s - logged_s < SAME_ERROR_S:
            self._seen[key] = logged_s, suppressed + 1
            return
        if key not in self._seen and not self._room(now_s):
            return
        self._seen[key] = now_s, 0
        same = {"same_error_since": suppressed} if suppressed else {}
        self._log(
            "a policy raised an error; if a step was being scheduled, the default policies scheduled it",
            exc_info=error,
            **same,
        )

    @staticmethod
    def _place(error: Exception) -> tuple[type, str, int]:
        """The type and source line of an error. Errors that share both are equal, even if their messages differ."""
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        return (type(error), at.tb_frame.f_code.co_filename, at.tb_lineno) if at else (type(error), "", 0)

    def _room(self, now_s: float) -> bool:
        if len(self._seen) >= MAX_ERRORS:
            self._seen = {key: seen for key, seen in self._seen.items() if now_s - seen[0] < SAME_ERROR_S}
        return len(self._seen) < MAX_ERRORS
