"""One request over as many calls as it takes: each goes on behind the last token that has arrived. No clock in here."""

from __future__ import annotations

import random
import secrets

import grpc

from paceline.v1 import inference_pb2
from services.client.types import PacelineError, Piece, Unavailable, piece_from

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
_SEED_BITS = 63


class Misplaced(PacelineError):
    """The server went on at another token than it was asked to."""


class Continuation:
    """What has come of a request, and what is asked for next.

    A call that breaks is made again: its server is away (UNAVAILABLE), it was cancelled, and not by us (a server that
    stops), its stream was reset, or ended without a reason, or went on at another token. Once some of the answer is
    here, also where a queue is full, for the request was accepted. Every other error is the answer.

    Where neither a seed nor a key makes sure that another server generates the same tokens, the request gets a seed.
    """

    def __init__(
        self, request: inference_pb2.GenerateRequest, *, retry_for_s: float, timeout_s: float | None, now_s: float
    ) -> None:
        """`retry_for_s`: how long to try again without a token; 0: never. `timeout_s`: for all of it."""
        self.ended = False
        self._request = request
        self._first_token = request.resume_after  # of what this continuation brings
        self._num_tokens = request.resume_after
        self._retry_for_s = retry_for_s
        self._begun_s = self._heard_s = now_s
        self._deadline_s = None if timeout_s is None else now_s + timeout_s
        self._allowed_s = request.deadline_s
        self._pause_s = FIRST_PAUSE_S
        is_reproducible = request.sampling.HasField("seed") or request.idempotency_key or request.HasField("beam")
        if retry_for_s and not is_reproducible:
            request.sampling.seed = secrets.randbits(_SEED_BITS)

    def call(self, now_s: float) -> tuple[inference_pb2.GenerateRequest, float | None]:
        """The next call: its request, and its timeout in seconds."""
        if self._allowed_s:
            self._request.deadline_s = max(self._allowed_s - (now_s - self._begun_s), 0.001)
        return self._request, None if self._deadline_s is None else max(self._deadline_s - now_s, 0.0)

    def take(self, response: inference_pb2.GenerateResponse, now_s: float) -> Piece:
        """A message of the call. Raises Misplaced, and nothing of the message counts."""
        if response.HasField("position") and response.position != self._num_tokens:
            message = f"the server went on at token {response.position}, not at {self._num_tokens}"
            raise Misplaced(grpc.StatusCode.DATA_LOSS, message, field=None, retry_after_s=None)
        piece = piece_from(response)
        self.ended = piece.finish_reason is not None
        self._heard_s, self._pause_s = now_s, FIRST_PAUSE_S
        if not response.hypotheses:
            self._num_tokens += len(piece.token_ids)
            self._request.resume_after = self._num_tokens
            if not self._first_token:  # else the first ones are not known here
                self._request.resume_token_ids.extend(piece.token_ids)
        return piece

    def pause_s(self, error: PacelineError, now_s: float) -> float:
        """How long to wait before the next call, after this error of the last one. Raises the error if it is final."""
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
                return self._num_tokens > 0
            case grpc.StatusCode.INTERNAL:
                return "RST_STREAM" in str(error)
        return False


def ended_early() -> Unavailable:
    """A stream that just stops."""
    message = "the stream ended without a reason"
    return Unavailable(grpc.StatusCode.UNAVAILABLE, message, field=None, retry_after_s=None)
