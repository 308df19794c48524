"""Ends a service of `paceline up` when `up` ends, even if `up` is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_ENV = "PACELINE_PARENT_PID"
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies. No effect in a service that was started by hand."""
    parent = os.environ.get(PARENT_ENV)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # the parent died before the call above
        sys.exit(0)
