"""Writes one log line at level info per finished request, over all its sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from services.gateway.errors import CLIENT_CLOSED_REQUEST
from services.gateway.outcome import SequenceOutcome
from services.runtime.logs import get_logger

_log = get_logger(__name__)
_DIGITS = 4  # decimal places of seconds


class RequestLog:
    """Writes the lines. With `enabled` False, or a log level above info, it does nothing."""

    def __init__(self, model_name: str, *, enabled: bool = True) -> None:
        self._model_name = model_name
        self._enabled = enabled

    def entry(self, num_sequences: int, key: str = "") -> Callable[[SequenceOutcome], None] | None:
        """A callback for the outcomes of a request with this many sequences. The last outcome writes the line. None if
        no line is to be written: the log is off, or its level is above info.

        `key`: name of the request's API key, "" without keys.
        """
        if not self._enabled or not logging.getLogger(__name__).isEnabledFor(logging.INFO):
            return None
        outcomes: list[SequenceOutcome] = []

        def ended(outcome: SequenceOutcome) -> None:
            outcomes.append(outcome)
            if len(outcomes) == num_sequences:
                fields = request_fields(outcomes, self._model_name)
                _log.info("request finished", **fields, **({"key": key} if key else {}))

        return ended

    def refused(self, request_id: str, endpoint: str, status: int, message: str) -> None:
        """A request got an error before it reached the scheduler. A 429 is only counted: a line for each would add work
        under overload."""
        if self._enabled and status != 429:
            _log.info("request refused", request_id=request_id, endpoint=endpoint, status=status, error=message)

    def taken_up(self, request_id: str, name: str, first_request_id: str) -> None:
        """A connection reads the answer `name` of a request that already runs or has finished. The scheduler and the
        line of the finished request know only the first connection's id."""
        if self._enabled:
            _log.info("request taken up", id=name, request_id=request_id, first_request_id=first_request_id)


def request_fields(outcomes: list[SequenceOutcome], model_name: str) -> dict[str, Any]:
    """What the log says of a request, over all its sequences: sums of tokens, preemptions and losses, the longest
    times, and the shortest `ttft_s`."""
    outcomes.sort(key=lambda outcome: (len(outcome.request_id), outcome.request_id))
    first = outcomes[0]
    # An error has precedence over an abort, and an abort over 200.
    worst = max(outcomes, key=lambda outcome: (outcome.status != 200, outcome.status != CLIENT_CLOSED_REQUEST))
    prompts = [outcome for outcome in outcomes if not outcome.sample]  # samples of one prompt share it
    reasons = sorted({outcome.finish_reason for outcome in outcomes})
    timings = [outcome.timing for outcome in outcomes if outcome.timing is not None]
    fields: dict[str, Any] = {
        "id": first.answer_id or first.request_id,
        "request_id": first.request_id,
        "endpoint": first.endpoint,
        "tenant": first.tenant,
        "model": model_name,
        "status": worst.status,
        "finish_reason": worst.finish_reason if worst.status != 200 else ",".join(reasons),
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in prompts),
        "output_tokens": sum(outcome.output_tokens for outcome in outcomes),
        "cached_tokens": sum(outcome.cached_tokens or 0 for outcome in prompts),
        "queue_s": _longest(timing.queue_s for timing in timings),
        "prefill_s": _longest(timing.prefill_s for timing in timings),
        "decode_s": _longest(timing.decode_s for timing in timings),
        "ttft_s": min((_rounded(o.ttft_s) for o in outcomes if o.ttft_s is not None), default=None),
        "total_s": _longest(outcome.latency_s for outcome in outcomes),
        "preemptions": sum(timing.num_preemptions for timing in timings),
    }
    if len(outcomes) > 1:
        fields["sequences"] = len(outcomes)
    rare = {
        "cached_host_tokens": sum(outcome.cached_host_tokens for outcome in prompts),
        "losses": sum(timing.num_losses for timing in timings),
    }
    fields |= {name: count for name, count in rare.items() if count}
    if (num_submissions := max(outcome.num_submissions for outcome in outcomes)) > 1:
        fields["submissions"] = num_submissions
    if worst.message:
        fields["error"] = worst.message
    return fields


def _rounded(seconds: float) -> float:
    return round(seconds, _DIGITS)


def _longest(times: Iterable[float]) -> float | None:
    return max((_rounded(seconds) for seconds in times), default=None)
