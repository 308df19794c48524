"""Errors of policies in the log: a new error is logged at once, a repeated error only from time to time."""

from __future__ import annotations

from typing import Any

from scheduler_svc.policy_errors import MAX_ERRORS, SAME_ERROR_S, PolicyErrors


class Log:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.lines: list[dict[str, Any]] = []
        self.errors = PolicyErrors(lambda event, **fields: self.lines.append(fields), lambda: self.now_s)

    def fail(self, line: int = 1, message: str = "") -> None:
        """An error from that line of a policy's file."""
        code = compile("\n" * (line - 1) + f"raise ValueError({message!r})", "policy.py", "exec")
        try:
            exec(code)  # noqa: S102 - the code is made above
        except ValueError as error:
            self.errors(error)


def test_a_repeated_error_is_logged_only_from_time_to_time() -> None:
    log = Log()
    for i in range(500):
        log.fail(message=f"step {i}")  # a different number does not make it a different error
        log.now_s += 0.01
    assert len(log.lines) == 1
    log.now_s += SAME_ERROR_S
    log.fail()
    assert [line.get("same_error_since") for line in log.lines] == [None, 499]
    assert isinstance(log.lines[0]["exc_info"], ValueError)


def test_another_error_is_logged_at_once() -> None:
    log = Log()
    log.fail(1)
    log.fail(2)
    assert len(log.lines) == 2


def test_the_number_of_different_errors_is_limited() -> None:
    log = Log()
    for line in range(1, 500):
        log.fail(line)
    assert len(log.lines) == MAX_ERRORS
    log.now_s += 2 * SAME_ERROR_S
    log.fail(1000)
    assert len(log.lines) == MAX_ERRORS + 1
