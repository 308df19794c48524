"""`paceline up` when a child dies: what it says, what it starts again, when it ends. The children are shell scripts."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping

import pytest
from rich.console import Console

from services.cli.up import supervisor
from services.cli.up.child import Child
from services.cli.up.health import GatewayProbe, HealthState
from services.cli.up.plan import plan
from services.cli.up.ports import Ports
from services.cli.up.screen import Screen
from services.cli.up.settings import UpSettings
from services.cli.up.supervisor import Supervisor
from services.runtime.exit_status import NO_MEMORY, REFUSED
from services.runtime.settings import load_settings

FOREVER = "exec sleep 600"
KILLED = "kill -9 $$"
TOO_LARGE = f"echo 'paceline worker: m does not fit into memory'; exit {NO_MEMORY}"
REFUSED_BY_MODEL = f"echo 'paceline worker: model: the scheduler serves a, not b'; exit {REFUSED}"


class Shell(Child):
    """Runs a script in place of the service; counts the starts."""

    script = FOREVER
    starts = 0

    async def spawn(self, environment: Mapping[str, str]) -> None:
        self.starts += 1
        self.process = await asyncio.create_subprocess_exec(
            "sh", "-c", self.script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )


class OtherWorkers(GatewayProbe):
    """The probe of a gateway that is ready if workers of other machines serve."""

    def __init__(self, *, serve: bool) -> None:
        super().__init__("")
        self.serve = serve

    def is_ready(self) -> bool:
        return self.serve


class ShellStack(Supervisor):
    """Children that are scripts."""

    def __init__(self, scripts: dict[str, str], workers: int, *, others_serve: bool) -> None:
        self.out = io.StringIO()
        settings = load_settings(UpSettings, ["--port", "0", "--workers", str(workers)], prog="paceline up")
        self.shells = {
            child.name: Shell(child.name, child.service, [], child.grpc)
            for child in plan(settings, Ports(settings), is_terminal=False)
        }
        for name, script in scripts.items():
            self.shells[name].script = script
        screen = Screen(Console(file=self.out, width=300))
        super().__init__([*self.shells.values()], settings, OtherWorkers(serve=others_serve), screen)

    def said(self, words: str) -> bool:
        return words in self.out.getvalue()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_CONFIG", raising=False)
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(min(seconds, 0.01)))
    monkeypatch.setattr(supervisor, "check_health", lambda target: _answers())


async def _answers() -> HealthState:
    return HealthState.ANSWERS


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - no event says that the supervisor has printed a line
        await asyncio.sleep(0.01)


async def until_over(stack: ShellStack) -> str:
    await stack.start()
    try:
        return await asyncio.wait_for(asyncio.shield(stack.failure), 30)
    finally:
        await stack.stop()


async def test_up_ends_with_the_reason_after_three_kills_of_an_unready_worker() -> None:
    stack = ShellStack({"worker-1": KILLED}, 1, others_serve=False)
    reason = await until_over(stack)
    assert reason.startswith("worker-1 was killed by signal 9 (SIGKILL): the kernel ")
    assert "out of memory" in reason
    assert stack.shells["worker-1"].starts == 3
    assert stack.said("out of memory; starts again in 0.1 s"), "the message about the first death names the cause"


async def test_up_ends_at_the_first_failure_if_the_model_does_not_fit() -> None:
    stack = ShellStack({"worker-1": TOO_LARGE}, 1, others_serve=False)
    assert await until_over(stack) == "worker-1 ended with status 4: m does not fit into memory"
    assert stack.shells["worker-1"].starts == 1


@pytest.mark.parametrize(("script", "starts"), [(REFUSED_BY_MODEL, 1), (KILLED, 3)])
async def test_a_worker_stays_down_while_another_one_serves(script: str, starts: int) -> None:
    stack = ShellStack({"worker-2": script}, 2, others_serve=True)
    await stack.start()
    try:
        await until(lambda: stack.said("it stays down"))
        assert stack.shells["worker-2"].starts == starts
        assert not stack.failure.done()
        assert all(not child.stays_down for child in stack.children if child.name != "worker-2")
    finally:
        await stack.stop()


async def test_the_worker_of_another_machine_is_enough() -> None:
    stack = ShellStack({"worker-1": REFUSED_BY_MODEL}, 1, others_serve=True)
    await stack.start()
    try:
        await until(lambda: stack.said("it stays down"))
        assert stack.said("ended with status 3: model: the scheduler serves a, not b; it stays down")
        assert not stack.failure.done()
    finally:
        await stack.stop()


async def test_up_ends_with_the_reason_of_the_last_worker() -> None:
    stack = ShellStack({"worker-1": REFUSED_BY_MODEL, "worker-2": TOO_LARGE}, 2, others_serve=False)
    assert (await until_over(stack)).startswith("worker-")
    assert stack.said("it stays down"), "a message about the worker that ended first; `up` ends with the other's"
