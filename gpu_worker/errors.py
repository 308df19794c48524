"""Errors that the worker reports in one line."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be served, because of its files, its architecture or the settings. The message is one line."""


class ModelTooLarge(ModelError):
    """The model does not fit into the available memory. The message names both sizes."""


class RegistrationRefused(Exception):
    """The scheduler refuses this worker: its model, data type or block size differs, or a size is out of range. The
    message names the difference."""


class ProtocolViolation(Exception):
    """A step plan breaks the contract of worker.proto. The link's state is not valid any more."""


class DeviceError(Exception):
    """The device is out of memory or broken. The process must end."""


class StepFailed(Exception):
    """One of the steps `first` to `last` raised. `requests`: those of the step that was launched last, or of all slots
    if its plan could not be applied. The message is one line."""

    def __init__(self, first: int, last: int, requests: list[str], message: str) -> None:
        super().__init__(message)
        self.first, self.last, self.requests = first, last, requests


class StepOverdue(StepFailed):
    """The step has not returned in time. Its thread is lost, and the process must end."""
