"""Puts one stage of load on the server, and collects what its requests measured."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.cli.bench.client import UNFINISHED
from services.cli.bench.load.arrivals import OfferedLoad
from services.cli.bench.load.sessions import LoadSession, TimedSession
from services.cli.bench.stats.records import INTERRUPTED, RequestRecord
from services.cli.bench.target import BenchTarget


@dataclass(frozen=True, slots=True)
class StageLimits:
    """When a stage ends. After `duration_s`, no session starts and no session sends its next turn. After `sessions`
    sessions, no further session starts."""

    duration_s: float
    sessions: int | None
    drain_s: float  # for requests that still run after duration_s
    warmup_s: float  # requests sent earlier are not counted


@dataclass(slots=True)
class StageRun:
    """A stage while it runs, and afterwards its result. Times of records count from the start of the stage."""

    load: OfferedLoad
    limits: StageLimits
    records: list[RequestRecord] = field(default_factory=list)
    running: int = 0
    sessions: int = 0
    cut_sessions: int = 0  # sessions with turns left when the stage ended, or when a turn failed
    start_s: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start_s

    @property
    def measured(self) -> list[RequestRecord]:
        return [record for record in self.records if record.sent_s >= self.limits.warmup_s]


class StageRunner:
    """Runs stages one after another. The caller gives all stages the same `sessions`: each stage continues where the
    stage before ended, so synthetic prompts do not repeat. A stage with a trace's own times starts the trace again."""

    def __init__(self, target: BenchTarget, interrupt: asyncio.Event) -> None:
        self._target = target
        self._interrupt = interrupt

    async def run(self, stage: StageRun, timed: Iterator[TimedSession], sessions: Iterator[LoadSession]) -> None:
        """An open load takes `timed`, the others take `sessions`."""
        stage.start_s = time.perf_counter()
        tasks: set[asyncio.Task[None]] = set()
        closing = asyncio.Event()
        if stage.load.is_open:
            await self._start_at_times(stage, timed, tasks, closing)
        else:
            limited = itertools.islice(sessions, stage.limits.sessions)
            for _ in range(round(stage.load.value)):
                tasks.add(asyncio.create_task(self._user(stage, limited, closing)))
            await self._wait(tasks, stage.limits.duration_s)
        if self._interrupt.is_set() or stage.elapsed_s >= stage.limits.duration_s:
            closing.set()
        elif tasks:  # all sessions have started; their turns may go on until the time is up
            await self._wait(tasks, stage.limits.duration_s - stage.elapsed_s)
            closing.set()
        await self._wait(tasks, stage.limits.drain_s)
        reason = INTERRUPTED if self._interrupt.is_set() else UNFINISHED
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel(reason)
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(done, Exception):
                raise done

    async def _start_at_times(
        self, stage: StageRun, timed: Iterator[TimedSession], tasks: set[asyncio.Task[None]], closing: asyncio.Event
    ) -> None:
        for at_s, session in itertools.islice(timed, stage.limits.sessions):
            if at_s >= stage.limits.duration_s:
                await self._sleep(stage.limits.duration_s - stage.elapsed_s)
                return
            body = self._target.body(session, 0, [])  # made before `at_s`, so that it does not delay the request
            if await self._sleep(at_s - stage.elapsed_s):
                return
            tasks.add(asyncio.create_task(self._session(stage, session, closing, at_s, body)))

    async def _user(self, stage: StageRun, sessions: Iterator[LoadSession], closing: asyncio.Event) -> None:
        """One session after another."""
        for session in sessions:
            if closing.is_set():
                return
            await self._session(stage, session, closing, None, self._target.body(session, 0, []))
            # If the server refuses at once, this loop must still let other tasks run.
            await asyncio.sleep(0)

    async def _session(
        self, stage: StageRun, session: LoadSession, closing: asyncio.Event, at_s: float | None, body: bytes
    ) -> None:
        replies: list[str] = []
        stage.sessions += 1
        for number, turn in enumerate(session.turns):
            if number:
                body = self._target.body(session, number, replies)
                if turn.pause_s > 0 and not closing.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(turn.pause_s):
                            await closing.wait()
                if closing.is_set():
                    stage.cut_sessions += 1
                    return
            record = await self._request(stage, body, session.kind, number, replies, at_s if not number else None)
            if record.error:
                stage.cut_sessions += number + 1 < len(session.turns)
                return

    async def _request(
        self, stage: StageRun, body: bytes, kind: str, turn: int, replies: list[str], at_s: float | None
    ) -> RequestRecord:
        now = time.perf_counter()
        planned = now if at_s is None else stage.start_s + at_s
        record = RequestRecord(planned, now, kind=kind, turn=turn)
        stage.running += 1
        replies.append(await self._target.client.stream(body, record))
        stage.running -= 1
        record.scheduled_s -= stage.start_s
        record.sent_s -= stage.start_s
        record.end_s -= stage.start_s
        if record.first_s is not None:
            record.first_s -= stage.start_s
        stage.records.append(record)
        return record

    async def _sleep(self, seconds: float) -> bool:
        """Whether the run was interrupted."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._interrupt.wait()
        return self._interrupt.is_set()

    async def _wait(self, tasks: set[asyncio.Task[None]], seconds: float) -> None:
        """Until all tasks have ended, the time is up, or the run is interrupted."""
        if seconds <= 0 or not tasks or self._interrupt.is_set():
            return
        interrupted = asyncio.create_task(self._interrupt.wait())
        everything = asyncio.gather(*tasks, return_exceptions=True)
        # Without the shield, waiting.cancel() would cancel the requests.
        waiting = asyncio.ensure_future(asyncio.shield(everything))
        await asyncio.wait((waiting, interrupted), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        interrupted.cancel()
        waiting.cancel()
