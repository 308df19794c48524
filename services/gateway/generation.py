"""One running choice: a live request at the scheduler, its text, and how it ended."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import numpy as np

from paceline.v1 import common_pb2, inference_pb2
from services.gateway.detokenizer import TextStream
from services.gateway.errors import ApiError, from_scheduler
from services.gateway.logprobs import ScoredToken, scored
from services.gateway.metrics import GatewayMetrics
from services.gateway.request import GenerateJob
from services.gateway.session import SchedulerSession
from services.gateway.session_core import LiveRequest

# How long an answer that a stop string ended waits for the scheduler's account of it.
_ENDING_WAIT_S = 0.25
FINISH_NAMES = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


class ClientGone(Exception):
    """The client has closed its connection: nobody reads the answer."""


@dataclass(frozen=True, slots=True)
class Found:
    """A hypothesis of a beam search."""

    token_ids: list[int]
    text: str
    score: float
    finish_reason: common_pb2.FinishReason.ValueType


class Generation:
    """Runs a job. Await `next()` until `finish_reason` is set; always call `close()` in the end.

    Tokens that arrived since the last `next()` come as one piece, so a slow reader gets fewer, larger pieces and
    holds up nobody.
    """

    __slots__ = (
        "_abandoned",
        "_begun",
        "_future",
        "_last_s",
        "_live",
        "_loop",
        "_metrics",
        "_session",
        "_start_s",
        "_taken",
        "cached_tokens",
        "finish_reason",
        "hypotheses",
        "job",
        "text_stream",
        "token_ids",
    )

    def __init__(
        self, job: GenerateJob, session: SchedulerSession, metrics: GatewayMetrics, first: Generation | None = None
    ) -> None:
        """`first`: the first sample of the same prompt; its computation of the prompt serves this one too."""
        self.job = job
        self.text_stream = TextStream(job.new_detokenizer(), job.stop, job.sampling.min_tokens, job.final_tokens)
        # FinishReason once the sequence has ended, else 0 (unspecified).
        self.finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
        # Known once the scheduler has reported the ending; unknown if we ended the request ourselves.
        self.cached_tokens: int | None = None
        # The tokens of the last piece.
        self.token_ids: list[int] = []
        # What a beam search has found, once it has ended.
        self.hypotheses: list[Found] = []
        self._session = session
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self._abandoned = False
        self._taken = self._begun = 0  # tokens up to, and before, the last piece
        self._start_s = self._last_s = job.arrival_s
        prompt = np.asarray(job.prompt_ids, "<i4").tobytes()
        terms = job.terms if first is None else replace(job.terms, fork_of=first._live.handle)
        self._live: LiveRequest = session.submit(
            job.request_id, prompt, job.sampling, job.final_tokens, terms, job.beam
        )
        self._live.wake = self._wake
        metrics.live_requests += 1
        metrics.prompt_tokens += len(job.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, of all hypotheses."""
        return self.text_stream.num_tokens + sum(len(found.token_ids) for found in self.hypotheses)

    @property
    def mean_logprob(self) -> float:
        """Of the tokens that count, if the sampling asks for log probabilities."""
        scores = self._live.scores[: self.num_tokens]
        return sum(score.logprob for score in scores) / max(len(scores), 1)

    @property
    def scored(self) -> list[ScoredToken]:
        """The tokens of the last piece with their log probabilities, if the client wants to see them."""
        if not self.job.logprobs:
            return []
        return scored(self.token_ids, self._live.scores[self._begun : self._begun + len(self.token_ids)])

    @property
    def prompt_scored(self) -> list[ScoredToken]:
        """The prompt's tokens but the first, with their log probabilities, if they were asked for and a token is
        here."""
        positions = range(1, len(self.job.prompt_ids)) if self._live.prompt_scores else ()
        return scored([self.job.prompt_ids[i] for i in positions], [self._live.prompt_scores[i] for i in positions])

    async def next(self) -> str:
        """Wait for tokens or the end, return the text that can be shown now (it may be empty).

        Raises ApiError if the request failed, ClientGone after `abandon`.
        """
        live = self._live
        if len(live.tokens) == self._taken and live.ending is None and not self._abandoned:
            self._future = self._loop.create_future()
            await self._future
        if self._abandoned:
            raise ClientGone
        self._begun = self._taken
        tokens = self.token_ids = live.tokens[self._taken :]
        self._taken += len(tokens)
        stream = self.text_stream
        before = stream.num_tokens
        text = stream.push(tokens)
        if tokens:
            now_s = time.perf_counter()
            self._metrics.tokens(len(tokens), now_s - self._last_s, first=before == 0)
            self._last_s = now_s
        if stream.stopped:
            await self._stop_here(before)
        elif live.ending is not None:
            text += self._end()
        return text

    def abandon(self) -> None:
        """The client is gone: the scheduler stops, and whoever waits in `next` gets ClientGone."""
        self._abandoned = True
        self._wake()
        self.close()

    def close(self) -> None:
        """Give everything back; a request that has not ended is cancelled. Safe to call again."""
        if self._live.wake is None:
            return
        self._live.wake = None
        self._session.cancel(self._live)
        self._metrics.live_requests -= 1
        reason = FINISH_NAMES.get(self.finish_reason, "abort" if self._live.cancelled else "error")
        self._metrics.finished(self.job.endpoint, reason, time.perf_counter() - self._start_s)

    def _wake(self) -> None:
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)

    async def _stop_here(self, before: int) -> None:
        """A stop string is complete: what came after it does not count, and the engine need not go on."""
        live = self._live
        self.token_ids = self.token_ids[: self.text_stream.num_tokens - before]
        self._session.cancel(live)
        if live.ending is None:
            # The scheduler answers at once with what only it knows: how much of the prompt was cached.
            self._future = self._loop.create_future()
            await asyncio.wait([self._future], timeout=_ENDING_WAIT_S)
        if live.ending is not None:
            self.cached_tokens = min(live.ending.cached_tokens, len(self.job.prompt_ids))
        self.finish_reason = common_pb2.FINISH_REASON_STOP

    def _found(self, hypothesis: inference_pb2.Hypothesis) -> Found:
        token_ids = np.frombuffer(hypothesis.token_ids, "<i4").tolist()
        stream = TextStream(self.job.new_detokenizer(), (), 0, self.job.final_tokens)
        text = stream.push(token_ids) + stream.finish()
        return Found(token_ids, text, hypothesis.score, hypothesis.reason)

    def _end(self) -> str:
        ending = self._live.ending
        assert ending is not None
        if ending.reason not in FINISH_NAMES:
            if ending.reason == common_pb2.FINISH_REASON_ABORT:
                raise ApiError(503, ending.message or "the scheduler aborted the request", retry_after_s=1.0)
            raise from_scheduler(ending.code, ending.message, ending.field, ending.retry_after_s)
        self.cached_tokens = min(ending.cached_tokens, len(self.job.prompt_ids))
        self.hypotheses = [self._found(hypothesis) for hypothesis in ending.hypotheses]
        text = self.text_stream.finish()
        self.finish_reason = common_pb2.FINISH_REASON_STOP if self.text_stream.stopped else ending.reason
        return text
