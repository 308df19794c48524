"""One run: probes the server, plays its stages or its ramp, and makes the report."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from random import Random

from services.cli.bench.client import LoadClient
from services.cli.bench.load import traces
from services.cli.bench.load.arrivals import OfferedLoad, start_times
from services.cli.bench.load.ramp import RampSearch
from services.cli.bench.load.sessions import LoadSession, TimedSession
from services.cli.bench.load.workloads import synthetic_sessions
from services.cli.bench.options import BenchOptions
from services.cli.bench.report.document import BenchReport, RampResult, StageReport
from services.cli.bench.runner import StageLimits, StageRun, StageRunner
from services.cli.bench.screen import ProgressScreen
from services.cli.bench.stats.summary import LATE_S, summarise
from services.cli.bench.target import BenchTarget

# Above this share of a core, the times may be those of this program instead of the server's.
BUSY = 0.9


class BenchRun:
    """One run of `paceline bench`: its stages, one after the other."""

    def __init__(self, options: BenchOptions, screen: ProgressScreen) -> None:
        self._options = options
        self._screen = screen
        self._interrupt = asyncio.Event()
        self._sessions = self._all_sessions()
        self._stages: list[StageReport] = []
        self._notes: list[str] = []

    async def run(self) -> BenchReport:
        """Raises ServerRefuses and TraceError, and KeyboardInterrupt for Ctrl-C before the first stage."""
        o = self._options
        self._check_trace()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        async with LoadClient(o.url, o.api_key, o.endpoint, o.timeout_s, o.ca_file) as client:
            target = BenchTarget(client, o.model, o.endpoint, o.extra_body, o.ignore_eos, o.vocabulary, o.seed)
            await self._until_interrupt(target.probe())
            runner = StageRunner(target, self._interrupt)
            ramp = await self._ramp(runner) if o.ramp else None
            for load in o.loads:
                if not self._interrupt.is_set():
                    await self._stage(runner, load, f"stage {len(self._stages) + 1} of {len(o.loads)}", o.limits)
            return BenchReport(
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                paceline=version("paceline"),
                url=o.url,
                model=target.model,
                endpoint=o.endpoint,
                seed=o.seed,
                workload=self._workload_text(),
                slo=str(o.slo) if o.slo else None,
                interrupted=self._interrupt.is_set(),
                notes=[*target.notes, *self._notes],
                stages=self._stages,
                ramp=ramp,
            )

    def _on_interrupt(self) -> None:
        # A second Ctrl-C ends the command at once.
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        self._screen.say("interrupted: reporting what was measured")
        self._interrupt.set()

    async def _until_interrupt(self, probing: Coroutine[None, None, None]) -> None:
        """Before the first stage there is nothing to report, so Ctrl-C ends the run. Raises KeyboardInterrupt."""
        probe = asyncio.create_task(probing)
        interrupted = asyncio.create_task(self._interrupt.wait())
        await asyncio.wait((probe, interrupted), return_when=asyncio.FIRST_COMPLETED)
        interrupted.cancel()
        if not probe.done():
            probe.cancel()
            raise KeyboardInterrupt
        probe.result()

    async def _ramp(self, runner: StageRunner) -> RampResult:
        o = self._options
        assert o.ramp is not None
        assert o.slo is not None
        search = RampSearch(*o.ramp, o.precision)
        while (rate := search.next_rate()) is not None and not self._interrupt.is_set():
            limits = replace(o.limits, duration_s=search.stage_s(rate, o.limits.duration_s))
            report = await self._stage(runner, OfferedLoad("poisson", rate), "ramp", limits)
            if self._interrupt.is_set():
                break
            summary = report.summary
            holds = summary.requests > 0 and summary.good_share >= o.slo.share
            if summary.requests * (1 - o.slo.share) < 1 and o.slo.share < 1:
                self._note_once(
                    f"Some stages have too few requests to tell a share of {o.slo.share:g}: one bad request breaks "
                    f"the SLO. A longer --duration helps."
                )
            search.note(rate, holds)
            verdict = "holds" if holds else "breaks"
            self._screen.say(f"  {verdict} the SLO: {summary.good_share:.1%} of {summary.requests} requests meet it")
        return RampResult(search.holds, search.breaks, o.ramp[1])

    async def _stage(self, runner: StageRunner, load: OfferedLoad, title: str, limits: StageLimits) -> StageReport:
        run = StageRun(load, limits)
        self._screen.say(f"{title}: {load}, {run.limits.duration_s:g} s")
        cpu_s, started = time.process_time(), time.perf_counter()
        following = asyncio.create_task(self._screen.follow(run, title))
        try:
            await runner.run(run, self._timed(load), self._sessions)
        finally:
            following.cancel()
        busy = (time.process_time() - cpu_s) / (time.perf_counter() - started)
        summary = summarise(run.measured, self._options.slo)
        self._note_limits(load, busy, summary.late.p99 if summary.late else 0.0)
        report = StageReport(load, summary, run.cut_sessions, round(busy, 3), run.measured)
        self._stages.append(report)
        return report

    def _note_limits(self, load: OfferedLoad, busy: float, late_s: float) -> None:
        if busy > BUSY:
            self._notes.append(
                f"{load}: the load generator used {busy:.0%} of a core, so the latencies may be its own. "
                "Run it on another machine, or with less load."
            )
        if late_s > LATE_S:
            self._notes.append(f"{load}: requests were sent late: p99 {late_s * 1000:.0f} ms after their time.")

    def _note_once(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)

    def _timed(self, load: OfferedLoad) -> Iterator[TimedSession]:
        """Sessions with the times of an open load."""
        if load.kind == "trace":
            return (TimedSession(at_s / load.value, session) for at_s, session in self._trace())
        random = Random(f"arrivals/{self._options.seed}/{load}")
        return (TimedSession(*pair) for pair in zip(start_times(load, random), self._sessions, strict=False))

    def _check_trace(self) -> None:
        """Before the server is asked. Raises TraceError."""
        o = self._options
        if o.trace is not None and next(self._trace(), None) is None:
            raise traces.TraceError(f"{o.trace}: no request is left; see --trace-start and --trace-max-tokens")

    def _all_sessions(self) -> Iterator[LoadSession]:
        """Endless: a trace starts again at its end."""
        o = self._options
        if o.trace is None:
            yield from synthetic_sessions(o.workload, o.seed)
        while True:
            yield from (session for _, session in self._trace())

    def _by_time(self) -> bool:
        return any(load.kind == "trace" for load in self._options.loads)

    def _trace(self) -> Iterator[TimedSession]:
        o = self._options
        assert o.trace is not None
        trace = traces.read_trace(o.trace, o.seed)
        if not trace.has_times and self._by_time():
            raise traces.TraceError(f"{o.trace} has lengths alone: give --rate, --poisson, --concurrency or --ramp")
        found = traces.scaled(trace.sessions, o.trace_scale, o.trace_max_tokens)
        return traces.from_start(found, o.trace_start_s)

    def _workload_text(self) -> str:
        o = self._options
        if o.trace is not None:
            scale = f", lengths times {o.trace_scale:g}" if o.trace_scale != 1 else ""
            return f"trace {o.trace.name}{scale}"
        w = o.workload
        mix = ", ".join(kind if len(w.mix) == 1 else f"{kind}={weight:g}" for kind, weight in w.mix.items())
        parts = [f"{mix}: {w.input_tokens} tokens in, {w.output_tokens} out"]
        if w.mix.keys() & {"shared-prefix", "agent"}:
            parts.append(f"{w.prefixes} prefixes of {w.prefix_tokens}")
        if w.mix.keys() & {"multi-turn", "agent"}:
            parts.append(f"{w.turns} turns, think time {w.think_s}")
        if "agent" in w.mix:
            parts.append(f"{w.tool_calls} tool calls of {w.tool_s} and {w.tool_tokens} tokens")
        return ", ".join(parts)
