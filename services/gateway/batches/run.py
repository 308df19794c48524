"""One batch at the gateway that has its lease: checks the lines, runs those without a result, writes the files.

Everything that must outlive the gateway is in the store before the next step begins. So a run can begin again
at any point, here or at another gateway: it skips the lines that have a result.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from services.gateway.access.caller import Caller
from services.gateway.batches.calls import CallEndpoint, LineAnswer, call_endpoint, error_answer
from services.gateway.batches.files import Files, Line, StoredFile
from services.gateway.batches.records import BatchRecord, Counts, Event, Unrun, stored_batch
from services.gateway.batches.results import (
    FAILED,
    SERVED,
    BatchUsage,
    line_result,
    output_id,
    read_results,
    unrun_result,
)
from services.gateway.batches.schema import BatchLine
from services.gateway.batches.throttle import ByteLimit, LineSlots, Throttle, Turns
from services.gateway.batches.validation import InputCheck, parse_line
from services.gateway.errors import ApiError
from services.gateway.openai.gateway import Gateway
from services.gateway.store.documents import ContentPiece, DocumentStore
from services.runtime.logs import bind_request_id, get_logger

_log = get_logger(__name__)

_STORE_PAUSE_S = 1.0  # after a failure of the store
_LOOK_S = 0.2  # how often a line looks whether the server takes requests
# The process that parses large bodies takes 1 to 2 s for so many bytes, and requests of clients wait behind them.
_HELD_BYTES = 32 * 2**20
_UNKNOWN_ID = ""  # custom_id of a line that this gateway cannot parse
_WRITTEN = 256  # results of lines that were not run, in one write
# Bytes of results between two checks of the owner's limit. With Redis, a check asks for the size of each document of
# the owner.
_CHECKED_BYTES = 2**20
_EVENTS: dict[Unrun, Event] = {
    "": "run",
    "batch_expired": "expire",
    "api_key_revoked": "run",
    "input_file_lost": "lose",
    "files_limit_exceeded": "run",
}


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all runs of a gateway share. `endpoints`: by path. `slots`: lines of all batches that may be in flight.
    `lines`: the same limit for one batch. `held`: limits the bytes of all lines in flight."""

    gateway: Gateway
    store: DocumentStore
    files: Files
    endpoints: Mapping[str, CallEndpoint]
    slots: LineSlots
    lines: int
    held: ByteLimit = field(default_factory=lambda: ByteLimit(_HELD_BYTES))


