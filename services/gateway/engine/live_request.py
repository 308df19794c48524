"""One request at the scheduler, as the gateway sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paceline.v1 import common_pb2, inference_pb2
from services.gateway.engine.scores import Score

ABORTED = inference_pb2.Ending(reason=common_pb2.FINISH_REASON_ABORT)
NO_METADATA = inference_pb2.Submission()  # never changed


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request from its submission until it has ended, over all attempts.

    `tokens`: all output that has arrived, over all attempts. The consumer sets `wake`, which is called on news.
    `metadata`: a submission with the fields that do not change from attempt to attempt; `deadline_s`
    and `ttft_slo_s` count from `submitted_s`.
    """

    handle: int
    request_id: str
    prompt_token_ids: bytes
    sampling: common_pb2.SamplingParams
    # Tokens that end the sequence when sampled: stop tokens and, unless ignored, end-of-sequence tokens.
    final_tokens: frozenset[int]
    submitted_s: float
    metadata: inference_pb2.Submission = field(default_factory=inference_pb2.Submission)
    beam: inference_pb2.BeamOptions | None = None
    # How often the request was submitted; `sent`: whether on the current stream.
    attempt: int = 0
    sent: bool = False
    cancelled: bool = False
    tokens: list[int] = field(default_factory=list)
    # One per token, if the sampling asks for log probabilities.
    scores: list[Score] = field(default_factory=list)
    # By position, for all prompt tokens but the first. Complete with the first output token, if the sampling asks.
    prompt_scores: dict[int, Score] = field(default_factory=dict)
    embedding: bytes = b""  # packed float32, if the metadata has a pooling; it comes before the ending
    ending: inference_pb2.Ending | None = None
    wake: Callable[[], None] | None = None

    def next_submission(self, now_s: float) -> inference_pb2.Submission:
        """The message of one more attempt, which continues after the tokens that have arrived."""
        self.attempt += 1
        if self.tokens:
            self.sampling.prompt_logprobs = False  # they have arrived
        self.sent = True
        submission = inference_pb2.Submission(
            handle=self.handle,
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=np.asarray(self.tokens, "<i4").tobytes() if self.tokens else b"",
            sampling=self.sampling,
            accepted_before=self.attempt > 1,
            beam=self.beam,
        )
        submission.MergeFrom(self.metadata)
        if self.metadata.deadline_s:
            submission.deadline_s = max(self.metadata.deadline_s - (now_s - self.submitted_s), 0.001)
        if submission.ttft_slo_s:  # no longer applies after the first token
            left_s = max(self.metadata.ttft_slo_s - (now_s - self.submitted_s), 0.001)
            submission.ttft_slo_s = 0.0 if self.tokens else left_s
        return submission

    def unseen_ending(self) -> inference_pb2.Ending | None:
        """The ending of a request that is cancelled or has nothing left to generate; None for any other request."""
        if self.cancelled:
            return ABORTED
        if self.embedding or (self.tokens and self.tokens[-1] in self.final_tokens):
            return inference_pb2.Ending(reason=common_pb2.FINISH_REASON_STOP)
        if len(self.tokens) >= self.sampling.max_tokens:
            return inference_pb2.Ending(reason=common_pb2.FINISH_REASON_LENGTH)
        return None
