"""All responses of a gateway: begins them, finds them, takes them over, cancels and deletes them.

Any gateway can generate a stored response from its record, with the same seed and so with the same events. A gateway
that is killed leaves a record in progress. The next gateway that a client asks for the response goes on after the
tokens in the record. A background response is also taken over without a client, when the lease of its gateway is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import orjson

from services.gateway.access.caller import Caller
from services.gateway.engine.request import GenerateJob
from services.gateway.engine.request_store import Reading
from services.gateway.errors import ApiError
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.jobs import Asked, chat_jobs
from services.gateway.responses_api.conversion import in_own_terms, parse_chat
from services.gateway.responses_api.long_work import with_bytes, with_pieces
from services.gateway.responses_api.pieces import Outcome, OutputPiece, PieceReader
from services.gateway.responses_api.records import dump_result, head_of, load_result
from services.gateway.responses_api.running import RunningResponse, ended
from services.gateway.store.periodic import LEASE_S, PURGE_S, TICK_S, repeat
from services.gateway.store.records import IN_PROGRESS, ResponseName, ResponseStore, StoredResponse
from services.runtime.logs import get_logger

_log = get_logger(__name__)

ENDPOINT = "response"
# At most this many abandoned responses are looked at, and taken over, in one tick. A burst must not push other requests
# aside.
_LOOKED_AT, _TAKEN_OVER = 64, 4
# The scheduler or the store may serve the request later. After any other error it would fail again.
_RETRYABLE = (429, 503)
_CANCELLED = Outcome("cancelled")


class Responses:
    """`store` None: responses are not stored, and cannot be asked for again. `grace_s`: how long a response
    goes on without its client, if the client can know its id before the end."""

    def __init__(self, gateway: Gateway, store: ResponseStore | None, *, grace_s: float = 10.0) -> None:
        self.gateway = gateway
        self._store = store
        self.grace_s = grace_s
        self._live: dict[ResponseName, RunningResponse] = {}
        self._num_skipped = 0  # abandoned responses that were looked at before, and are left to other gateways

    @property
    def has_store(self) -> bool:
        """Whether responses are stored."""
        return self._store is not None

    @property
    def store(self) -> ResponseStore:
        """The store. Raises ApiError 404 without one, because no response can be found."""
        if self._store is None:
            message = "this server stores no responses (--response-store none)"
            raise ApiError(404, message, code="not_found")
        return self._store

    # -- beginning ---------------------------------------------------------------------------------

    async def jobs(
        self, chat: Mapping[str, Any], response_id: str, request_id: str, caller: Caller, gone: Callable[[], bool]
    ) -> list[GenerateJob]:
        """The job of a chat's body. Raises ApiError in the terms of this API, and Gone."""
        arrival_s = time.perf_counter()
        body = parse_chat(dict(chat), self.gateway.builder.max_model_len)
        metadata = caller.permit(body.metadata(), body.named_tenant)
        metadata.answer_id = response_id
        asked = Asked(request_id, response_id, arrival_s, None, gone, metadata)
        try:
            return await chat_jobs(self.gateway, body, asked, ENDPOINT)
        except ApiError as error:
            raise in_own_terms(error) from None

    def running(self, owner: str, response_id: str) -> RunningResponse | None:
        """The response, if this gateway generates it."""
        return self._live.get((owner, response_id))

    async def begin(
        self, response: RunningResponse, jobs: list[GenerateJob], caller: Caller, record: StoredResponse | None
    ) -> bool:
        """Submit the jobs of a new response and store its record, if it has one yet. False if there is a response of
        this name already.

        Raises ApiError of Gateway.open and of the store.
        """
        if response.name in self._live:
            return False
        reading = self.gateway.open(jobs, None, caller)
        self._live[response.name] = response
        try:
            is_new = record is None or await self.store.put(record, LEASE_S)
        except BaseException:
            self._give_up(response, reading)
            raise
        if not is_new:
            self._give_up(response, reading)
            return False
        self._run(response, reading)
        return True

    async def resume(
        self, record: StoredResponse, caller: Caller, *, runs_alone: bool, gone: Callable[[], bool] = lambda: False
    ) -> RunningResponse:
        """Generate a response in progress again, from its record. Raises ApiError and Gone."""
        self.gateway.check_model(record.model)
        jobs = await self.jobs(orjson.loads(record.work), record.id, record.id, caller, gone)
        if (live := self._live.get(record.name)) is not None:  # another client was faster
            return live
        response = RunningResponse(
            record.name,
            head_of(record),
            is_stored=True,
            runs_alone=runs_alone or record.background,
            grace_s=self.grace_s,
            fingerprint=record.fingerprint,
        )
        response.is_resumed = True
        if not jobs[0].logprobs:  # stored tokens have no log probabilities, so all tokens are generated again
            jobs[0].delivered = tuple(np.frombuffer(record.tokens, "<i4").tolist())
        reading = self.gateway.open(jobs, None, caller)
        self._live[record.name] = response
        self._run(response, reading)
        return response

    # -- finding -----------------------------------------------------------------------------------

    async def find(self, owner: str, response_id: str) -> StoredResponse:
        """The record of a response. Raises ApiError 404 if this owner has none of this id."""
        record = await self.store.get(owner, response_id)
        if record is None:
            message = f"Response with id {response_id[:120]!r} not found."  # OpenAI's words; clients match them
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return record

    async def readable(self, record: StoredResponse, caller: Caller, gone: Callable[[], bool]) -> RunningResponse:
        """The response of a record for a reader of its events. A response in progress elsewhere is generated here,
        too: its events are the same. Raises ApiError and Gone."""
        if (live := self._live.get(record.name)) is not None:
            return live
        if record.status != IN_PROGRESS:
            result = await with_bytes(record.num_bytes, partial(load_result, record))
            return ended(record.name, head_of(record), *result)
        return await self.resume(record, caller, runs_alone=False, gone=gone)

    async def adopt(self, record: StoredResponse, caller: Caller) -> None:
        """Bring a response to its end, if no gateway works on it and this one serves its model."""
        if record.name in self._live or record.model != self.gateway.model_name:
            return
        if await self.store.claim(*record.name, LEASE_S):
            await self._bring_to_end(record, caller)

    async def _bring_to_end(self, record: StoredResponse, caller: Caller) -> bool:
        """Generate a claimed response without a client. False if that fails. After an error that may pass, the response
        stays in progress. After any other error it is marked as failed."""
        try:
            await self.resume(record, caller, runs_alone=True)
        except ApiError as error:
            _log.warning("a response was not taken over", id=record.id, error=error.message)
            if error.status not in _RETRYABLE:
                failed = Outcome("failed", error={"code": "server_error", "message": error.message})
                await self.store.finish(*record.name, "failed", dump_result((), failed))
            return False
        return True

    # -- ending ------------------------------------------------------------------------------------

    async def cancel(self, record: StoredResponse) -> StoredResponse:
        """The record of the response after it was cancelled, or as it had ended before."""
        live = self._live.get(record.name)
        # What is shown to readers from now on would not be stored.
        pieces = live.freeze() if live is not None else ()
        try:
            result = await with_pieces(pieces, lambda: dump_result(pieces, _CANCELLED))
            await self.store.finish(*record.name, "cancelled", result)
        except BaseException:
            if live is not None:
                live.thaw()
            raise
        if live is not None:
            live.abandon()
        return await self.find(*record.name)

    async def delete(self, record: StoredResponse) -> None:
        """Delete a response, and end its generation."""
        await self.store.delete(*record.name)
        if (live := self._live.get(record.name)) is not None:
            live.abandon()

    async def close(self) -> None:
        """Leave all responses to other gateways."""
        tasks = [live.task for live in self._live.values() if live.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- the generation ----------------------------------------------------------------------------

    def _run(self, response: RunningResponse, reading: Reading) -> None:
        response.task = asyncio.create_task(self._generate(response, reading))
        # A task that is cancelled before its first step runs no `finally` of its own.
        response.task.add_done_callback(lambda _: self._give_up(response, reading))

    async def _generate(self, response: RunningResponse, reading: Reading) -> None:
        reader = PieceReader(reading.generations[0])
        response.show(reader.pieces, reader.token_ids)
        try:
            await self._read(response, reader)
        except asyncio.CancelledError:
            reading.close()
            await _despite_cancellation(self._leave(response))
        finally:
            self._give_up(response, reading)

    async def _read(self, response: RunningResponse, reader: PieceReader) -> None:
        try:
            while await reader.read():
                response.tell()
            await self._end(response, reader.outcome)
        except ApiError as error:
            error.__traceback__ = None
            await self._fail(response, error)
        except Exception as error:
            _log.error("a response failed", id=response.name[1], exc_info=error)
            await self._fail(response, ApiError(500, "internal error; the log has the details"))

    def _give_up(self, response: RunningResponse, reading: Reading) -> None:
        """Free what the response takes. Its readers see how it ended, or that it did not."""
        reading.close()
        if self._live.get(response.name) is response:
            del self._live[response.name]
        if not response.is_over:
            response.break_off(_interrupted())

    async def _end(self, response: RunningResponse, outcome: Outcome) -> None:
        """Store the outcome before a client learns of it, so that a client can name the response in its next request
        at any gateway."""
        if self._store is not None and (response.is_stored or response.late_record is not None):
            try:
                pieces = response.all_pieces
                result = await with_pieces(pieces, lambda: dump_result(pieces, outcome))
                if (late := response.late_record) is not None:
                    await self._store.put(replace(late, status=outcome.status, work=b"", result=result), 0.0)
                elif not await self._store.finish(*response.name, outcome.status, result):
                    outcome = await self._other_outcome(response, outcome)
            except ApiError as error:  # the client gets its answer; a record stays in progress
                if response.late_record is not None:
                    response.head = {**response.head, "store": False}
                _log.error("the end of a response was not stored", id=response.name[1], error=error.message)
        response.end(outcome)

    async def _other_outcome(self, response: RunningResponse, outcome: Outcome) -> Outcome:
        """How a response ended that another gateway has finished, or a client has cancelled or deleted."""
        record = await self._store.get(*response.name) if self._store is not None else None
        if record is None or record.status == "cancelled":
            return _CANCELLED
        return outcome  # the same tokens: the same output

    async def _fail(self, response: RunningResponse, error: ApiError) -> None:
        # If true, no client has seen any part of the response, so clients get the error's status.
        is_refused = not (response.pieces or response.runs_alone or response.is_resumed)
        if error.status in _RETRYABLE or (is_refused and error.status < 500):
            await self._release(response, delete=is_refused)
            response.break_off(error)
            return
        code = "invalid_prompt" if error.status < 500 else "server_error"
        outcome = Outcome("failed", error={"code": code, "message": error.message})
        if is_refused:
            response.broken, response.late_record = error, None  # the client gets the status, and no response
        await self._end(response, outcome)

    async def _leave(self, response: RunningResponse) -> None:
        """The task was cancelled, because the grace period is over, this gateway ends, or the response has ended."""
        if not response.is_stored:
            return response.break_off(_interrupted())
        try:
            record = await self.store.get(*response.name)
        except ApiError as error:
            return response.break_off(error)
        if record is not None and record.status == IN_PROGRESS:
            await self._release(response, delete=False)
            return response.break_off(_interrupted())
        if record is None:
            return response.end(_CANCELLED)
        pieces, outcome = await with_bytes(record.num_bytes, partial(load_result, record))
        if outcome.status != "cancelled":  # another gateway has finished it, so its readers here get the rest
            if not _is_beginning(response.pieces, pieces):
                return response.break_off(ApiError(500, "another gateway has generated a different output"))
            response.show(pieces)
        return response.end(outcome)

    async def _release(self, response: RunningResponse, *, delete: bool) -> None:
        if not response.is_stored or self._store is None:
            return
        try:
            if delete:
                await self._store.delete(*response.name)
            else:
                await self._store.renew({response.name: _unsaved(response)}, 0.0)
        except ApiError as error:
            _log.warning("a response was not released", id=response.name[1], error=error.message)

    # -- periodic work -----------------------------------------------------------------------------

    async def watch(self) -> NoReturn:
        """Renew leases, end what was cancelled elsewhere, take over what was abandoned, delete what is too old or too
        much. Runs until cancelled."""
        if self._store is None:
            await asyncio.Event().wait()
        async with asyncio.TaskGroup() as group:
            # Separate tasks: taking over a response with a long prompt takes seconds. Leases are renewed meanwhile.
            group.create_task(repeat(self._renew, TICK_S))
            group.create_task(repeat(self._take_over_some, TICK_S))
            group.create_task(repeat(lambda: self.store.purge(), PURGE_S))
        raise AssertionError("the tasks above do not end")

    async def _renew(self) -> None:
        stored = {name: live for name, live in self._live.items() if live.is_stored and live.task is not None}
        if stored:
            progress = {name: (len(live.token_ids), _unsaved(live)) for name, live in stored.items()}
            ended_names = await self.store.renew({name: tokens for name, (_, tokens) in progress.items()}, LEASE_S)
            for name, (num_tokens, _) in progress.items():
                stored[name].num_saved = num_tokens
            for name in ended_names:
                if (live := self._live.get(name)) is not None and not live.is_over:
                    live.abandon()

    async def _take_over_some(self) -> None:
        if self.gateway.draining or not self.gateway.ready or self.gateway.refusal_if_full() is not None:
            return
        num_taken_over = 0
        names = await self.store.abandoned(_LOOKED_AT, self._num_skipped)
        for name in names:
            num_taken_over += await self._take_over(name)
            if num_taken_over == _TAKEN_OVER:
                return
        # All of these may be of other models or of removed keys. So the next tick skips them and looks at others.
        is_last = len(names) < _LOOKED_AT
        self._num_skipped = 0 if is_last else self._num_skipped + len(names) - num_taken_over

    async def _take_over(self, name: ResponseName) -> bool:
        """False if this gateway does not generate the response."""
        owner, response_id = name
        # Only the model is read at first: a whole record may have megabytes, and most of these may be left to others.
        model, caller = await self.store.model_of(owner, response_id), self.gateway.access.named(owner)
        if model is not None and (caller is None or model != self.gateway.model_name):
            return False  # its key is gone, or another gateway serves its model
        if not await self.store.claim(owner, response_id, LEASE_S) or caller is None:
            return False
        if (record := await self.store.get(owner, response_id)) is None:
            return False
        _log.info("takes over a background response", id=response_id)
        return await self._bring_to_end(record, caller)


async def _despite_cancellation(work: Coroutine[Any, Any, None]) -> None:
    """Bring the work to its end, even if this task is cancelled again: otherwise a record would stay in progress until
    its lease is over. The work must not take long."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    task.result()


def _unsaved(response: RunningResponse) -> bytes:
    """The tokens of the response, packed; nothing if the store has them."""
    if len(response.token_ids) == response.num_saved:
        return b""
    return np.asarray(response.token_ids, "<i4").tobytes()


def _interrupted() -> ApiError:
    return ApiError(503, "the response was interrupted; ask for it again", retry_after_s=1.0)


def _is_beginning(pieces: Sequence[OutputPiece], whole: Sequence[OutputPiece]) -> bool:
    """Whether the output begins with these pieces."""
    if len(pieces) > len(whole):
        return False
    return all(one[:2] == other[:2] for one, other in zip(pieces, whole, strict=False))
