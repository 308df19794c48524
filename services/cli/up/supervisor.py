"""Starts the children of `paceline up`, starts each one again after its end, and stops them all in order."""

from __future__ import annotations

import asyncio
import time

from rich.markup import escape

from services.cli.up.child import Child
from services.cli.up.health import Dialler, GatewayProbe, HealthState, check_health
from services.cli.up.plan import environment
from services.cli.up.screen import Screen
from services.cli.up.settings import UpSettings
from services.cli.up.watchdog import PROBE_EVERY_S, Watchdog


class Supervisor:
    """Keeps the children running. `failure` has a result as soon as serving is impossible: the reason."""

    def __init__(
        self,
        children: list[Child],
        settings: UpSettings,
        gateway: GatewayProbe,
        screen: Screen,
        dialler: Dialler | None = None,
    ) -> None:
        """`children`: in the order of their start."""
        self._dialler = dialler
        self.children = children
        self.gateway = gateway
        self.screen = screen
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._hang_s, self._drain_s = settings.hang_s, settings.drain_s
        self._environment = environment(settings)
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def workers(self) -> list[Child]:
        return [child for child in self.children if child.service == "worker"]

    async def start(self) -> None:
        for child in self.children:
            await child.spawn(self._environment)
            self._tasks.append(asyncio.create_task(self._watch(child)))
            self._tasks.append(asyncio.create_task(self._guard(child)))

    def note_ready(self, child: Child, at: str = "") -> None:
        """Reports once that the child is ready. `at`: where it listens."""
        if not child.restarts.was_ready:
            child.restarts.was_ready = True
            where = f" on {at}" if at else ""
            self.screen.say(child, f"[green]ready[/]{where}")

    async def stop(self) -> None:
        """Stop the gateway first, so that running requests can end; then workers, scheduler and cache."""
        self._stopping = True
        for service in ("gateway", "worker", "scheduler", "cache"):
            await asyncio.gather(*(self._end(child) for child in self.children if child.service == service))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, child: Child) -> None:
        """Show the child's output, and start the child again after its end, as long as a new start can help."""
        while True:
            async for line in child.lines():
                self.screen.relay(child, line)
            assert child.process is not None
            status = await child.process.wait()
            if self._stopping:
                return
            wait_s = child.restarts.after_exit(status, time.monotonic())
            why = child.why_ended(status)
            if wait_s is None:
                await self._give_up(child, why)
                return
            self.screen.say(child, f"[yellow]{escape(why)}; starts again in {wait_s:.1f} s[/]")
            await asyncio.sleep(wait_s)
            if self._stopping:
                return
            await child.spawn(self._environment)

    async def _give_up(self, child: Child, why: str) -> None:
        """Do not start the child again. The other services continue if the child is a worker and another one is
        left."""
        child.stays_down = True
        is_worker = child.service == "worker"
        is_missed = not is_worker or all(worker.stays_down for worker in self.workers)
        # A worker of another machine may serve.
        if is_missed and not (is_worker and await asyncio.to_thread(self.gateway.is_ready)):
            if not self.failure.done():
                self.failure.set_result(f"{child.name} {why}")
            return
        self.screen.say(child, f"[red]{escape(why)}; it stays down[/]")

    async def _guard(self, child: Child) -> None:
        """Note when a worker is ready (_wait_ready() notes it for the other services). Kill a child that hangs. Then
        `_watch` starts it again."""
        process, watchdog, clock = None, Watchdog(0), time.monotonic
        last_s = clock()
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            if child.process is not process:
                process, watchdog = child.process, Watchdog(self._hang_s)
            health = await check_health(child.grpc, self._dialler, child.service)
            if health is HealthState.SERVING and child.service == "worker":
                self.note_ready(child)
            answered = health is not HealthState.SILENT
            seconds, last_s = clock() - last_s, clock()
            if watchdog.probed(answered, seconds) and child.process is process and not self._stopping:
                assert process is not None
                if process.returncode is None:
                    self.screen.say(child, f"[red]has answered no health check for {self._hang_s:g} s; killed[/]")
                    child.killed_here = True
                    process.kill()
                    await process.wait()

    async def _end(self, child: Child) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(self._drain_s + 5):
                await process.wait()
        except TimeoutError:
            if process.returncode is not None:  # it ended in the same moment
                return
            self.screen.say(child, "[red]did not stop; killed[/]")
            process.kill()
            await process.wait()
