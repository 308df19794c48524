"""One child process of `paceline up`: a service with its flags, the process that runs it, and what it wrote."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from services.cli.up.restarts import Restarts, describe_exit
from services.runtime.memory.available import oom_kills


@dataclass(slots=True)
class Child:
    """A service that `up` starts, again and again if need be."""

    name: str  # "worker-1"
    service: str
    flags: list[str]
    grpc: str = ""  # host:port
    restarts: Restarts = field(default_factory=lambda: Restarts(time.monotonic()))
    process: asyncio.subprocess.Process | None = None
    last_lines: list[str] = field(default_factory=list)
    killed_here: bool = False  # `up` killed the process because it did not answer
    oom_kills: int | None = None  # the kernel's count when the process started
    stays_down: bool = False

    async def spawn(self, environment: Mapping[str, str]) -> None:
        """Start a process, the first one or the next one."""
        self.restarts.started_s = time.monotonic()
        self.last_lines, self.killed_here, self.oom_kills = [], False, oom_kills()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "services.cli", "serve", self.service, *self.flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C goes to `up`, which stops the services in order
        )

    async def lines(self) -> AsyncIterator[str]:
        """The output of the process until its end."""
        assert self.process is not None
        assert self.process.stdout is not None
        async for line in lines_of(self.process.stdout):
            self.last_lines = [*self.last_lines[-9:], line]
            yield line

    def why_ended(self, status: int) -> str:
        """Why the process ended with this exit status, in one line."""
        now, before = oom_kills(), self.oom_kills
        killed = now - before if now is not None and before is not None else None
        return describe_exit(status, self.last_lines, killed, self.killed_here)


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """All lines until the end of the stream, because a full pipe would stop its writer. Long lines come in pieces."""
    while True:
        try:
            raw = await stream.readuntil()
        except asyncio.IncompleteReadError as error:
            raw = error.partial
            if not raw:
                return
        except asyncio.LimitOverrunError as error:
            raw = await stream.readexactly(error.consumed)
        yield raw.decode(errors="replace").rstrip()
