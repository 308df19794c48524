"""One request over several calls: each call continues after the last token that has arrived. It reads no clock."""

from __future__ import annotations

import random
import secrets
from typing import Generic, TypeVar

import grpc

from paceline.v1 import inference_pb2
from services.client.types import PacelineError, Piece, Unavailable, piece_from

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
_SEED_BITS = 63
R = TypeVar("R", inference_pb2.GenerateRequest, inference_pb2.EmbedRequest)


class Misplaced(PacelineError):
    """The server continued at another token than it was asked to."""


class Attempts(Generic[R]):
    """The calls of a request that is sent again when a call breaks.

    A broken call is repeated. A call is broken in these cases: the server is away (UNAVAILABLE); the server cancelled
    the call (it stops); the stream was reset; the stream ended without a finish reason; the stream continued at another
    token. After the request was accepted, a full queue or a quota is a reason to repeat, too. Every other error is
    final.
    """

    def __init__(self, request: R, *, retry_for_s: float, timeout_s: float | None, now_s: float) -> None:
        """`retry_for_s`: how long to retry while nothing arrives; 0: never. `timeout_s`: limit of the whole answer."""
        self._request: R = request
        self._retry_for_s = retry_for_s
        self._begun_s = self._heard_s = now_s
        self._deadline_s = None if timeout_s is None else now_s + timeout_s
        self._allowed_s = request.deadline_s
        self._pause_s = FIRST_PAUSE_S
        self._accepted = False  # a part of the answer has arrived

    def call(self, now_s: float) -> tuple[R, float | None]:
        """The next call: its request, and its timeout in seconds."""
        if self._allowed_s:
            self._request.deadline_s = max(self._allowed_s - (now_s - self._begun_s), 0.001)
        return self._request, None if self._deadline_s is None else max(self._deadline_s - now_s, 0.0)

    def pause_s(self, error: PacelineError, now_s: float) -> float:
        """How long to wait before the next call, after this error. Raises the error if it is final,
        or if the time for retries would be over by then."""
        pause_s = random.uniform(0.5, 1.0) * self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        pause_s = max(pause_s, error.retry_after_s or 0.0)
        end_s = self._heard_s + self._retry_for_s
        if self._deadline_s is not None:
            end_s = min(end_s, self._deadline_s)
        if not self._retry_for_s or not self._is_passing(error) or now_s + pause_s > end_s:
            raise error
        return pause_s

    def _is_passing(self, error: PacelineError) -> bool:
        match error.code:
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED | grpc.StatusCode.DATA_LOSS:
                return True
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return self._accepted
            case grpc.StatusCode.INTERNAL:
                return "RST_STREAM" in str(error)
        return False


class Continuation(Attempts[inference_pb2.GenerateRequest]):
    """The tokens of the answer that have arrived, and the request for those that follow.

    A request that may be retried gets a seed, so that another server generates the same tokens. It gets none if it has
    a seed, an idempotency key or a beam search.
    """

    def __init__(
        self, request: inference_pb2.GenerateRequest, *, retry_for_s: float, timeout_s: float | None, now_s: float
    ) -> None:
        """`retry_for_s`: how long to retry without a new token; 0: never. `timeout_s`: limit of the whole answer."""
        super().__init__(request, retry_for_s=retry_for_s, timeout_s=timeout_s, now_s=now_s)
        self.ended = False
        self._first_token = request.resume_after  # position of the first token that this continuation returns
        self._num_tokens = request.resume_after
        self._accepted = self._num_tokens > 0
        is_reproducible = request.sampling.HasField("seed") or request.idempotency_key or request.HasField("beam")
        if retry_for_s and not is_reproducible:
            request.sampling.seed = secrets.randbits(_SEED_BITS)

    def take(self, response: inference_pb2.GenerateResponse, now_s: float) -> Piece:
        """Take a message of the call. Raises Misplaced if its tokens do not follow the last token that has arrived."""
        if response.HasField("position") and response.position != self._num_tokens:
            message = f"the server went on at token {response.position}, not at {self._num_tokens}"
            raise Misplaced(grpc.StatusCode.DATA_LOSS, message, field=None, retry_after_s=None)
        piece = piece_from(response)
        self.ended = piece.finish_reason is not None
        self._heard_s, self._pause_s = now_s, FIRST_PAUSE_S
        if not response.hypotheses:
            self._num_tokens += len(piece.token_ids)
            self._accepted = self._num_tokens > 0
            self._request.resume_after = self._num_tokens
            if not self._first_token:  # otherwise the earlier tokens are unknown here
                self._request.resume_token_ids.extend(piece.token_ids)
        return piece


def ended_early() -> Unavailable:
    """The error for a stream that ends without a finish reason."""
    message = "the stream ended without a finish reason"
    return Unavailable(grpc.StatusCode.UNAVAILABLE, message, field=None, retry_after_s=None)
