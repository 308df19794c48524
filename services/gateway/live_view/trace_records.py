"""The records of a trace as JSON, a part at a time.

An answer of a busy scheduler has tens of thousands of items. Converting all of them at once would delay the tokens of
other requests by about 100 ms. A thread would not help, because it holds Python's lock. So a record has at most
MAX_ITEMS items of each kind, and the rest is in the records that follow it. Plain values: pydantic models would take
ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import orjson

from paceline.v1 import live_pb2
from services.gateway.live_view.plain import as_dict
from services.gateway.live_view.trace_schema import ExchangeTrace, RunTrace, StepTrace
from services.gateway.telemetry.trace_log import Ended, TraceItems

MAX_ITEMS = 128


class SchedulerAnswer(NamedTuple):
    """`asked_us` and `got_us` are of the gateway's clock."""

    answer: live_pb2.TraceResponse
    asked_us: int
    got_us: int


def records(of_scheduler: SchedulerAnswer | None, items: TraceItems, at_us: int) -> Iterator[bytes]:
    """Each a TraceRecord (trace_schema.py). There is at least one."""
    most = max(len(items.messages), len(items.written), len(items.ended))
    if of_scheduler is not None:
        answer = of_scheduler.answer
        most = max(most, len(answer.steps), len(answer.exchanges), len(answer.runs))
    for begin in range(0, max(most, 1), MAX_ITEMS):
        part = slice(begin, begin + MAX_ITEMS)
        record = {
            "gateway": {
                "at_us": at_us,
                "messages": [asdict(one) for one in items.messages[part]],
                "written": [asdict(one) for one in items.written[part]],
                "requests": [_request(one) for one in items.ended[part]],
            },
            "scheduler": _scheduler(of_scheduler, part) if of_scheduler is not None else None,
        }
        yield orjson.dumps(record)


def _scheduler(found: SchedulerAnswer, part: slice) -> dict[str, Any]:
    answer = found.answer
    return {
        "asked_us": found.asked_us,
        "received_us": answer.received_us,
        "sent_us": answer.sent_us,
        "got_us": found.got_us,
        "epoch": answer.epoch,
        "steps": [as_dict(one, StepTrace) for one in answer.steps[part]],
        "exchanges": [as_dict(one, ExchangeTrace) for one in answer.exchanges[part]],
        "runs": [as_dict(one, RunTrace) for one in answer.runs[part]],
        "num_missed": 0 if part.start else answer.num_missed,  # once, since readers add them up
    }


def _request(one: Ended) -> dict[str, Any]:
    outcome = one.outcome
    return {
        "request_id": outcome.request_id,
        "answer_id": outcome.answer_id,
        "endpoint": outcome.endpoint,
        "tenant": outcome.tenant,
        "finish_reason": outcome.finish_reason,
        "ended_us": one.ended_us,
        "latency_s": outcome.latency_s,
        "queue_s": outcome.timing.queue_s if outcome.timing is not None else None,
        "ttft_s": outcome.ttft_s,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "output_tokens": outcome.output_tokens,
    }
