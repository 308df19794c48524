"""Errors that the worker turns into one clear line."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be served: its files, its architecture or the settings for it. The message is one line."""


class ProtocolViolation(Exception):
    """A step plan that breaks the contract of worker.proto. Nothing of the link's state can be trusted any more."""


class DeviceError(Exception):
    """The device is out of memory or broken. The process has to end."""
