"""The client side of InferenceService.Session as plain state: live requests, the next message, received messages.

No sockets, no tasks, no clock: the caller passes time as `now_s`. A request lives here from `submit` until it has
ended, even if the scheduler dies and comes back several times. After each `connect` every live request is submitted
again together with the tokens that have arrived. So generation continues after them, and the client sees a pause.

    submit ──> unsent ──take_request──> at the scheduler ──ending──> ended
                 ^                            │
                 └──────── connect ───────────┘        (after a disconnect the scheduler runs none of them)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paceline.v1 import common_pb2, inference_pb2
from services.gateway.admission.control import AdmissionControl
from services.gateway.engine.live_request import ABORTED, NO_METADATA, LiveRequest
from services.gateway.engine.scores import Score, prompt_scores_of, score_of
from services.gateway.errors import QUEUE_LIMITS, QueueLimit
from services.runtime.fence import Fence

_RESOURCE_EXHAUSTED, _UNAVAILABLE = 8, 14  # google.rpc.Code
_MAX_HANDLE = 2**32 - 1
# When a client should retry after a model mismatch. The gateway or the workers are being replaced.
MISMATCH_RETRY_S = 5.0
# A SessionRequest stays far below the message limit of 16 MiB, however many requests are submitted again at once.
_MAX_REQUEST_BYTES = 4 * 2**20


class SessionProtocolError(Exception):
    """The scheduler broke the protocol. The stream is useless."""


class SessionFull(Exception):
    """More live requests than the gateway may hold."""


class _TokenContent(NamedTuple):
    """What a message adds to the outputs of requests, by handle."""

    tokens: Sequence[tuple[int, int]]
    prompt_scores: Sequence[tuple[int, dict[int, Score]]]
    scores: Sequence[tuple[int, Score]]


class SessionCore:
    """State of one gateway's session.

    `response_window`: how many SessionResponses the scheduler may send ahead of our acknowledgements. `max_live`: limit
    of live requests, for online and for offline ones each. `wait_s`: a request fails with UNAVAILABLE after waiting
    this long without a scheduler. `difference`: returns why the workers' model is not the gateway's own, or "". While
    it differs, no token is taken. `model_name`: the model's name for clients.
    """

    def __init__(
        self,
        session_id: str,
        *,
        response_window: int,
        max_live: int,
        wait_s: float,
        model_name: str = "",
        difference: Callable[[common_pb2.ModelInfo], str] = lambda model: "",
    ) -> None:
        self.session_id = session_id
        self._model_name = model_name
        self.connected = False
        self.opened = False
        self.epoch: int | None = None
        self.num_epochs = 0  # schedulers that have opened the session one after the other
        self._fence = Fence()
        self.status: inference_pb2.SchedulerStatus | None = None
        self.load: inference_pb2.SchedulerLoad | None = None
        # The last report. It stays while the scheduler is away, because limits and final tokens do not change.
        self.model: common_pb2.ModelInfo | None = None
        # The result of `difference` for the last report.
        self.mismatch = ""
        self._difference = difference
        self._window = response_window
        self._max_live = max_live
        self._wait_s = wait_s
        self._live: dict[int, LiveRequest] = {}
        self._num_offline = 0  # of _live
        self._unsent: dict[int, LiveRequest] = {}
        self._cancels: list[int] = []
        self._next_handle = 1
        self._down_since_s: float | None = 0.0
        self._num_streams = 0
        self._open_sent = False
        self._read = 0
        self._read_sent = 0
        self._beat_due = False
        self._now_s = 0.0  # the last time passed in
        self.admission = AdmissionControl()

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def is_full(self) -> bool:
        """`submit` would raise SessionFull for an online request."""
        return self._num_online >= self._max_live

    @property
    def _num_online(self) -> int:
        return len(self._live) - self._num_offline

    def queue_takes(self) -> bool:
        """Whether the scheduler's queue, by its last report, accepts one more request."""
        return not self._is_queue_full and self.admission.takes(len(self._unsent))

    @property
    def queue_limit(self) -> QueueLimit:
        """Which limit the scheduler's queue has reached, if it is full."""
        told = inference_pb2.QUEUE_LIMIT_UNSPECIFIED if self.status is None else self.status.queue_limit
        # The free positions can run out before the scheduler reports that its queue is full.
        return QUEUE_LIMITS.get(told, "requests")

    def enter(self, now_s: float) -> int | None:
        """See AdmissionControl.enter."""
        return None if self._is_queue_full else self.admission.enter(now_s, len(self._unsent))

    @property
    def _is_queue_full(self) -> bool:
        return self.status is not None and self.status.full

    def retry_after_s(self, now_s: float) -> float:
        """When a request that is refused now should come back. In seconds from now."""
        return self.admission.retry_after.refuse(now_s, self._num_online)

    # -- requests ----------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt_token_ids: bytes,
        sampling: common_pb2.SamplingParams,
        now_s: float,
        final_tokens: frozenset[int] = frozenset(),
        metadata: inference_pb2.Submission = NO_METADATA,
        beam: inference_pb2.BeamOptions | None = None,
        delivered: Sequence[int] = (),
    ) -> LiveRequest:
        """Add a request. `delivered`: the first tokens of its output, which have no scores. If nothing is left to
        generate after them, the returned request has ended. Raises SessionFull."""
        if (self._num_offline if metadata.offline else self._num_online) >= self._max_live:
            raise SessionFull
        while self._next_handle in self._live:
            self._next_handle = self._next_handle % _MAX_HANDLE + 1
        handle = self._next_handle
        self._next_handle = handle % _MAX_HANDLE + 1
        request = LiveRequest(handle, request_id, prompt_token_ids, sampling, final_tokens, now_s, metadata, beam)
        if delivered:
            request.tokens += delivered
            request.scores += [Score(0.0)] * len(delivered) if sampling.logprobs else []
            request.ending = request.unseen_ending()
            if request.ending is not None:
                return request
        self._now_s = now_s
        self._live[handle] = request
        self._num_offline += metadata.offline
        self._unsent[handle] = request
        self.admission.retry_after.arrived()
        return request

    def cancel(self, request: LiveRequest) -> None:
        """End the request now: no more tokens arrive. No effect on an ended request.

        If the scheduler knows the request, its Ending still comes (with the count of cached tokens). Otherwise the
        request has ended on return.
        """
        if request.ending is not None or request.cancelled:
            return
        request.cancelled = True
        if self.connected and request.sent:
            self._cancels.append(request.handle)
        else:
            self._end(request, ABORTED)

    def tick(self, now_s: float) -> list[LiveRequest]:
        """Fail the requests that have waited too long for a scheduler, and return them."""
        self._now_s = now_s
        self.admission.tick(now_s)
        if self._down_since_s is None:
            return []
        down_since_s = self._down_since_s
        late = [r for r in self._live.values() if now_s - max(r.submitted_s, down_since_s) >= self._wait_s]
        for request in late:
            self._end(request, _unavailable(f"no connection to the scheduler for {self._wait_s:g} s"))
        return late

    def fail_all(self, message: str, retry_after_s: float = 0.0) -> list[LiveRequest]:
        """End every live request with UNAVAILABLE: the gateway stops, or the workers have another model."""
        requests = list(self._live.values())
        for request in requests:
            if self.connected and request.sent:
                self._cancels.append(request.handle)
            self._end(request, _unavailable(message, retry_after_s))
        return requests

    # -- the stream --------------------------------------------------------------------------------

    def connect(self) -> list[LiveRequest]:
        """Start a new stream, on which every live request is submitted again. Returns requests that have ended.

        A stream can break between a request's last token and its Ending. Such a request has nothing left to generate,
        and ends here.
        """
        self.connected, self.opened = True, False
        self._handles: list[int] = []  # of the last message with handles
        # A new session id per stream: the scheduler may not have noticed the end of the last stream.
        self._num_streams += 1
        self._open_sent = False
        self._read = self._read_sent = 0
        self.admission.new_stream()
        self._cancels.clear()
        ended = []
        for request in list(self._live.values()):
            request.sent = False
            ending = request.unseen_ending()
            if ending is not None:
                self._end(request, ending)
                ended.append(request)
        self._unsent = dict(self._live)
        return ended

    def disconnect(self, now_s: float) -> None:
        """The stream has ended."""
        self.connected = self.opened = False
        self.status = self.load = None
        self.admission.new_stream()  # the next scheduler reports its own queue
        if self._down_since_s is None:
            self._down_since_s = now_s

    def take_request(self) -> inference_pb2.SessionRequest | None:
        """The next message to send; None if there is nothing to send. Call until None."""
        if not self.connected:
            return None
        # Requests are submitted only after the scheduler has opened the session. So a request that was submitted on an
        # earlier stream counts as accepted (`accepted_before`).
        submit = self.opened and bool(self._unsent)
        acks_due = self._read - self._read_sent >= max(1, self._window // 4)
        if self._open_sent and not (submit or self._cancels or acks_due or self._beat_due):
            return None
        self._beat_due = False
        message = inference_pb2.SessionRequest(responses_read=self._read)
        if not self._open_sent:
            message.open.session_id = f"{self.session_id}-{self._num_streams}"
            message.open.response_window = self._window
            message.open.heartbeats = True
            message.open.model_name = self._model_name
            self._open_sent = True
        if submit:
            message.submissions.extend(self._submissions())
            self.admission.sent(sum(not submission.offline for submission in message.submissions))
        if self._cancels:
            message.cancels.extend(self._cancels)
            self._cancels.clear()
        self._read_sent = self._read
        return message

    def beat(self) -> None:
        """Make the next message due, even without content."""
        self._beat_due = True

    def receive(self, response: inference_pb2.SessionResponse | None) -> list[LiveRequest]:
        """Apply one message (None: gRPC could not decode it). Returns the requests with news, once per token.

        Raises SessionProtocolError, and StaleScheduler if the sender is no longer the leader. Such a message changes no
        request, so that all requests can continue on another stream.
        """
        if response is None:
            raise SessionProtocolError("a message cannot be decoded")
        if response.heartbeat:
            if response.HasField("load"):
                self.load = response.load
            return []
        self._read += 1
        if response.HasField("opened"):
            self._fence.check(response.opened.fence)
            self.opened = True
            self.num_epochs += response.opened.epoch != self.epoch
            self.epoch = response.opened.epoch
            self._down_since_s = None
        elif not self.opened:
            raise SessionProtocolError("the first message has no `opened`")
        content = self._checked_content(response)  # before a mismatch ends requests
        refused: list[LiveRequest] = []
        if response.HasField("status"):
            self.status, self.mismatch = response.status, ""
            if response.status.HasField("model"):
                self.model = response.status.model
                self.mismatch = self._difference(self.model)
            if self.mismatch:  # before the tokens of this message, which may be of the other model
                refused = self.fail_all(self.mismatch, MISMATCH_RETRY_S)
        if response.HasField("room"):
            self.admission.update(response.room.places, response.room.num_submissions)
        elif not (response.prompt_scores or response.embeddings):  # messages with these contain nothing else
            self.admission.unchanged()
        self._take_embeddings(response)
        return refused + self._take_tokens(content) + self._take_endings(response)

    # -- inside ------------------------------------------------------------------------------------

    def _take_endings(self, response: inference_pb2.SessionResponse) -> list[LiveRequest]:
        touched = []
        for ending in response.endings:
            request = self._live.get(ending.handle)
            if request is not None:
                # UNAVAILABLE: the request found no worker, so it was not served either.
                if ending.code not in (_RESOURCE_EXHAUSTED, _UNAVAILABLE) and not request.cancelled:
                    self.admission.retry_after.finished(len(self._live) - 1)
                elif ending.code == _RESOURCE_EXHAUSTED and self._is_queue_full:
                    # The queue has filled up meanwhile. Clients that this gateway refused earlier come first.
                    ending.retry_after_s = max(ending.retry_after_s, self.retry_after_s(self._now_s))
                self._end(request, ending)
                touched.append(request)
        return touched

    def _take_embeddings(self, response: inference_pb2.SessionResponse) -> None:
        for embedding in response.embeddings:
            request = self._live.get(embedding.handle)
            if request is not None and not request.cancelled:
                request.embedding = embedding.values

    def _checked_content(self, response: inference_pb2.SessionResponse) -> _TokenContent:
        """The tokens and scores of a message. Raises SessionProtocolError if a part of the message is malformed. All of
        a message is checked before any of it is applied: a message applied in part would leave tokens without scores.
        """
        if any(not embedding.values or len(embedding.values) % 4 for embedding in response.embeddings):
            raise SessionProtocolError("malformed embeddings")
        if response.handles:
            self._handles = response.handles[:]
        if response.handles or response.same_handles:
            handles, data = self._handles, response.token_ids
            if len(data) != 4 * len(handles):
                raise SessionProtocolError(f"{len(handles)} handles but {len(data)} bytes of token ids")
            tokens = list(zip(handles, np.frombuffer(data, "<i4").tolist(), strict=True))
        else:
            tokens = []
        try:
            prompt_scores = [(part.handle, prompt_scores_of(part.logprobs)) for part in response.prompt_scores]
            scores = [(score.handle, score_of(score)) for score in response.scores]
        except (ValueError, IndexError) as error:
            raise SessionProtocolError(f"malformed log probabilities: {error}") from error
        return _TokenContent(tokens, prompt_scores, scores)

    def _take_tokens(self, content: _TokenContent) -> list[LiveRequest]:
        touched: list[LiveRequest] = []
        live = self._live
        for handle, token in content.tokens:
            request = live.get(handle)
            if request is not None and not request.cancelled:
                request.tokens.append(token)
                touched.append(request)
        for handle, of_prompt in content.prompt_scores:
            request = live.get(handle)
            if request is not None and not request.cancelled:
                request.prompt_scores.update(of_prompt)
        for handle, score in content.scores:
            request = live.get(handle)
            if request is not None and not request.cancelled:
                request.scores.append(score)
        return touched

    def _submissions(self) -> Iterator[inference_pb2.Submission]:
        budget_bytes = _MAX_REQUEST_BYTES
        while self._unsent and budget_bytes > 0:
            request = self._unsent.pop(next(iter(self._unsent)))
            submission = request.next_submission(self._now_s)
            budget_bytes -= submission.ByteSize()
            yield submission

    def _end(self, request: LiveRequest, ending: inference_pb2.Ending) -> None:
        request.ending = ending
        del self._live[request.handle]
        self._num_offline -= request.metadata.offline
        self._unsent.pop(request.handle, None)


def _unavailable(message: str, retry_after_s: float = 0.0) -> inference_pb2.Ending:
    return inference_pb2.Ending(
        reason=common_pb2.FINISH_REASON_ERROR, code=_UNAVAILABLE, message=message, retry_after_s=retry_after_s
    )
