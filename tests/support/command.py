"""Runs the command `paceline` against a running stack."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass

from services.cli.main import main
from tests.support.stack import Stack


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def paceline(stack: Stack, *argv: str) -> Done:
    """Runs the command in this process: a new Python takes longer to start than the command to run."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = main([*argv, "--scheduler", stack.scheduler])
        except SystemExit as end:
            status = int(str(end.code))
    return Done(status, out.getvalue(), err.getvalue())
