"""The session's state machine without a socket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.v1 import common_pb2, inference_pb2
from paceline.v1.common_pb2 import RetentionRange
from services.gateway.engine.live_request import LiveRequest
from services.gateway.engine.session_core import SessionCore, SessionFull, SessionProtocolError
from services.runtime.fence import StaleScheduler

LENGTH, ABORT = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_ABORT
PROMPT = np.asarray([1, 2, 3], "<i4").tobytes()


def make_core(**options: object) -> SessionCore:
    settings = {"response_window": 8, "max_live": 100, "wait_s": 10.0, **options}
    return SessionCore("test", **settings)  # type: ignore[arg-type]


def submit(
    core: SessionCore,
    max_tokens: int = 10,
    now_s: float = 0.0,
    final: frozenset[int] = frozenset(),
    offline: bool = False,
) -> LiveRequest:
    metadata = inference_pb2.Submission(offline=offline)
    return core.submit("id", PROMPT, common_pb2.SamplingParams(max_tokens=max_tokens), now_s, final, metadata)


def opened(core: SessionCore, epoch: int = 1) -> list[inference_pb2.SessionRequest]:
    """Connect, and let the scheduler open the session; returns what was sent."""
    core.connect()
    sent = drain(core)
    core.receive(
        inference_pb2.SessionResponse(
            opened=inference_pb2.SessionOpened(epoch=epoch), status=inference_pb2.SchedulerStatus(ready=True)
        )
    )
    return sent + drain(core)


def drain(core: SessionCore) -> list[inference_pb2.SessionRequest]:
    out = []
    while (message := core.take_request()) is not None:
        out.append(message)
        assert len(out) < 100, "the core drains without end"
    return out


def tokens(
    *pairs: tuple[LiveRequest, int], endings: tuple[inference_pb2.Ending, ...] = ()
) -> inference_pb2.SessionResponse:
    data = np.asarray([token for _, token in pairs], "<i4").tobytes()
    return inference_pb2.SessionResponse(handles=[r.handle for r, _ in pairs], token_ids=data, endings=endings)


def ending(request: LiveRequest, reason: common_pb2.FinishReason.ValueType = LENGTH) -> inference_pb2.Ending:
    return inference_pb2.Ending(handle=request.handle, reason=reason)


def test_open_comes_first_and_submissions_after_the_scheduler_has_opened() -> None:
    core = make_core()
    request = submit(core)
    assert core.take_request() is None
    messages = opened(core)
    assert [m.HasField("open") for m in messages] == [True, False]
    assert messages[0].open.response_window == 8
    assert not messages[0].submissions
    (submission,) = messages[1].submissions
    assert (submission.handle, submission.prompt_token_ids) == (request.handle, PROMPT)
    assert not submission.output_token_ids
    assert not submission.accepted_before


def test_one_message_carries_all_submissions_and_cancels_of_a_turn() -> None:
    core = make_core()
    opened(core)
    first = submit(core)
    drain(core)
    more = [submit(core) for _ in range(5)]
    core.cancel(first)
    (message,) = drain(core)
    assert [s.handle for s in message.submissions] == [r.handle for r in more]
    assert list(message.cancels) == [first.handle]


def test_tokens_and_endings_reach_their_requests() -> None:
    core = make_core()
    a, b = submit(core), submit(core)
    opened(core)
    touched = core.receive(tokens((a, 7), (b, 8), (a, 9), endings=(ending(a),)))
    assert touched == [a, b, a, a]
    assert (a.tokens, b.tokens) == ([7, 9], [8])
    assert a.ending is not None
    assert core.num_live == 1
    # The request has ended: no request takes what still comes for its handle.
    assert core.receive(tokens((a, 1))) == []
    assert a.tokens == [7, 9]


def test_unfinished_requests_are_submitted_again_with_their_tokens() -> None:
    core = make_core()
    a, b, c = submit(core), submit(core), submit(core)
    opened(core)
    core.receive(tokens((a, 7), (b, 8), (a, 9), endings=(ending(b),)))
    core.disconnect(1.0)
    core.cancel(c)
    assert c.ending is not None
    d = submit(core)
    again = opened(core, epoch=2)[1]
    assert [
        (s.handle, np.frombuffer(s.output_token_ids, "<i4").tolist(), s.accepted_before) for s in again.submissions
    ] == [(a.handle, [7, 9], True), (d.handle, [], False)]
    assert again.responses_read == 1
    assert core.epoch == 2


def test_a_deadline_counts_from_the_first_submission() -> None:
    """However often the request is submitted again. A past deadline is sent as 1 ms, because 0 means no deadline."""
    core = make_core(wait_s=60.0)
    metadata = inference_pb2.Submission(
        deadline_s=8.0, priority=2.0, tenant="a", cache_salt="s", cache_retention=(RetentionRange(end=4),)
    )
    request = core.submit("id", PROMPT, common_pb2.SamplingParams(max_tokens=10), 100.0, frozenset(), metadata)
    first = opened(core)[1].submissions[0]
    assert first.deadline_s == 8.0
    core.receive(tokens((request, 7)))
    for epoch, (now_s, left_s) in enumerate(((103.0, 5.0), (107.5, 0.5), (130.0, 0.001)), start=2):
        core.disconnect(now_s)
        core.tick(now_s)
        (again,) = opened(core, epoch)[1].submissions
        assert again.deadline_s == pytest.approx(left_s)
        again.deadline_s = first.deadline_s
        again.ClearField("output_token_ids")
        again.accepted_before = False
        assert again == first, "every other field is sent again"


def test_a_stream_that_never_opened_accepted_nothing() -> None:
    core = make_core()
    request = submit(core)
    core.connect()
    drain(core)
    core.disconnect(0.0)
    (submission,) = opened(core)[1].submissions
    assert submission.handle == request.handle
    assert not submission.accepted_before


@pytest.mark.parametrize(
    ("final", "reason"), [(6, common_pb2.FINISH_REASON_LENGTH), (5, common_pb2.FINISH_REASON_STOP)]
)
def test_an_ending_lost_with_the_stream_is_derived_from_the_tokens(final: int, reason: int) -> None:
    core = make_core()
    request = submit(core, max_tokens=2, final=frozenset({final}))
    opened(core)
    core.receive(tokens((request, 4), (request, 5)))
    core.disconnect(0.0)
    assert core.connect() == [request]
    assert request.ending is not None
    assert request.ending.reason == reason
    assert core.num_live == 0


def test_a_cancelled_request_gets_no_more_tokens_but_its_ending() -> None:
    core = make_core()
    request = submit(core)
    opened(core)
    core.receive(tokens((request, 1)))
    core.cancel(request)
    core.cancel(request)
    assert list(drain(core)[0].cancels) == [request.handle]
    core.receive(tokens((request, 2)))
    assert request.tokens == [1]
    report = inference_pb2.Ending(handle=request.handle, reason=common_pb2.FINISH_REASON_ABORT, cached_tokens=3)
    assert core.receive(tokens(endings=(report,))) == [request]
    assert request.ending == report
    assert core.num_live == 0


def test_a_request_cancelled_before_it_was_sent_is_never_sent() -> None:
    core = make_core()
    opened(core)
    request = submit(core)
    core.cancel(request)
    assert request.ending is not None
    assert drain(core) == []


def test_waiting_for_a_scheduler_has_a_deadline() -> None:
    core = make_core(wait_s=10.0)
    early = submit(core, now_s=100.0)
    late = submit(core, now_s=105.0)
    assert core.tick(109.9) == []
    assert core.tick(110.0) == [early]
    assert early.ending is not None
    assert early.ending.code == 14
    opened(core)
    assert core.tick(1000.0) == []
    core.disconnect(1000.0)
    assert core.tick(1009.0) == []
    assert core.tick(1010.0) == [late]


def test_live_requests_are_bounded_and_handles_not_reused_while_they_live() -> None:
    core = make_core(max_live=3)
    requests = [submit(core) for _ in range(3)]
    with pytest.raises(SessionFull):
        submit(core)
    core.cancel(requests[1])
    core._next_handle = requests[0].handle
    assert submit(core).handle not in {requests[0].handle, requests[2].handle}


def test_offline_requests_have_a_limit_of_their_own() -> None:
    core = make_core(max_live=2)
    offline = [submit(core, offline=True) for _ in range(2)]
    with pytest.raises(SessionFull):
        submit(core, offline=True)
    assert not core.is_full
    submit(core)
    core.cancel(offline[0])
    submit(core, offline=True)
    submit(core)
    assert core.is_full
    with pytest.raises(SessionFull):
        submit(core)


def test_a_handle_is_not_used_again_by_the_next_request() -> None:
    """Otherwise late messages for the ended request would reach the new one."""
    core = make_core()
    opened(core)
    first = submit(core)
    drain(core)
    core.receive(tokens((first, 7), endings=(ending(first),)))
    second = submit(core)
    assert second.handle != first.handle
    core.receive(tokens((first, 8)))
    assert second.tokens == []


def test_handles_wrap_around_below_32_bits() -> None:
    core = make_core()
    core._next_handle = 2**32 - 1
    assert [submit(core).handle for _ in range(2)] == [2**32 - 1, 1]


def test_responses_are_acknowledged_in_time() -> None:
    core = make_core(response_window=8)
    request = submit(core)
    opened(core)
    submit(core)
    assert drain(core)[0].responses_read == 1
    acks = []
    for i in range(20):
        core.receive(tokens((request, i)))
        acks += [m.responses_read for m in drain(core)]
    assert acks == [3, 5, 7, 9, 11, 13, 15, 17, 19, 21]


def test_a_large_resubmission_is_cut_into_messages() -> None:
    core = make_core()
    prompt = bytes(4 * 2**18)
    for _ in range(10):
        core.submit("id", prompt, common_pb2.SamplingParams(max_tokens=1), 0.0)
    messages = opened(core)[1:]
    assert sum(len(m.submissions) for m in messages) == 10
    assert len(messages) > 1
    assert max(m.ByteSize() for m in messages) < 8 * 2**20


def test_every_field_of_a_submission_counts_for_the_message_size() -> None:
    core, metadata = make_core(), inference_pb2.Submission(cache_salt="x" * 2**20)
    for _ in range(10):
        core.submit("id", b"1234", common_pb2.SamplingParams(max_tokens=1), 0.0, metadata=metadata)
    messages = opened(core)[1:]
    assert sum(len(m.submissions) for m in messages) == 10
    assert max(m.ByteSize() for m in messages) < 8 * 2**20


def test_a_message_against_the_protocol_is_an_error() -> None:
    core = make_core()
    core.connect()
    with pytest.raises(SessionProtocolError, match="opened"):
        core.receive(inference_pb2.SessionResponse())
    core = make_core()
    opened(core)
    with pytest.raises(SessionProtocolError, match="2 handles"):
        core.receive(inference_pb2.SessionResponse(handles=[1, 2], token_ids=b"1234"))


def test_going_down_fails_everything() -> None:
    core = make_core()
    a = submit(core)
    opened(core)
    b = submit(core)
    assert core.fail_all("bye") == [a, b]
    assert core.num_live == 0
    assert list(drain(core)[0].cancels) == [a.handle]
    assert a.ending is not None
    assert a.ending.message == "bye"


class CountingScheduler:
    """Generates 0, 1, 2, ... for each request, and forgets all requests when the stream breaks."""

    def __init__(self, core: SessionCore) -> None:
        self.core = core
        self.positions: dict[int, int] = {}

    def take(self, messages: list[inference_pb2.SessionRequest]) -> None:
        for message in messages:
            for submission in message.submissions:
                self.positions[submission.handle] = len(submission.output_token_ids) // 4
            for handle in message.cancels:
                if self.positions.pop(handle, None) is not None:
                    self.core.receive(tokens(endings=(inference_pb2.Ending(handle=handle, reason=ABORT),)))

    def step(self, requests: list[LiveRequest], *, end: bool) -> None:
        by_handle = {request.handle: request for request in requests}
        for handle in list(self.positions):
            self.core.receive(tokens((by_handle[handle], self.positions[handle])))
            self.positions[handle] += 1
            if end:
                self.core.receive(tokens(endings=(ending(by_handle[handle]),)))
                del self.positions[handle]


@given(st.lists(st.sampled_from(["submit", "token", "end", "cancel", "break", "open"]), max_size=60))
def test_every_request_sees_each_token_once_in_order(actions: list[str]) -> None:
    core = make_core()
    scheduler = CountingScheduler(core)
    requests: list[LiveRequest] = []
    for action in actions:
        if action == "submit":
            requests.append(submit(core, max_tokens=1000))
        elif action == "open" and not core.connected:
            scheduler.take(opened(core))
        elif action == "break":
            core.disconnect(0.0)
            scheduler.positions.clear()
        elif action == "cancel" and requests:
            core.cancel(requests[-1])
        elif core.connected:
            scheduler.step(requests, end=action == "end")
        if core.connected:
            scheduler.take(drain(core))
    for request in requests:
        assert request.tokens == list(range(len(request.tokens)))
    assert core.num_live == sum(request.ending is None for request in requests)


def test_a_scheduler_with_a_lower_epoch_is_refused() -> None:
    core = make_core()
    request = submit(core)

    def opening(fence: int) -> inference_pb2.SessionResponse:
        core.disconnect(0.0)
        core.connect()
        drain(core)
        return inference_pb2.SessionResponse(opened=inference_pb2.SessionOpened(epoch=fence, fence=fence))

    core.receive(opening(0))
    core.receive(opening(7))
    for fence in (6, 0):  # 0: a scheduler without an election
        with pytest.raises(StaleScheduler, match="there was a leader of epoch 7"):
            core.receive(opening(fence))
        assert not core.opened
        assert not [message for message in drain(core) if message.submissions]
    core.receive(opening(7))  # the same once more
    (submission,) = drain(core)[0].submissions
    assert submission.handle == request.handle


def test_heartbeats_go_alone_and_do_not_count_as_responses() -> None:
    core = make_core(response_window=4)
    messages = opened(core)
    assert messages[0].open.heartbeats
    core.beat()
    assert drain(core) == [inference_pb2.SessionRequest(responses_read=1)]
    for _ in range(10):
        assert core.receive(inference_pb2.SessionResponse(heartbeat=True)) == []
    assert drain(core) == [], "nothing is due"


def test_the_model_is_known_while_the_scheduler_is_away() -> None:
    core = make_core()
    opened(core)
    assert core.model is None
    model = common_pb2.ModelInfo(name="m", max_model_len=1536)
    core.receive(inference_pb2.SessionResponse(status=inference_pb2.SchedulerStatus(ready=True, model=model)))
    assert core.model == model
    core.disconnect(1.0)
    assert core.status is None
    assert core.model == model, "else a request of this moment gets the limits of the model's files"
    opened(core, epoch=2)  # no worker has come to it yet
    assert core.model == model


def test_a_submission_carries_the_tokens_that_another_gateway_delivered() -> None:
    core = make_core()
    opened(core)
    sampling = common_pb2.SamplingParams(max_tokens=4, logprobs=True, prompt_logprobs=True)
    request = core.submit("id", PROMPT, sampling, 0.0, delivered=[7, 8])
    [message] = drain(core)
    [submission] = message.submissions
    assert np.frombuffer(submission.output_token_ids, "<i4").tolist() == [7, 8]
    assert not submission.accepted_before, "the gateway does not know whether this scheduler accepted it"
    assert not submission.sampling.prompt_logprobs
    core.receive(tokens((request, 9)))
    assert request.tokens == [7, 8, 9]
    assert len(request.scores) == 2, "one score for each delivered token; a new token brings its own"
    done = core.submit("id", PROMPT, common_pb2.SamplingParams(max_tokens=9), 0.0, frozenset([5]), delivered=[7, 5])
    assert done.ending is not None
    assert done.ending.reason == common_pb2.FINISH_REASON_STOP
    assert drain(core) == []
    assert core.num_live == 1


def test_a_request_refused_by_a_full_scheduler_retries_after_those_that_the_gateway_refused() -> None:
    core = make_core()
    opened(core)
    core.tick(0.0)
    for _ in range(4):  # four finish in a second; the gateway promises nine tenths of that rate
        core.receive(inference_pb2.SessionResponse(endings=[ending(submit(core))]))
    core.tick(1.0)
    refused = [submit(core, now_s=1.0) for _ in range(3)]
    drain(core)

    def refuse(request: LiveRequest, *, full: bool) -> float:
        response = inference_pb2.SessionResponse(endings=[ending(request, common_pb2.FINISH_REASON_ERROR)])
        response.endings[0].code, response.endings[0].retry_after_s = 8, 0.5
        response.status.full = full
        core.receive(response)
        assert request.ending is not None
        return request.ending.retry_after_s

    assert refuse(refused[0], full=False) == 0.5, "at a tenant's limit, the scheduler's time counts"
    assert [core.retry_after_s(1.0) for _ in range(3)] == pytest.approx([1 / 3.6, 2 / 3.6, 3 / 3.6])
    assert refuse(refused[1], full=True) == pytest.approx(4 / 3.6)
    assert refuse(refused[2], full=True) == pytest.approx(5 / 3.6)


def test_unseen_submissions_take_queue_positions() -> None:
    core = make_core()
    opened(core)
    assert core.admission.takes(1000), "the scheduler has sent no number yet"
    core.receive(inference_pb2.SessionResponse(room=inference_pb2.QueueRoom(places=2, num_submissions=0)))
    submit(core)
    assert [core.admission.takes(len(core._unsent) + i) for i in (0, 1)] == [True, False], "not sent yet"
    drain(core)
    assert [core.admission.takes(len(core._unsent) + i) for i in (0, 1)] == [True, False], "not seen yet"
    core.receive(inference_pb2.SessionResponse(room=inference_pb2.QueueRoom(places=1, num_submissions=1)))
    assert [core.admission.takes(len(core._unsent) + i) for i in (0, 1)] == [True, False]
    core.connect()
    assert core.admission.takes(1000), "the new stream has sent no number yet"


MALFORMED: list[dict[str, Any]] = [
    {"token_ids": b"123"},
    {"handles": [1], "token_ids": b""},
    {"scores": [inference_pb2.TokenScore(handle=1, top_token_ids=b"123")]},
    {"scores": [inference_pb2.TokenScore(handle=1, top_token_ids=b"1234", top_logprobs=b"")]},
    {"prompt_scores": [{"handle": 1, "logprobs": {"logprobs": b"123"}}]},
    {"prompt_scores": [{"handle": 1, "logprobs": {"logprobs": b"1234", "ranks": b""}}]},
    {"prompt_scores": [{"handle": 1, "logprobs": {"logprobs": b"1234" * 2, "ranks": b"1234", "top_token_ids": b""}}]},
    {"prompt_scores": [{"handle": 1, "logprobs": {"logprobs": b"1234", "ranks": b"1234", "top_token_ids": b"1234"}}]},
    {"embeddings": [{"handle": 1, "values": b"123"}]},
    {"embeddings": [{"handle": 1, "values": b""}]},
]


@pytest.mark.parametrize("fields", MALFORMED)
def test_a_malformed_message_changes_no_request(fields: dict[str, Any]) -> None:
    """So that the next stream can go on from the tokens received before."""
    core = make_core()
    request = submit(core)
    opened(core)
    core.receive(tokens((request, 4)))
    message = inference_pb2.SessionResponse(**{"handles": [1], "token_ids": b"\5\0\0\0", **fields})
    message.endings.add(handle=1, reason=common_pb2.FINISH_REASON_STOP)
    assert request.handle == 1
    with pytest.raises(SessionProtocolError):
        core.receive(message)
    assert (request.tokens, request.scores, request.prompt_scores, request.ending) == ([4], [], {}, None)


def test_a_message_that_grpc_could_not_decode_breaks_the_protocol() -> None:
    core = make_core()
    opened(core)
    with pytest.raises(SessionProtocolError, match="decode"):
        core.receive(None)


def status_of(model: str) -> inference_pb2.SchedulerStatus:
    return inference_pb2.SchedulerStatus(ready=True, model=common_pb2.ModelInfo(name=model))


def guarded_core() -> SessionCore:
    """The session core of a gateway that serves model a."""
    return make_core(difference=lambda model: "" if model.name == "a" else f"not {model.name}")


def test_no_token_of_another_model_is_taken() -> None:
    """The token may come in the same message in which the scheduler first names the model of its workers."""
    core = guarded_core()
    opened(core)
    early = submit(core)
    drain(core)
    message = tokens((early, 7))
    message.status.CopyFrom(status_of("b"))
    assert core.receive(message) == [early]
    assert early.tokens == []
    assert early.ending is not None
    assert (early.ending.code, early.ending.message) == (14, "not b")
    assert early.ending.retry_after_s > 0
    assert core.num_live == 0
    assert drain(core)[0].cancels == [early.handle]
    assert core.mismatch == "not b"


@pytest.mark.parametrize("fields", MALFORMED)
def test_a_malformed_message_of_another_model_changes_no_request(fields: dict[str, Any]) -> None:
    core = guarded_core()
    opened(core)
    request = submit(core)
    drain(core)
    message = inference_pb2.SessionResponse(**{"handles": [1], "token_ids": b"\5\0\0\0", **fields})
    message.status.CopyFrom(status_of("b"))
    with pytest.raises(SessionProtocolError):
        core.receive(message)
    assert request.ending is None
    assert core.num_live == 1
    assert not any(sent.cancels for sent in drain(core))


@pytest.mark.parametrize("fields", MALFORMED)
def test_a_malformed_message_adds_no_vector(fields: dict[str, Any]) -> None:
    core = make_core()
    opened(core)
    request = submit(core)
    drain(core)
    embeddings = [inference_pb2.Embedding(handle=request.handle, values=b"\0\0\0\0")]
    message = inference_pb2.SessionResponse(**{"handles": [1], "token_ids": b"\5\0\0\0", **fields})
    message.embeddings.extend(embeddings)
    with pytest.raises(SessionProtocolError):
        core.receive(message)
    assert request.embedding == b""


def test_the_right_model_ends_a_mismatch() -> None:
    core = guarded_core()
    opened(core)
    core.receive(inference_pb2.SessionResponse(status=status_of("b")))
    core.receive(inference_pb2.SessionResponse(status=status_of("a")))
    assert core.mismatch == ""
    request = submit(core)
    core.receive(tokens((request, 7)))
    assert request.tokens == [7]


def test_a_new_scheduler_that_knows_no_model_yet_is_no_mismatch() -> None:
    core = guarded_core()
    opened(core)
    core.receive(inference_pb2.SessionResponse(status=status_of("b")))
    core.disconnect(0.0)
    opened(core, epoch=2)
    assert core.mismatch == ""


def test_a_running_request_is_not_continued_by_another_model() -> None:
    core = guarded_core()
    opened(core)
    core.receive(inference_pb2.SessionResponse(status=status_of("a")))
    request = submit(core)
    drain(core)
    core.receive(tokens((request, 7)))
    core.disconnect(0.0)
    core.connect()
    drain(core)
    core.receive(inference_pb2.SessionResponse(opened=inference_pb2.SessionOpened(epoch=2), status=status_of("b")))
    assert request.tokens == [7]
    assert request.ending is not None
    assert request.ending.message == "not b"
    assert not [message for message in drain(core) if message.submissions]


def test_with_a_small_window_each_response_is_acknowledged() -> None:
    core = make_core(response_window=4)
    assert opened(core)[-1].responses_read == 1
    core.receive(inference_pb2.SessionResponse())
    assert [message.responses_read for message in drain(core)] == [2]


def test_a_heartbeat_brings_the_load_and_a_lost_stream_forgets_it() -> None:
    core = make_core()
    opened(core)
    assert core.load is None
    core.receive(
        inference_pb2.SessionResponse(heartbeat=True, load=inference_pb2.SchedulerLoad(num_running=3, num_waiting=2))
    )
    assert core.load is not None
    assert (core.load.num_running, core.load.num_waiting) == (3, 2)
    core.receive(inference_pb2.SessionResponse(heartbeat=True))  # an older scheduler sends no load
    assert core.load is not None
    core.disconnect(1.0)
    assert core.load is None


def test_the_embedding_of_an_ended_request_is_ignored() -> None:
    core = make_core()
    opened(core)
    core.receive(inference_pb2.SessionResponse(embeddings=[inference_pb2.Embedding(handle=7, values=bytes(4))]))


def test_the_embedding_of_a_cancelled_request_is_ignored() -> None:
    core = make_core()
    opened(core)
    request, cancelled = submit(core), submit(core)
    drain(core)
    core.cancel(cancelled)
    embeddings = [inference_pb2.Embedding(handle=each.handle, values=bytes(4)) for each in (request, cancelled)]
    core.receive(inference_pb2.SessionResponse(embeddings=embeddings))
    assert (request.embedding, cancelled.embedding) == (bytes(4), b"")
