"""Records steps, exchanges with the cache, and scheduler events for traces. Without a reader, nothing is recorded."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from paceline.v1.cache_pb2 import CacheServiceLinkRequest, CacheServiceLinkResponse
from paceline.v1.live_pb2 import TracedExchange, TracedRun, TracedStep
from paceline.v1.worker_pb2 import StepResult, WorkerServiceLinkResponse
from scheduler_svc.core.workers.steps import StepInFlight

MAX_KEPT = 16_384  # of each kind

T = TypeVar("T")


class TraceReader(NamedTuple):
    """A reader's position in the log: how many steps, exchanges and runs the log had counted when this reader last
    read."""

    steps: int
    exchanges: int
    runs: int


class _Kept(Generic[T]):
    """The last MAX_KEPT items of a kind."""

    def __init__(self) -> None:
        self.num = 0
        self.items: deque[T] = deque(maxlen=MAX_KEPT)

    def add(self, item: T) -> None:
        self.num += 1
        self.items.append(item)

    def since(self, num_seen: int) -> list[T]:
        num_new = min(self.num - num_seen, len(self.items))
        return list(itertools.islice(self.items, len(self.items) - num_new, None))


class TraceLog:
    """The recorded items, in the form in which they are sent. Times of arguments are seconds."""

    def __init__(self) -> None:
        self.num_readers = 0
        self._steps, self._exchanges, self._runs = _Kept[TracedStep](), _Kept[TracedExchange](), _Kept[TracedRun]()
        self._asked: tuple[int, TracedExchange] | None = None  # the exchange in flight: its number, what is known

    # To be called only while there is a reader:

    def plan_sent(self, message: WorkerServiceLinkResponse) -> None:
        """Ask the worker for its times."""
        if message.HasField("plan"):
            message.plan.traced = True

    def step_ended(self, worker: int, name: str, step: StepInFlight, result: StepResult, now_s: float) -> None:
        self._steps.add(
            TracedStep(
                worker=worker,
                name=name,
                step=step.step,
                planned_us=microseconds(step.planned_s),
                sent_us=microseconds(step.sent_s),
                ended_us=microseconds(now_s),
                received_us=result.received_us,
                started_us=result.started_us,
                finished_us=result.finished_us,
                result_sent_us=result.sent_us,
                num_decodes=step.num_decodes,
                num_prefills=len(step.chunks),
                new_tokens=step.new_tokens,
                context_tokens=step.context_tokens,
            )
        )

    def exchange_sent(self, exchange: CacheServiceLinkRequest, now_s: float) -> None:
        """Ask the cache for its times."""
        exchange.traced = True
        self._asked = exchange.exchange, TracedExchange(sent_us=microseconds(now_s), num_ops=len(exchange.ops))

    def exchange_ended(self, response: CacheServiceLinkResponse, now_s: float) -> None:
        if self._asked is None or self._asked[0] != response.exchange:
            return  # it was sent before the trace began
        _, exchange = self._asked
        self._asked = None
        exchange.ended_us = microseconds(now_s)
        exchange.received_us, exchange.answered_us = response.received_us, response.answered_us
        self._exchanges.add(exchange)

    def ran(
        self, event: str, began_s: float, applied_s: float, ended_s: float, num_plans: int, num_exchanges: int
    ) -> None:
        """An event was applied, and then steps were planned."""
        self._runs.add(
            TracedRun(
                event=event,
                began_us=microseconds(began_s),
                applied_us=microseconds(applied_s),
                ended_us=microseconds(ended_s),
                num_plans=num_plans,
                num_exchanges=num_exchanges,
            )
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[TraceReader]:
        """Items are recorded while this context is open. Yields the reader's start position, which since() takes. When
        the last reader leaves, the items are dropped."""
        self.num_readers += 1
        try:
            yield TraceReader(self._steps.num, self._exchanges.num, self._runs.num)
        finally:
            self.num_readers -= 1
            if not self.num_readers:
                self._asked = None
                for kept in (self._steps, self._exchanges, self._runs):
                    kept.items.clear()

    def since(
        self, seen: TraceReader
    ) -> tuple[TraceReader, list[TracedStep], list[TracedExchange], list[TracedRun], int]:
        """The reader's new position, the kept items since `seen`, and how many items since `seen` were dropped."""
        now = TraceReader(self._steps.num, self._exchanges.num, self._runs.num)
        steps, exchanges, runs = (
            self._steps.since(seen.steps), self._exchanges.since(seen.exchanges), self._runs.since(seen.runs),
        )  # fmt: skip
        return now, steps, exchanges, runs, sum(now) - sum(seen) - len(steps) - len(exchanges) - len(runs)


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
