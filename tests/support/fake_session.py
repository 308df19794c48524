"""The scheduler as a gateway's readers see it, without a scheduler: tests say which tokens come, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.v1 import common_pb2, inference_pb2
from services.gateway.engine.live_request import LiveRequest
from services.gateway.engine.request import GenerateJob
from services.gateway.engine.sequence_run import SequenceRun
from services.gateway.telemetry.metrics import GatewayMetrics

LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP
ERROR, UNSPECIFIED = common_pb2.FINISH_REASON_ERROR, common_pb2.FINISH_REASON_UNSPECIFIED


class FakeSession:
    """Stands in for SchedulerSession."""

    def __init__(self) -> None:
        self.live: list[LiveRequest] = []
        self.metrics = GatewayMetrics()

    def submit(self, request_id: str, prompt: bytes, sampling: Any, final: frozenset[int], *_: Any) -> LiveRequest:
        request = LiveRequest(len(self.live) + 1, request_id, prompt, sampling, final, 0.0)
        self.live.append(request)
        return request

    def cancel(self, request: LiveRequest) -> None:
        if request.ending is None:
            request.cancelled = True
            self.end(request, common_pb2.FINISH_REASON_ABORT)

    def run(self, jobs: Sequence[GenerateJob]) -> list[SequenceRun]:
        return [SequenceRun(job, self, self.metrics) for job in jobs]  # type: ignore[arg-type]

    def give(self, request: LiveRequest, *token_ids: int) -> None:
        if request.ending is None:
            request.tokens += token_ids
            self._wake(request)

    def end(self, request: LiveRequest, reason: common_pb2.FinishReason.ValueType = LENGTH, code: int = 0) -> None:
        if request.ending is None:
            request.ending = inference_pb2.Ending(reason=reason, code=code, cached_tokens=1)
            self._wake(request)

    @staticmethod
    def _wake(request: LiveRequest) -> None:
        if request.wake is not None:
            request.wake()
