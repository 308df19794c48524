"""Errors that the worker turns into one clear line."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be served: its files, its architecture or the settings for it. The message is one line."""


class ModelTooLarge(ModelError):
    """The model does not fit into the memory that is available. The message names both sizes."""


class RegistrationRefused(Exception):
    """The scheduler does not take this worker: it serves another model, data type or block size. The message names both
    sides."""


class ProtocolViolation(Exception):
    """A step plan that breaks the contract of worker.proto. Nothing of the link's state can be trusted any more."""


class DeviceError(Exception):
    """The device is out of memory or broken. The process has to end."""


class StepFailed(Exception):
    """One of the steps `first` to `last` raised; `requests` had rows in the last one. The message is one line."""

    def __init__(self, first: int, last: int, requests: list[str], message: str) -> None:
        super().__init__(message)
        self.first, self.last, self.requests = first, last, requests


class StepOverdue(StepFailed):
    """The step has not come back in time. The thread that runs it is lost, and the process has to end."""
