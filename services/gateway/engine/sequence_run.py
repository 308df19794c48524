"""One sequence at the scheduler: what was submitted, what has arrived, and its metrics. Readers may change."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from paceline.v1 import common_pb2, inference_pb2
from services.gateway.engine.live_request import LiveRequest
from services.gateway.engine.request import GenerateJob
from services.gateway.engine.session import SchedulerSession
from services.gateway.errors import CLIENT_CLOSED_REQUEST, QUEUE_LIMITS, ApiError, from_scheduler, is_final
from services.gateway.outcome import SequenceOutcome
from services.gateway.telemetry.metrics import GatewayMetrics

FINISH_NAMES = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}
# Bytes in CPython of a token in a list, of a score, and of one of the likeliest tokens in a score. Good enough to bound
# memory.
_TOKEN_BYTES, _SCORE_BYTES, _PAIR_BYTES = 40, 120, 120


def scheduler_error(ending: inference_pb2.Ending) -> ApiError:
    """The error for an ending without an answer."""
    if ending.reason == common_pb2.FINISH_REASON_ABORT:
        return ApiError(503, ending.message or "the scheduler aborted the request", retry_after_s=1.0)
    return from_scheduler(ending.code, ending.message, ending.field, ending.retry_after_s)


class _Samples:
    """The samples of one prompt."""

    __slots__ = ("longest", "num", "num_running")

    def __init__(self) -> None:
        self.num = self.num_running = 0
        self.longest = 0  # output tokens of the longest sample that has ended


class RunTimes(NamedTuple):
    """Where the time of a run went, in seconds. None: not known."""

    queue_s: float | None  # until a worker first ran it
    prompt_s: float | None  # from then until its first token
    output_s: float | None  # from then until its end


class SequenceRun:
    """A job at the scheduler. Always call `close()` at the end."""

    __slots__ = (
        "_closed",
        "_counted",
        "_first_s",
        "_last_s",
        "_metrics",
        "_num_shown",
        "_on_outcome",
        "_samples",
        "_session",
        "job",
        "live",
        "stopped",
    )

    def __init__(
        self,
        job: GenerateJob,
        session: SchedulerSession,
        metrics: GatewayMetrics,
        first: SequenceRun | None = None,
        on_outcome: Callable[[SequenceOutcome], None] | None = None,
    ) -> None:
        """`first`: the first sample of the same prompt; the prompt is computed once for both. `on_outcome`: called
        once, when the sequence has ended.

        Raises ApiError 429 or 503.
        """
        self.job = job
        # A reader has found a stop string, and later tokens do not count.
        self.stopped = False
        self._session = session
        self._metrics = metrics
        self._closed = False
        self._counted = len(job.delivered)  # tokens that at least one reader has read
        self._last_s = job.arrival_s
        self._first_s: float | None = None  # when the first token was read
        self._num_shown: int | None = None  # tokens up to the stop string that ended the sequence
        self._on_outcome = on_outcome
        prompt = np.asarray(job.prompt_ids, "<i4").tobytes() if first is None else first.live.prompt_token_ids
        metadata = job.metadata
        if first is not None:
            metadata = inference_pb2.Submission(fork_of=first.live.handle)
            metadata.MergeFrom(job.metadata)
        self.live: LiveRequest = session.submit(
            job.request_id, prompt, job.sampling, job.final_tokens, metadata, job.beam, job.delivered
        )
        self._samples: _Samples = first._samples if first is not None else _Samples()
        self._samples.num += 1
        self._samples.num_running += 1
        metrics.live_requests += 1
        metrics.prompt_tokens += len(job.prompt_ids)

    @property
    def ended(self) -> bool:
        """No more tokens that count will arrive."""
        return self.stopped or self.live.ending is not None

    @property
    def failed(self) -> bool:
        """The sequence has ended without an answer."""
        ending = self.live.ending
        return ending is not None and not self.stopped and ending.reason not in FINISH_NAMES

    @property
    def final_error(self) -> ApiError | None:
        """The error with which the sequence ended, if it is an internal error (see is_final); None otherwise."""
        ending = self.live.ending
        if ending is None or not self.failed:
            return None
        has_final_error = ending.reason == common_pb2.FINISH_REASON_ERROR and is_final(ending.code)
        return scheduler_error(ending) if has_final_error else None

    @property
    def timing(self) -> inference_pb2.RequestTiming | None:
        """The scheduler's report, if the run has ended with one."""
        ending = self.live.ending
        return ending.timing if ending is not None and ending.HasField("timing") else None

    @property
    def times(self) -> RunTimes:
        """The times of a run that has ended, as the scheduler reports them. If the run was submitted again, or the
        scheduler sent no report, they are computed from when readers got the tokens. Then `prompt_s` includes the time
        in the queue."""
        if (timing := self.timing) is not None and not self.num_resubmissions:
            return RunTimes(timing.queue_s, timing.prefill_s, timing.decode_s)
        return RunTimes(None, self.ttft_s, None if self._first_s is None else self._last_s - self._first_s)

    @property
    def ttft_s(self) -> float | None:
        """From the request's arrival to the first token that a reader has read. None before it, and for a run that
        continues output of another run (`GenerateJob.delivered`)."""
        return None if self._first_s is None else self._first_s - self.job.arrival_s

    @property
    def num_resubmissions(self) -> int:
        """How often the run was submitted again, because the stream to the scheduler had ended."""
        return max(self.live.attempt - 1, 0)

    @property
    def num_bytes(self) -> int:
        """The memory that the run takes, in bytes; an estimate."""
        live, sampling = self.live, self.job.sampling
        pairs = sampling.num_top_logprobs * len(live.scores)
        pairs += sampling.num_top_prompt_logprobs * len(live.prompt_scores)
        scores = len(live.scores) + len(live.prompt_scores)
        prompt = 2 * len(live.prompt_token_ids) + len(live.embedding)  # the prompt is here and in the job
        return prompt + _TOKEN_BYTES * len(live.tokens) + _SCORE_BYTES * scores + _PAIR_BYTES * pairs

    def count(self, num_tokens: int) -> None:
        """A reader has read this many tokens. Each token counts once, however often it is read."""
        fresh = num_tokens - self._counted
        if fresh > 0:
            now_s = time.perf_counter()
            self._metrics.tokens(fresh, now_s - self._last_s, first=self._counted == 0)
            if self._counted == 0:
                self._first_s = now_s
            self._counted, self._last_s = num_tokens, now_s

    def stop(self, num_tokens: int) -> None:
        """A stop string is complete after this many tokens, so the engine need not continue."""
        self.stopped, self._num_shown = True, num_tokens
        self._session.cancel(self.live)

    def close(self) -> None:
        """Record how the sequence ended, and cancel it if it still runs. Its tokens stay. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        outcome = self._outcome()
        self._session.cancel(self.live)
        self._metrics.live_requests -= 1
        self._metrics.finished(outcome)
        samples = self._samples
        samples.num_running -= 1
        samples.longest = max(samples.longest, outcome.output_tokens)
        if not samples.num_running:
            self._metrics.all_finished(samples.num, self.job.sampling.max_tokens, samples.longest)
        if self._on_outcome is not None:
            self._on_outcome(outcome)

    def _outcome(self) -> SequenceOutcome:
        job, ending, now_s = self.job, self.live.ending, time.perf_counter()
        reason, status, message = "abort", CLIENT_CLOSED_REQUEST, ""
        if self.stopped:
            reason, status = "stop", 200
        elif ending is not None and ending.reason in FINISH_NAMES:
            reason, status = FINISH_NAMES[ending.reason], 200
        elif ending is not None:
            error = scheduler_error(ending)
            reason, status, message = "error", error.status, error.message
        num_after_first = self._counted - len(job.delivered) - 1
        ran_s = self._last_s - self._first_s if self._first_s is not None else 0.0
        return SequenceOutcome(
            request_id=job.request_id,
            answer_id=job.metadata.answer_id,
            endpoint=job.endpoint,
            sample=job.sample,
            tenant=job.metadata.tenant,
            finish_reason=reason,
            status=status,
            message=message,
            queue_limit=QUEUE_LIMITS.get(ending.queue_limit) if ending is not None else None,
            prompt_tokens=len(job.prompt_ids),
            output_tokens=self._num_output_tokens,
            cached_tokens=min(ending.cached_tokens, len(job.prompt_ids)) if ending is not None else None,
            ttft_s=self.ttft_s,
            tpot_s=ran_s / num_after_first if self._first_s is not None and num_after_first > 0 else None,
            latency_s=now_s - job.arrival_s,
            timing=self.timing,
            num_submissions=self.live.attempt,
        )

    @property
    def _num_output_tokens(self) -> int:
        """Output tokens that count for the client."""
        if self.job.echo is not None and self.job.echo.alone:
            return 0
        if self._num_shown is not None:
            return self._num_shown
        ending = self.live.ending
        hypotheses = ending.hypotheses if ending is not None else ()
        return len(self.live.tokens) + sum(len(one.token_ids) // 4 for one in hypotheses)
