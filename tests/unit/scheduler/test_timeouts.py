"""Which requests are watched for their deadline, and until when."""

from __future__ import annotations

import math

import pytest

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.admission.queue import ClassQueues, WaitingQueue
from scheduler_svc.core.lifecycle.timeouts import Timeouts
from scheduler_svc.core.requests.request import Request, SubmissionMetadata
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.order.fcfs import FirstComeFirstServed


def never(error: Exception) -> FirstComeFirstServed:
    raise error


@pytest.mark.parametrize(("deadline_s", "watched"), [(5.0, 1), (math.inf, 0)])
def test_only_requests_with_a_deadline_are_watched_and_ended_ones_are_not(deadline_s: float, watched: int) -> None:
    online, offline = (WaitingQueue(FirstComeFirstServed(), never) for _ in range(2))
    timeouts = Timeouts(SchedulerConfig(), ClassQueues(online, offline), {})
    metadata = SubmissionMetadata(deadline_s=deadline_s)
    request = Request(1, "s", 1, "r", bytes(8), bytearray(), SamplingParams(max_tokens=4), 0.0, metadata)
    timeouts.add(request)
    assert len(timeouts._deadlines) == watched
    timeouts.remove(request)
    assert not timeouts._deadlines
