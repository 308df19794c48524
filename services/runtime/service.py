"""What runs a service's main coroutine: uvloop, and signals that ask it to stop."""

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
    """host:port of what a service really bound; None for what it does not have."""

    grpc: str | None
    http: str | None
    metrics: str | None


class CannotStart(Exception):
    """The settings name something that cannot be used; starting again would not help. The message is one line."""


# How many interruptible() blocks this process is in.
_interruptible = 0
# Open files that a service may want: each connection is one. Shells often start processes with 1024.
_OPEN_FILES = 65536


def raise_file_limit() -> None:
    """As far as the system lets us without asking."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def give_way() -> None:
    """For a process that wakes for every message: who computes on its core is not interrupted for it, but for a turn
    (some milliseconds) at the most, if no other core is free. Threads made later inherit it. Linux only; who was given
    another policy (`chrt`, systemd's CPUSchedulingPolicy) keeps it."""
    with suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def trim_memory() -> None:
    """Give the memory that this process has freed back to the system. Takes some 20 ms per 100 MiB, without the GIL.

    glibc keeps it otherwise: each thread of gRPC has its own arena, and one block in use near its end holds all of
    the arena (measured: 80 messages of 16 MB left 485 MiB; with other thresholds and fewer arenas 290 to 630).
    Does nothing with other C libraries.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def interruptible() -> Iterator[None]:
    """In here a signal ends the process at once: nothing is served yet, and a thread that loads cannot be stopped."""
    global _interruptible
    _interruptible += 1
    try:
        yield
    finally:
        _interruptible -= 1


def run_service(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run `main` until it returns; SIGINT and SIGTERM set its stop event, a second one ends the process at once.

    So does the first in an interruptible() block.
    """

    raise_file_limit()
    # What was imported stays. To look through it takes 40 ms, in which nothing else is done, and would be done again
    # and again: as often as a storm of connections makes many objects that live for some time.
    gc.collect()
    gc.freeze()

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
