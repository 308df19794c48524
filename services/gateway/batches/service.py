"""All batches of a gateway: makes, finds and cancels them, and runs those that it has the lease of.

A waiting batch has an expired lease in the store, as an abandoned response has. A gateway that serves the batch's model
claims the batch, and renews the lease each second. If the gateway dies, the lease expires, and another gateway takes
over.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import Context
from typing import NoReturn

from services.gateway.batches.calls import CallEndpoint
from services.gateway.batches.files import INPUT, FileLimits, Files, StoredFile
from services.gateway.batches.records import BatchRecord, new_batch, stored_batch
from services.gateway.batches.run import BatchRun, RunContext
from services.gateway.batches.schema import BatchRequest
from services.gateway.batches.throttle import LineSlots
from services.gateway.errors import ApiError, invalid
from services.gateway.openai.gateway import Gateway
from services.gateway.store.documents import DocumentName, DocumentStore
from services.gateway.store.periodic import LEASE_S, PURGE_S, TICK_S, repeat
from services.runtime.logs import get_logger

_log = get_logger(__name__)

MAX_RUNS = 8  # batches that a gateway runs at once
# How long a batch runs before it makes room for a batch of a key that has none running. A turn begins with reading the
# input file up to the first line without a result: up to 200 MiB.
TURN_S = 60.0
_MOST_OWNERS = 64  # owners of waiting batches that are looked at each second
MAX_UNFINISHED = 100  # batches of one owner


class Batches:
    """`store` None: there are no files and no batches. `lines`: how many lines of one batch may be in flight.
    `all_lines`: the same limit for all batches of this gateway."""

    def __init__(
        self,
        gateway: Gateway,
        store: DocumentStore | None,
        endpoints: Mapping[str, CallEndpoint],
        limits: FileLimits,
        *,
        lines: int,
        all_lines: int,
    ) -> None:
        self.gateway = gateway
        self._context: RunContext | None = None
        if store is not None:
            files = Files(store, limits)
            self._context = RunContext(gateway, store, files, endpoints, LineSlots(all_lines), lines)
        self.limits = limits
        self._runs: dict[DocumentName, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._changing_leases = asyncio.Lock()

    @property
    def files(self) -> Files:
        """The files. Raises ApiError 404 without a store."""
        return self._shared.files

    @property
    def _shared(self) -> RunContext:
        if self._context is None:
            message = "this server stores no files and no batches (--response-store none)"
            raise ApiError(404, message, code="not_found")
        return self._context

    # -- for clients -------------------------------------------------------------------------------

    async def create(self, request: BatchRequest, owner: str) -> BatchRecord:
        """Store a batch, and begin to run it if there is room here. Raises ApiError 400, 404, 413 and 429."""
        shared = self._shared
        file = await shared.files.find(owner, request.input_file_id, param="input_file_id")
        if file.purpose != INPUT:
            message = f"input_file_id: the file has the purpose {file.purpose!r}, and {INPUT!r} is needed"
            raise invalid("input_file_id", message)
        # Output files are never refused. So a new batch is refused if the owner's files are above the limit already.
        await shared.files.check_usage(owner, "input_file_id")
        if len(await shared.store.unfinished("batch", owner)) >= MAX_UNFINISHED:
            message = f"at most {MAX_UNFINISHED} batches of an API key can be unfinished"
            raise ApiError(429, message, code="too_many_batches", retry_after_s=60.0)
        name = DocumentName("batch", owner, f"batch_{uuid.uuid4().hex}")
        batch = new_batch(name, self.gateway.model_name, request, time.time(), shared.files.limits.ttl_s)
        await shared.store.put(batch.document(), has_work=True)
        if len(self._runs) < MAX_RUNS:
            await self._take(name)
        return batch

    async def find(self, owner: str, batch_id: str, param: str = "batch_id") -> BatchRecord:
        """The batch. Raises ApiError 404 if this owner has none of this id."""
        document = await self._shared.store.get(DocumentName("batch", owner, batch_id))
        if document is None:
            message = f"{param}: there is no batch {batch_id[:120]!r} here"
            raise ApiError(404, message, param=param, code="batch_not_found")
        batch = stored_batch(document)
        if time.time() >= batch.expires_s and not batch.has_ended:
            await self._take(batch.name)  # perhaps no gateway runs it; here it ends soon
        return batch

    async def page(self, owner: str, *, after: str | None, most: int) -> list[BatchRecord]:
        """The owner's batches behind the one with the id `after`, the newest first. Raises ApiError 404."""
        last = (await self.find(owner, after, "after")).document() if after is not None else None
        return [stored_batch(each) for each in await self._shared.store.page("batch", owner, (), after=last, most=most)]

    async def cancel(self, owner: str, batch_id: str) -> BatchRecord:
        """End a batch. The gateway that runs it notices within about a second. Raises ApiError 404 if this owner has
        no batch with this id, and 400 if the batch has ended or its files are being written."""
        while True:
            batch = await self.find(owner, batch_id)
            if batch.status == "cancelling":
                return batch
            if not batch.may("cancel"):
                raise invalid("batch_id", f"batch_id: a batch with the status {batch.status!r} cannot be cancelled")
            cancelled = batch.after("cancel", time.time())
            if await self._shared.store.replace(cancelled.document()):
                if (found := self._runs.get(batch.name)) is not None:
                    await found[0].look()
                else:
                    await self._take(batch.name)  # perhaps no gateway runs it; here it ends soon
                return cancelled

    async def delete_file(self, file: StoredFile) -> None:
        """Delete a file. Raises ApiError 409 while the file is the input of a batch that has not ended."""
        store, owner = self._shared.store, file.name.owner
        for batch_id in await store.unfinished("batch", owner):
            document = await store.get(DocumentName("batch", owner, batch_id))
            if document is not None and stored_batch(document).input_file_id == file.name.id:
                message = f"file_id: the file is the input of {batch_id}, which has not ended; cancel the batch first"
                raise ApiError(409, message, param="file_id", code="file_in_use")
        await self._shared.files.delete(file)

    # -- periodic work -----------------------------------------------------------------------------

    async def watch(self) -> NoReturn:
        """Renew leases, look at the runs, take batches that wait. Runs until cancelled."""
        if self._context is None:
            await asyncio.Event().wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(repeat(self._renew, TICK_S))
            group.create_task(repeat(self._look, TICK_S))
            group.create_task(repeat(self._take_some, TICK_S))
            group.create_task(repeat(lambda: self._shared.store.purge(), PURGE_S))
        raise AssertionError("the tasks above do not end")

    async def _renew(self) -> None:
        async with self._changing_leases:
            lost = await self._shared.store.renew(list(self._runs), LEASE_S)
        for name in lost:
            if (found := self._runs.get(name)) is not None and not found[0].batch.has_ended:
                _log.warning("another gateway has taken over a batch", id=name.id)
                found[1].cancel()

    async def _look(self) -> None:
        for run, _ in list(self._runs.values()):
            try:
                await run.look()
            except ApiError as error:  # the other runs must be looked at, too
                _log.warning("a batch was not looked at", id=run.batch.name.id, error=error.message)

    async def _take_some(self) -> None:
        """Take one batch of each owner. An owner without a run goes first. If more than _MOST_OWNERS owners
        wait, those that have waited longest go first."""
        if not self.gateway.ready:
            return
        for name in [name for name, (run, _) in self._runs.items() if run.is_idle]:
            await self._leave(name)
        waiting = await self._shared.store.waiting("batch", self.gateway.model_name, _MOST_OWNERS)
        runs = Counter(name.owner for name in self._runs)
        num_without = 0
        for name in sorted(waiting, key=lambda name: runs[name.owner]):
            if len(self._runs) < MAX_RUNS or await self._make_room(name.owner):
                await self._take(name)
            elif not runs[name.owner]:
                num_without += 1
        for run, _ in list(self._runs.values())[:num_without]:  # they have run longest
            if time.monotonic() - run.begun_s >= TURN_S:
                run.end_turn()

    async def _make_room(self, owner: str) -> bool:
        """Let a batch of an owner with several runs wait, for an owner without any. Its lines in flight will run
        again."""
        runs = Counter(name.owner for name in self._runs)
        [(busiest, count)] = runs.most_common(1)
        if runs[owner] or count < 2:
            return False
        await self._leave(next(name for name in reversed(self._runs) if name.owner == busiest))
        return True

    async def _leave(self, name: DocumentName) -> None:
        """Let a batch wait, behind those that wait already."""
        if (found := self._runs.get(name)) is not None:
            found[1].cancel()
            await asyncio.wait([found[1]])
        await self._give_back([name])
        _log.info("a batch waits, so that a batch of another key can run", id=name.id)

    async def _give_back(self, names: Sequence[DocumentName]) -> None:
        """Let any gateway take these batches at once. Their tasks must have ended."""
        async with self._changing_leases:  # a renewal under way would give them a lease again
            await self._shared.store.renew(names, 0.0)

    async def _take(self, name: DocumentName) -> None:
        """Run a batch, if no other gateway is faster, and this gateway is not draining."""
        store = self._shared.store
        if name in self._runs or self.gateway.draining or not await store.claim(name, LEASE_S):
            return
        if (document := await store.get(name)) is None:
            return
        if self.gateway.draining:  # meanwhile: close() has not seen this batch
            await self._give_back([name])
            return
        run = BatchRun(self._shared, stored_batch(document))
        _log.info("runs a batch", id=name.id, status=run.batch.status)
        task = asyncio.create_task(self._run(run), context=Context())  # not in the context of the client's request
        self._runs[name] = run, task
        # A task that is cancelled before its first step runs no `finally` of its own.
        task.add_done_callback(lambda _: self._runs.pop(name))

    async def _run(self, run: BatchRun) -> None:
        name = run.batch.name
        try:
            await run.run()
        except ApiError as error:
            _log.warning("a batch has to wait", id=name.id, error=error.message)
        except Exception as error:
            _log.error("a batch failed", id=name.id, exc_info=error)

    async def close(self) -> None:
        """Leave all batches to other gateways, at once. Call this when the gateway drains; lines in flight run again
        elsewhere, because a line may take longer than the drain."""
        runs = dict(self._runs)
        for _, task in runs.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in runs.values()), return_exceptions=True)
        if runs:
            try:
                await self._give_back(list(runs))
            except ApiError as error:
                _log.warning("batches were not given back", error=error.message)
