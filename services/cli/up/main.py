"""`paceline up`: runs the four services as processes of this machine until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from services.cli.servers import Announcement, announced
from services.cli.up.health import Dialler, GatewayProbe, HealthState, check_health, listens
from services.cli.up.plan import plan
from services.cli.up.ports import LOOPBACK, CannotServe, Ports
from services.cli.up.screen import Screen
from services.cli.up.settings import UpSettings
from services.cli.up.supervisor import Supervisor
from services.runtime.keys.listen import safe_host
from services.runtime.keys.source import open_keys
from services.runtime.service import CannotStart, run_service
from services.runtime.settings import load_settings, settings_parser

PROG = "paceline up"


def parser() -> argparse.ArgumentParser:
    return settings_parser(UpSettings, prog=PROG)


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    settings = load_settings(UpSettings, argv, prog=PROG)
    console = Console(stderr=False)
    problem: list[str] = []

    async def body(stop: asyncio.Event) -> None:
        if (reason := await run(settings, stop, console)) is not None:
            problem.append(reason)

    run_service(body)
    for reason in problem:
        print(f"{PROG}: {reason}", file=sys.stderr)
    return 1 if problem else 0


async def run(settings: UpSettings, stop: asyncio.Event, console: Console) -> str | None:
    """Serve until `stop`. Returns the reason if serving is impossible."""
    try:
        keys = open_keys(settings.keys_file)
        host, why = safe_host(settings.host, has_keys=keys is not None, insecure=settings.insecure)
        if why:
            console.print(why, markup=False, highlight=False, soft_wrap=True)
            settings = settings.model_copy(update={"host": host})
        ports, dialler = Ports(settings), Dialler(settings)
    except (CannotServe, CannotStart) as error:
        return str(error)
    with _announced(settings, ports, console) as announcement:
        return await _serve(settings, ports, dialler, stop, console, announcement)


async def _serve(
    settings: UpSettings,
    ports: Ports,
    dialler: Dialler,
    stop: asyncio.Event,
    console: Console,
    announcement: Announcement | None,
) -> str | None:
    screen = Screen(console)
    children = plan(settings, ports, is_terminal=console.is_terminal)
    supervisor = Supervisor(children, settings, GatewayProbe(ports.url, dialler), screen, dialler)
    failed = supervisor.failure
    stopped = asyncio.create_task(stop.wait())
    has_served = False
    try:
        with console.status("starting", spinner="dots") as screen.status:
            await supervisor.start()
            ready = asyncio.create_task(_wait_ready(supervisor, ports, dialler))
            await _first(ready, stopped, failed)
        screen.status = None  # from now on, the progress of a service that starts again is shown in lines
        if has_served := ready.done():
            if announcement is not None:
                announcement.rename(ready.result())
            screen.show_server(settings, ports, ready.result())
            await _first(stopped, failed)
        else:
            ready.cancel()
    finally:
        await _stop(supervisor, settings, console, is_draining=has_served and not failed.done())
        stopped.cancel()
    if not failed.done():
        return None
    return failed.result() if has_served else f"{failed.result()}; `paceline doctor` with the same flags says more"


async def _stop(supervisor: Supervisor, settings: UpSettings, console: Console, *, is_draining: bool) -> None:
    """Stop all services. `is_draining`: there may be running requests, which get the time of --drain-s."""
    said = "stopping"
    if is_draining:
        said += f": running requests get {settings.drain_s:g} s; Ctrl-C again stops at once"
    console.print(said, highlight=False)
    with console.status("stopping", spinner="dots"):
        await supervisor.stop()


@contextlib.contextmanager
def _announced(settings: UpSettings, ports: Ports, console: Console) -> Iterator[Announcement | None]:
    """Announce the server to other commands of this machine. A read-only folder is no error."""
    scheduler = ports.scheduler_address
    with contextlib.ExitStack() as stack:
        tls_dir = str(settings.tls_dir.absolute()) if settings.tls_dir else ""
        http_cert = str(settings.public_tls.cert.absolute()) if settings.public_tls else ""
        found = announced(
            ports.http, settings.served_model_name, scheduler, ports.cache_address, tls_dir, ports.url, http_cert
        )
        try:
            announcement = stack.enter_context(found)
        except OSError as error:
            console.print(f"no state file ({error}): other commands need --scheduler {scheduler} etc.", markup=False)
            announcement = None
        yield announcement


async def _wait_ready(supervisor: Supervisor, ports: Ports, dialler: Dialler) -> str:
    """Wait until the gateway can serve, and return the model's name. With --workers 0, wait only until the services
    listen. Reports each service that becomes ready."""
    pending = {
        "cache": (LOOPBACK, ports.cache),
        "scheduler": (LOOPBACK, ports.scheduler),
        "gateway": (ports.address, ports.http),
    }
    by_name = {child.name: child for child in supervisor.children}
    gateway, workers = supervisor.gateway, supervisor.workers
    while True:
        for name, (host, port) in list(pending.items()):
            if await listens(host, port):
                del pending[name]
                supervisor.note_ready(by_name[name], f"{host}:{port}")
        supervisor.screen.show_pending(
            [*pending, *(w.name for w in workers if not w.restarts.was_ready)] or ["gateway"]
        )
        if not pending and (not workers or await asyncio.to_thread(gateway.is_ready)):
            for worker in workers:
                if await check_health(worker.grpc, dialler, worker.service) is HealthState.SERVING:
                    supervisor.note_ready(worker)
            return await asyncio.to_thread(gateway.model_name)
        await asyncio.sleep(0.1)


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
