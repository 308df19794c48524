"""Turns structured outputs into grammars that a separate process has tried (trial.py).

The gateway never compiles what a client sends, and no grammar that fails its trial reaches a worker. Trials wait in a
queue per tenant, and the tenants take turns. The 256 results that were used last are kept, good and bad. A structure
with a kept result does not wait.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from services.gateway.errors import ApiError, Gone, invalid
from services.gateway.grammars import trial as grammar_trial
from services.gateway.grammars.structure import Structure, check_size
from services.gateway.grammars.trial import TrialLimits
from services.runtime.logs import get_logger
from services.runtime.model.grammars import SHARE_S, SLOW_STEP_S

_log = get_logger(__name__)

NUM_PROCESSES = 2
MAX_WAITING = 256  # trials; each holds a text of up to 65,536 characters (64 to 256 KiB)
MAX_RESULTS = 256
_POLL_S = 0.05  # how often a waiting request checks whether its client has gone
_HEAD = struct.Struct("<I")


Key = tuple[str, str, bool, str]  # the fields of a Structure that make its grammar


class TrialLost(Exception):
    """The trial process has ended."""


@dataclass(slots=True, eq=False)
class _Trial:
    key: Key
    tenant: str
    result: asyncio.Future[dict[str, str]]
    num_waiting: int = 0  # requests
    process: Process | None = None  # the process that runs the trial


@dataclass(slots=True)
class GrammarChecks:
    """Use `grammar()` from one event loop. The first trial starts the first process."""

    tokenizer_path: Path
    vocab_size: int
    eos_token_ids: frozenset[int]
    limits: TrialLimits = field(default_factory=TrialLimits)
    _results: OrderedDict[Key, dict[str, str]] = field(default_factory=OrderedDict)
    _trials: dict[Key, _Trial] = field(default_factory=dict)  # waiting and running ones
    _queues: OrderedDict[str, deque[_Trial]] = field(default_factory=OrderedDict)  # by tenant; the first is next
    _runners: set[asyncio.Task[None]] = field(default_factory=set)
    _idle: list[Process] = field(default_factory=list)

    async def grammar(
        self, structure: Structure, tenant: str, gone: Callable[[], bool] = lambda: False, num_sequences: int = 1
    ) -> str:
        """The value for SamplingParams.grammar of a request with `num_sequences` sequences.

        Raises ApiError 400 if the structure has a mistake or is above a limit, 429 if too many trials wait, 503 if the
        trial did not finish, and Gone if `gone()` while the request waits. A trial without a waiting request is ended.
        """
        check_size(structure)
        key = structure.kind, structure.text, structure.any_whitespace, structure.prefix
        if (result := self._results.get(key)) is not None:
            self._results.move_to_end(key)
        else:
            result = await self._tried(key, tenant, gone)
        if (mistake := result.get("refused")) is not None:
            raise invalid(structure.field, f"{structure.field}: {mistake}")
        mask_s = int(result["mask_us"]) * 1e-6
        if mask_s > SHARE_S and num_sequences * mask_s > SLOW_STEP_S:
            takes = f"takes {1000 * mask_s:.0f} ms of CPU time for each token, and there are {num_sequences} sequences"
            raise invalid(structure.field, f"{structure.field}: {takes}; a step has {1000 * SLOW_STEP_S:.0f} ms in all")
        return result["grammar"]

    async def close(self) -> None:
        """End all processes, and cancel the waiting requests."""
        for runner in (runners := list(self._runners)):
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)
        for trial in self._trials.values():
            trial.result.cancel()
        for process in self._idle:
            await _end(process)
        self._idle.clear()

    async def _tried(self, key: Key, tenant: str, gone: Callable[[], bool]) -> dict[str, str]:
        trial = self._trials.get(key) or self._queue(key, tenant)
        trial.num_waiting += 1
        try:
            while not (await asyncio.wait((trial.result,), timeout=_POLL_S))[0]:
                if gone():
                    raise Gone
            return trial.result.result()
        finally:
            trial.num_waiting -= 1
            if not trial.num_waiting and not trial.result.done():
                self._withdraw(trial)

    def _queue(self, key: Key, tenant: str) -> _Trial:
        if sum(map(len, self._queues.values())) >= MAX_WAITING:
            self._evict_trial(tenant)
        trial = self._trials[key] = _Trial(key, tenant, asyncio.get_running_loop().create_future())
        self._queues.setdefault(tenant, deque()).append(trial)
        if len(self._runners) < NUM_PROCESSES:
            runner = asyncio.create_task(self._run())
            self._runners.add(runner)
        return trial

    def _evict_trial(self, tenant: str) -> None:
        """Refuse the newest waiting trial of the tenant that has the most. Raises ApiError 429 instead if `tenant`,
        with one trial more, would have at least as many."""
        full = ApiError(429, f"{MAX_WAITING} structured outputs wait to be tried, which is the limit", retry_after_s=1)
        largest = max(self._queues, key=lambda name: len(self._queues[name]))
        if len(self._queues[largest]) <= len(self._queues.get(tenant, ())) + 1:
            raise full
        refused = self._queues[largest].pop()
        del self._trials[refused.key]
        refused.result.set_exception(full)

    def _withdraw(self, trial: _Trial) -> None:
        trial.result.cancel()
        del self._trials[trial.key]
        if trial.process is not None:
            with suppress(ProcessLookupError):
                trial.process.send_signal(signal.SIGUSR1)
            return
        queue = self._queues.get(trial.tenant)
        if queue is None or trial not in queue:
            return  # its process is just starting
        queue.remove(trial)
        if not queue:
            del self._queues[trial.tenant]

    def _next(self) -> _Trial:
        """The next trial of the first tenant in the queue. The tenant moves to the end."""
        tenant, queue = self._queues.popitem(last=False)
        trial = queue.popleft()
        if queue:
            self._queues[tenant] = queue
        return trial

    async def _run(self) -> None:
        """Run trials until none waits. Several runners share the queues."""
        process: Process | None = None
        try:
            while self._queues:
                trial = self._next()
                try:
                    if process is None:
                        process = self._pop_idle() or await self._start()
                    if trial.result.done():
                        continue  # the last client has left while the process started
                    trial.process = process
                    result = await _ask(process, trial.key)
                except Exception as lost:  # any error, because requests wait for a result
                    _log.warning(
                        "the process that tries grammars has ended or could not start; the next trial uses another",
                        reason=str(lost),
                    )
                    process, failed = None, ApiError(503, "the structured output could not be tried", retry_after_s=1)
                    if not trial.result.done():
                        trial.result.set_exception(failed)
                else:
                    if not trial.result.done():
                        self._keep(trial, result)
                if self._trials.get(trial.key) is trial:
                    del self._trials[trial.key]
        except asyncio.CancelledError:
            if process is not None:
                await _end(process)
                process = None
            raise
        finally:
            # The runner leaves `_runners` here, and not in a callback of the task. Otherwise a trial that is queued
            # before the callback would still count this runner, and start no new one.
            self._runners -= {asyncio.current_task()}
            if process is not None:
                self._idle.append(process)

    def _keep(self, trial: _Trial, result: dict[str, str]) -> None:
        if "unfinished" in result:
            trial.result.set_exception(ApiError(503, result["unfinished"], retry_after_s=1))
            return
        trial.result.set_result(result)
        self._results[trial.key] = result
        if len(self._results) > MAX_RESULTS:
            self._results.popitem(last=False)

    def _pop_idle(self) -> Process | None:
        """An idle process that still runs."""
        while self._idle:
            if (process := self._idle.pop()).returncode is None:
                return process
        return None

    async def _start(self) -> Process:
        ends = map(str, sorted(self.eos_token_ids))
        limits = f"{self.limits.cpu_s}", f"{self.limits.memory_bytes}"
        program = ("-m", grammar_trial.__name__, str(self.tokenizer_path), str(self.vocab_size), *limits, *ends)
        # A session of its own: Ctrl-C goes to the gateway, which ends the process itself.
        return await asyncio.create_subprocess_exec(
            sys.executable, *program, stdin=PIPE, stdout=PIPE, start_new_session=True, env=_environment()
        )


def _environment() -> dict[str, str]:
    """An environment in which the process finds the same modules, wherever it starts."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


async def _ask(process: Process, key: Key) -> dict[str, str]:
    """Send a trial and wait for its result. Raises TrialLost."""
    assert process.stdin is not None
    assert process.stdout is not None
    message = orjson.dumps(key)
    try:
        process.stdin.write(_HEAD.pack(len(message)) + message)
        await process.stdin.drain()
        head = await process.stdout.readexactly(_HEAD.size)
        answer: dict[str, str] = orjson.loads(await process.stdout.readexactly(*_HEAD.unpack(head)))
    except Exception as error:  # uvloop raises RuntimeError on write() to an ended process
        await _end(process)
        raise TrialLost(f"status {process.returncode}") from error
    return answer


async def _end(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