class BatchRun:
    """Runs one batch at this gateway. `batch`: its record, as last stored or read here."""

    def __init__(self, context: RunContext, batch: BatchRecord) -> None:
        self._context = context
        self._gateway, self._store, self._files = context.gateway, context.store, context.files
        self.batch = batch
        self._throttle = Throttle(context.lines)
        self._unrun: Unrun = ""  # why no further lines are run
        self._stopping = asyncio.Event()
        self._marks: Counter[int] = Counter()  # of the lines that have a result
        self._num_bytes = batch.num_bytes  # of the results
        self._next_check = 0  # the number of bytes at which the owner's limit is checked next
        self._changing = asyncio.Lock()
        self.begun_s = time.monotonic()
        self._turn_is_over = False
        self.is_idle = False  # its turn is over, and no line is in flight any more: it waits to be cancelled

    def end_turn(self) -> None:
        """Begin no further line. Lines in flight are not cancelled. Otherwise a line that takes longer than a turn
        would begin again in each turn and never end."""
        self._turn_is_over = True

    async def run(self) -> None:
        """Bring the batch to its end. Raises ApiError 503 if the store fails or a line has no result: then the run can
        be begun again. Raises ApiError 404 if the batch is deleted."""
        await self.look()
        if self.batch.status == "validating":
            await self._validate()
        if self.batch.status == "in_progress":
            await self._run_lines()
        if self.batch.status in ("finalizing", "cancelling"):
            await self._finish()
        _log.info("a batch has ended", id=self.batch.name.id, status=self.batch.status, **self.batch.counts._asdict())

    async def look(self) -> None:
        """Call this about once a second. Notices that the batch was cancelled or has expired, or that the owner has no
        room for more results. Stores how far the batch is."""
        await self._change(None)
        if self.batch.status == "cancelling":
            self._stop("batch_cancelled")
        elif time.time() >= self.batch.expires_s and self.batch.status in ("validating", "in_progress"):
            self._stop("batch_expired")
        elif self.batch.status == "in_progress":
            await self._check_room()

    async def _check_room(self) -> None:
        """Stop the run if the owner has no room for more results. Cancelled lines count as not run."""
        if self._num_bytes >= self._next_check:
            self._next_check = self._num_bytes + _CHECKED_BYTES
            if await self._files.exceed_bytes(self.batch.name.owner):
                self._stop("files_limit_exceeded")

    def _stop(self, why: Unrun) -> None:
        self._unrun = self._unrun or why
        self._stopping.set()

    async def _change(self, event: Event | None, **fields: Any) -> bool:
        """Store an event, or only the counts. False if the batch has a status that knows no such event."""
        async with self._changing:
            while True:
                document = await self._store.get(self.batch.name)
                if document is None:  # deleted by hand, or by a store that is too small
                    raise ApiError(404, f"the batch {self.batch.name.id} is gone", code="batch_not_found")
                stored = stored_batch(document)
                if event is not None and not stored.may(event):
                    self.batch = stored
                    return False
                changed = replace(stored, **{"counts": self._counts(stored), "num_bytes": self._num_bytes, **fields})
                if event is not None:
                    changed = changed.after(event, time.time())
                if changed == stored or await self._store.replace(changed.document(), ends_work=changed.has_ended):
                    self.batch = changed if changed == stored else replace(changed, version=stored.version + 1)
                    return True

    def _counts(self, stored: BatchRecord) -> Counts:
        if not self._marks:
            return stored.counts
        return Counts(stored.counts.total, self._marks[SERVED], self._marks[FAILED])

    async def _input(self) -> StoredFile:
        return await self._files.find(self.batch.name.owner, self.batch.input_file_id, param="input_file_id")

    # -- the phases --------------------------------------------------------------------------------

    async def _validate(self) -> None:
        check = InputCheck(self._gateway, self.batch.endpoint)
        try:
            await self._unless_stopped(check.read(self._files.lines(await self._input(), self._gateway.max_body_bytes)))
        except ApiError as error:
            if error.status != 404:
                raise
            check.errors = [{"code": error.code, "line": None, "message": error.message, "param": error.param}]
        if self._unrun == "batch_expired":
            await self._change("expire", unrun=self._unrun)
        elif check.errors:
            errors = {"object": "list", "data": check.errors}
            await self._change("invalid", outcome={"model": self._gateway.model_name, "errors": errors})
        elif not self._unrun:
            counts = Counts(total=check.num_lines)
            await self._change("valid", counts=counts, outcome={"model": self._gateway.model_name})

    async def _run_lines(self) -> None:
        outcome = dict(self.batch.outcome)
        try:
            await self._check_room()
            await self._unless_stopped(self._run_each())
        except ApiError as error:
            if error.status != 404:
                raise
            self._stop("input_file_lost")
            errors = [{"code": error.code, "line": None, "message": error.message, "param": error.param}]
            outcome["errors"] = {"object": "list", "data": errors}
        if self._unrun != "batch_cancelled":
            await self._change(_EVENTS[self._unrun], unrun=self._unrun, outcome=outcome)

    async def _run_each(self) -> None:
        """Run the lines that have no result. Ends its lines when it is cancelled."""
        done, held = await self._store.marks(self.batch.name), self._context.held
        self._marks = Counter(done.values())
        free_lines, turns = asyncio.Semaphore(self._context.lines), Turns()
        running: set[asyncio.Task[None]] = set()

        def release(num_bytes: int, _: object) -> None:
            free_lines.release()
            held.release(num_bytes)

        try:
            async for line in self._files.lines(await self._input(), self._gateway.max_body_bytes):
                if self._turn_is_over:
                    break
                if line.number in done:
                    continue
                await turns.take(num_bytes := len(line.text or b""))
                await free_lines.acquire()
                await held.acquire(num_bytes)
                task = asyncio.create_task(self._run_line(line))
                running.add(task)
                task.add_done_callback(running.discard)
                task.add_done_callback(partial(release, num_bytes))
            while running:
                await asyncio.wait(running)
        finally:
            tasks = list(running)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        missing = self.batch.counts.total - len(await self._store.marks(self.batch.name))
        if missing and self._turn_is_over:
            self.is_idle = True
            try:
                await asyncio.Event().wait()  # ends when this run is cancelled, or the batch is stopped
            finally:
                self.is_idle = False
        if missing:  # a task has failed, and the log says why
            raise ApiError(503, f"{missing} lines have no result yet")

    async def _unless_stopped(self, work: Any) -> None:
        """Run the work, and end it when the batch is stopped."""
        working = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (working, stopped):
                task.cancel()
            await asyncio.gather(working, stopped, return_exceptions=True)

    # -- a line ------------------------------------------------------------------------------------

    async def _run_line(self, line: Line) -> None:
        request_id = f"{self.batch.name.id}-{line.number}"
        bind_request_id(request_id)
        try:
            piece: ContentPiece | None
            try:
                parsed = await parse_line(self._gateway, line)
            except ApiError as error:
                if error.status >= 500:
                    raise
                # The gateway that found the line valid had other limits.
                piece = line_result(self.batch.name.id, line.number, _UNKNOWN_ID, request_id, error_answer(error))
            else:
                piece = await self._result(line.number, parsed, request_id)
            if piece is not None:
                await self._store_result(piece, request_id)
        except Exception as error:
            _log.error("a line of a batch failed", request=request_id, exc_info=error)

    async def _store_result(self, piece: ContentPiece, request_id: str) -> None:
        """Store the result of a line, as soon as the store takes it."""
        while True:
            try:
                if await self._store.add_pieces(self.batch.name, [piece]):
                    self._marks[piece.mark] += 1
                    self._num_bytes += len(piece.data)
                return
            except ApiError as error:
                _log.warning("the result of a line has to wait", request=request_id, error=error.message)
                await asyncio.sleep(_STORE_PAUSE_S)

    async def _result(self, number: int, line: BatchLine, request_id: str) -> ContentPiece | None:
        """Runs a line and returns its result. Waits until the server has room for it, and tries again after a refusal.
        None if the key of the batch was removed, or if the turn ends first."""
        name = self.batch.name
        while True:
            async with self._throttle.entering(), self._context.slots.entering(name.owner):
                # Waits here, because a refusal would write a line into the log and halve the lines in flight.
                while not (self._turn_is_over or self._has_room()):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
                if self._turn_is_over:
                    return None
                caller = self._gateway.access.named(name.owner)
                if caller is None:
                    self._stop("api_key_revoked")
                    return None
                answer = await self._ask(line, replace(caller, offline=True), request_id)
            if not answer.is_refused:
                self._throttle.served()
                return line_result(name.id, number, line.custom_id, request_id, answer)
            self._throttle.refused(answer.retry_after_s)

    async def _ask(self, line: BatchLine, caller: Caller, request_id: str) -> LineAnswer:
        endpoint = self.batch.endpoint
        if (call := self._context.endpoints.get(endpoint)) is None:
            return error_answer(ApiError(404, f"this server has no {endpoint}", code="not_found"))
        return await call_endpoint(call, endpoint, line.request, caller, request_id)

    def _has_room(self) -> bool:
        return self._gateway.ready and self._gateway.refusal_if_full() is None

    # -- the end -----------------------------------------------------------------------------------

    async def _finish(self) -> None:
        batch, name = self.batch, self.batch.name
        unrun: Unrun = "batch_cancelled" if batch.status == "cancelling" else batch.unrun
        if unrun and batch.counts.total:
            with contextlib.suppress(_Lost):
                await self._fill(unrun)
        marks = await self._store.marks(name)
        self._marks = Counter(marks.values())
        outcome = dict(batch.outcome)
        for mark, key, what in ((SERVED, "output_file_id", "output"), (FAILED, "error_file_id", "error")):
            numbers = sorted(number for number, each in marks.items() if each == mark)
            if numbers:
                usage = BatchUsage() if mark == SERVED else None
                file_id = outcome[key] = output_id(batch, mark)
                chunks = read_results(self._store, name, numbers, usage)
                await self._files.write(name.owner, file_id, f"{name.id}_{what}.jsonl", batch.ttl_s, chunks)
                if usage is not None:
                    outcome["usage"] = usage.shown()
        self._num_bytes = 0  # from now on the bytes of the output files count instead
        if await self._change("finish", outcome=outcome, unrun=unrun):
            await self._store.drop_pieces(name)

    async def _fill(self, why: Unrun) -> None:
        """Add a result to each line that has none. So no other gateway can add a result any more."""
        name, done, written = self.batch.name, await self._store.marks(self.batch.name), []
        try:
            file = await self._input()
            async for line in self._files.lines(file, self._gateway.max_body_bytes):
                if line.number not in done:
                    written.append(unrun_result(name.id, line.number, await self._custom_id(line), why))
                if len(written) == _WRITTEN:
                    await self._store.add_pieces(name, written)
                    written = []
        except ApiError as error:
            if error.status != 404:
                raise
            raise _Lost from None
        await self._store.add_pieces(name, written)

    async def _custom_id(self, line: Line) -> str:
        try:
            return (await parse_line(self._gateway, line)).custom_id
        except ApiError as error:
            if error.status >= 500:
                raise
            return _UNKNOWN_ID


class _Lost(Exception):
    """The input file is gone, and with it the lines' custom_ids."""
