"""Runs a service's main coroutine: uvloop, and signals that stop it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import uvloop


@dataclass(frozen=True, slots=True)
class Addresses:
    """The bound addresses of a service, as host:port. None for an address that the service does not have."""

    grpc: str | None
    http: str | None
    metrics: str | None


class CannotStart(Exception):
    """The settings name something that cannot be used, and another start would not help. The message is one line."""


# The number of interruptible() blocks that this process is in.
_interruptible = 0
# How many open files a service may need: one per connection. Shells often start processes with a limit of 1024.
_OPEN_FILES = 65536
# The garbage collector runs after so many new objects that were not freed.
_NEW_OBJECTS = 10_000


def raise_file_limit() -> None:
    """Raise the limit of open files to _OPEN_FILES, or to the hard limit if that is lower. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_open_files() -> int | None:
    """How many files this process may open. None: any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def trim_memory() -> None:
    """Give the freed memory of this process back to the system. Takes about 20 ms per 100 MiB, without the GIL.

    Otherwise glibc keeps it: each thread of gRPC has its own arena, and one used block near the end keeps the whole
    arena (measured: 80 messages of 16 MB left 485 MiB; with other thresholds and fewer arenas 290 to 630). No effect
    with other C libraries."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def interruptible() -> Iterator[None]:
    """A block in which a signal ends the process at once. For the start of a service: the process has no request yet,
    and a thread that is loading something cannot be stopped."""
    global _interruptible
    _interruptible += 1
    try:
        yield
    finally:
        _interruptible -= 1


def run_service(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run `main` until it returns. SIGINT and SIGTERM set its stop event, and a second signal ends the process at once.

    In an interruptible() block, the first signal ends the process.
    """

    raise_file_limit()
    # Imported objects stay. Each collection of them takes 40 ms in which nothing else runs, and many new connections
    # would cause it again and again.
    gc.collect()
    gc.freeze()
    # Reference counts free nearly everything. With Python's default of 700 objects, collecting the few cycles takes 3 %
    # of a gateway's time.
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])

    async def run() -> None:
        stop = asyncio.Event()

        def on_signal(number: int) -> None:
            if stop.is_set() or _interruptible:
                os._exit(128 + number)
            stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        await main(stop)

    uvloop.run(run())
    return 0
