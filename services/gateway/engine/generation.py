"""One choice as one client reads it: the text of a run, from its beginning or from where the client resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.v1 import common_pb2, inference_pb2
from services.gateway.engine.logprobs import ScoredToken, scored
from services.gateway.engine.sequence_run import FINISH_NAMES, SequenceRun, scheduler_error
from services.gateway.parsing.reasoning import ReasoningCounter
from services.gateway.text.detokenizer import TextStream

# After a stop string, the answer waits at most this long for the scheduler's Ending, which has the count of cached
# tokens.
_ENDING_WAIT_S = 0.25
_RUNNING = common_pb2.FINISH_REASON_UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Found:
    """A hypothesis of a beam search."""

    token_ids: list[int]
    text: str
    score: float
    finish_reason: common_pb2.FinishReason.ValueType


class EndedEarlier(Exception):
    """The sequence ended before the position at which a client wants to resume, or a stop string ended it there."""


class Generation:
    """Reads a run. Await `next()` until `finish_reason` is set. Call `close()` at the end; it does not end the run.

    Tokens that arrived since the last `next()` come as one piece. So a slow reader gets fewer, larger pieces, and
    delays no other request. A run has one reader at a time. The run keeps all tokens, so the next reader can read them
    from the first token on.
    """

    __slots__ = (
        "_begun",
        "_future",
        "_interrupt",
        "_live",
        "_loop",
        "_reasoning",
        "_taken",
        "cached_tokens",
        "finish_reason",
        "hypotheses",
        "job",
        "run",
        "text_stream",
        "token_ids",
    )

    def __init__(self, run: SequenceRun) -> None:
        job = run.job
        self.job = job
        self.text_stream = TextStream(
            job.new_detokenizer(), job.stop, job.sampling.min_tokens, job.final_tokens, job.include_stop
        )
        # Why the sequence ended; 0 (unspecified) while it runs.
        self.finish_reason: common_pb2.FinishReason.ValueType = _RUNNING
        # From the scheduler's Ending. None before it, and if no Ending comes in the short wait after a stop string.
        self.cached_tokens: int | None = None
        # The tokens of the last piece.
        self.token_ids: list[int] = []
        # The hypotheses of a beam search, after its end.
        self.hypotheses: list[Found] = []
        self.run = run
        thinking = job.reply.thinking if job.reply is not None else None
        self._reasoning = ReasoningCounter(thinking) if thinking is not None else None
        self._live = run.live
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self._interrupt: Exception | None = None
        self._taken = self._begun = 0  # tokens up to the end of the last piece, and up to its beginning
        self._live.wake = self._wake

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, over all hypotheses."""
        if self.job.echo is not None and self.job.echo.alone:
            return 0
        return self.text_stream.num_tokens + sum(len(found.token_ids) for found in self.hypotheses)

    @property
    def num_reasoning(self) -> int | None:
        """Tokens of the reasoning so far; None for a beam search, or if the model does not mark its reasoning."""
        return None if self._reasoning is None or self.job.beam is not None else self._reasoning.num_tokens

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of the output tokens; 0 if the sampling does not ask for log probabilities."""
        scores = self._live.scores[: self.num_tokens]
        return sum(score.logprob for score in scores) / max(len(scores), 1)

    @property
    def scored(self) -> list[ScoredToken]:
        """The tokens of the last piece with their log probabilities, if the client asks for them."""
        if not self.job.logprobs:
            return []
        return scored(self.token_ids, self._live.scores[self._begun : self._begun + len(self.token_ids)])

    @property
    def prompt_scored(self) -> list[ScoredToken]:
        """All prompt tokens but the first, with their log probabilities; empty if the client does not ask for them.
        Read this only after an output token has arrived. Before that, some log probabilities may be missing, which
        raises KeyError."""
        positions = range(1, len(self.job.prompt_ids)) if self._live.prompt_scores else ()
        return scored([self.job.prompt_ids[i] for i in positions], [self._live.prompt_scores[i] for i in positions])

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the sequence. None if the sequence runs, or if something else ended
        it, for example an end-of-sequence token."""
        if self.finish_reason != common_pb2.FINISH_REASON_STOP:
            return None
        if self.text_stream.stopped:
            return self.text_stream.stop_string
        return self.stop_token_of(self._live.tokens)

    def stop_token_of(self, token_ids: Sequence[int]) -> int | None:
        """The last of these tokens, if it is a stop token of the request."""
        return token_ids[-1] if token_ids and token_ids[-1] in self.job.sampling.stop_token_ids else None

    async def next(self, limit: int | None = None) -> str:
        """Wait for tokens or the end, and return the text that can be shown now (perhaps "").

        `limit`: do not read beyond this many tokens of the whole sequence. Raises ApiError if the request failed, and
        the error given to `interrupt`.
        """
        live, begun = self._live, self._taken
        if len(live.tokens) == begun and live.ending is None and self._interrupt is None:
            self._future = self._loop.create_future()
            await self._future
        if self._interrupt is not None:
            raise self._interrupt
        tokens = self.token_ids = live.tokens[begun:limit]
        self._begun, self._taken = begun, begun + len(tokens)
        stream = self.text_stream
        before = stream.num_tokens
        text = self._push(tokens)
        if tokens:
            self.run.count(self._taken)
        if stream.stopped:
            self.token_ids = tokens[: stream.num_tokens - before]
            await self._stop_here()
        elif live.ending is not None and (limit is None or self._taken < limit):
            text += self._end()
        if self.job.echo is not None and self.job.echo.alone:
            text, self.token_ids = "", []
            length = common_pb2.FINISH_REASON_LENGTH
            if self.finish_reason != _RUNNING:
                self.finish_reason = length
            self.hypotheses = [Found([], "", found.score, length) for found in self.hypotheses]
        return text

    async def skip(self, num_tokens: int, on_text: Callable[[str], object] = lambda _: None) -> list[int]:
        """Skip this many tokens, and return them. `on_text` gets the text that they complete. A character that they
        begin but do not complete comes with the text of the next `next`.

        Raises what `next` raises, and EndedEarlier.
        """
        while self._taken < num_tokens:
            on_text(await self.next(num_tokens))
            if self.finish_reason != _RUNNING:
                raise EndedEarlier
        return self._live.tokens[:num_tokens]

    def interrupt(self, error: Exception) -> None:
        """Make the running or the next call of `next` raise the error."""
        self._interrupt = error
        self._wake()

    def close(self) -> None:
        """Stop reading."""
        if self._live.wake == self._wake:  # not the callback of a later reader
            self._live.wake = None

    def _wake(self) -> None:
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)

    def _push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        stream, reasoning = self.text_stream, self._reasoning
        if reasoning is None or reasoning.is_over:
            return stream.push(tokens)
        parts = []
        for token in tokens:  # one by one: the count must not depend on which tokens come as one piece
            text = stream.push([token])
            parts.append(text)
            reasoning.push(text, stream.num_tokens)
            if stream.stopped:
                reasoning.push_last("", stream.num_tokens)
                break
        return "".join(parts)

    async def _stop_here(self) -> None:
        """A stop string is complete. Later tokens do not count, so the engine need not continue."""
        live = self._live
        self.run.stop(self.text_stream.num_tokens)
        if live.ending is None:
            # The scheduler's Ending follows at once. Only the scheduler knows how much of the prompt was cached.
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
            raise scheduler_error(ending)
        self.cached_tokens = min(ending.cached_tokens, len(self.job.prompt_ids))
        self.hypotheses = [self._found(hypothesis) for hypothesis in ending.hypotheses]
        text = self.text_stream.finish()
        if self._reasoning is not None:
            self._reasoning.push_last(text, self.text_stream.num_tokens)
        if self.text_stream.stopped:
            self.run.stop(self.text_stream.num_tokens)
        self.finish_reason = common_pb2.FINISH_REASON_STOP if self.text_stream.stopped else ending.reason
        return text
