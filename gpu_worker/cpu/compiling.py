"""Compiles the kernels for CPUs with numba, and keeps them in its cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba import cfunc, config, njit, set_num_threads, types

from gpu_worker.cpu.numbers import FASTMATH
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# Changes with the code of the kernels, with the compiler, and with the CPU.
_SOURCES = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py")))
_MACHINE = numba.__version__, llvmlite.__version__, get_host_cpu_name(), get_host_cpu_features().flatten()
_VERSION = hashlib.sha256(_SOURCES + repr(_MACHINE).encode()).hexdigest()[:12]
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


class CompiledKernel:
    """A kernel, and its variant for several threads, which runs for `least` rows or more. `rows_at`: the index of an
    argument with one element per row."""

    def __init__(
        self,
        kernel: Any,
        arguments: tuple[types.Type, ...],
        threads: int,
        least: int,
        rows_at: int = 0,
        fastmath: set[str] | bool = FASTMATH,
    ) -> None:
        self.threads = min(threads, config.NUMBA_NUM_THREADS)  # numba has a thread per usable core
        self._least, self._rows_at = least, rows_at
        if self.threads == 1 or least > 0:
            self._serial = compiled(kernel, arguments, parallel=False, fastmath=fastmath)
        if self.threads > 1:
            self._parallel = compiled(kernel, arguments, parallel=True, fastmath=fastmath)

    def __call__(self, *arguments: Any) -> None:
        if self.threads == 1 or (self._least and len(arguments[self._rows_at]) < self._least):
            self._serial(*arguments)
        else:
            set_num_threads(self.threads)  # of this Python thread, which may not be the one that built the worker
            self._parallel(*arguments)


def compiled(
    kernel: Any, arguments: tuple[types.Type, ...], parallel: bool, fastmath: set[str] | bool = FASTMATH
) -> Any:
    """The kernel, compiled or from numba's cache."""
    copy = renamed(kernel, arguments, parallel)
    signature = types.void(*arguments)
    try:
        return njit(signature, parallel=parallel, cache=True, fastmath=fastmath, **_OPTIONS)(copy)
    except Exception as error:  # no folder, no room, a damaged file, or one of another user
        _log.warning("a kernel is compiled at each start", kernel=copy.__name__, reason=repr(error))
        return njit(signature, parallel=parallel, fastmath=fastmath, **_OPTIONS)(copy)


def compiled_function(function: Any, arguments: tuple[types.Type, ...]) -> Any:
    """A function for kernels that call it by its address, compiled or from numba's cache."""
    copy, signature = renamed(function, arguments, parallel=False), types.void(*arguments)
    try:
        return cfunc(signature, cache=True, fastmath=FASTMATH, error_model="numpy")(copy)
    except Exception as error:  # as of compiled()
        _log.warning("a kernel is compiled at each start", kernel=copy.__name__, reason=repr(error))
        return cfunc(signature, fastmath=FASTMATH, error_model="numpy")(copy)


def renamed(kernel: Any, arguments: tuple[types.Type, ...], parallel: bool) -> FunctionType:
    """The kernel under a name for its dtype, its options and the sources' version.

    numba names its cache files after the function. It does not notice other options or changed code in other modules.
    With the same name, two workers with different dtypes that start together would write the same files.
    """
    number = getattr(arguments[0], "dtype", arguments[0])
    name = f"{kernel.__name__}_{number}_{'parallel' if parallel else 'serial'}_{_VERSION}"
    copy = FunctionType(kernel.__code__, kernel.__globals__, name)
    copy.__qualname__ = name
    return copy


def compile_in_child(kernel: Any, code: str) -> None:
    """Run the Python code `code` in a child process, once for each version of the kernels. It compiles a set of kernels
    into the cache folder of `kernel`. If another process does so now, wait for it.

    numba compiles the body of a parallel loop, and a function that a kernel calls, as a function of its own. Only the
    process that compiles the kernel has this function twice: by itself, and optimized together with the kernel. It may
    run either, and the two round differently. But a worker must compute the same bits when it starts again.
    """
    try:
        folder = Path(njit(cache=True)(kernel).stats.cache_path)
    except RuntimeError:  # no folder: every start compiles
        return
    marker = folder / f"paceline_{hashlib.sha256(code.encode()).hexdigest()[:12]}_{_VERSION}.done"
    try:
        if marker.is_file() and marker.stat().st_size:
            return
        with marker.open("a") as done:
            try:
                fcntl.flock(done, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("waiting for another process that compiles the kernels")
                fcntl.flock(done, fcntl.LOCK_EX)
            if os.fstat(done.fileno()).st_size:
                return
            # The same modules as this process has. Its log is not needed: this process says the same.
            command, quiet = [sys.executable, "-P", "-c", code], subprocess.DEVNULL
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            _log.info("compiling kernels for this CPU; later starts find them", kernels=kernel.__name__)
            # The child has the lock, too: if this process is killed, its next start waits for the child.
            child = subprocess.run(
                command, env=environment, stdin=quiet, stdout=quiet, pass_fds=(done.fileno(),), check=False
            )
            if child.returncode != 0:
                raise OSError(f"the child process ended with status {child.returncode}")
            done.write("done")
    except OSError as error:  # a full or foreign folder, or one without locks
        reason = f"{type(error).__name__}: {error}"
        message = "no child process has compiled the kernels; if this process does, later starts may round differently"
        _log.warning(message, kernels=kernel.__name__, reason=reason)
