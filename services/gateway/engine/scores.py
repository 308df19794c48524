"""Decodes log probabilities of the scheduler's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.v1 import common_pb2, inference_pb2


class Score(NamedTuple):
    """The log probability of one token."""

    logprob: float
    top: Sequence[tuple[int, float]] = ()  # the most likely tokens at its position, best first
    rank: int = 0  # 1: the most likely token; 0: unknown


def score_of(message: inference_pb2.TokenScore) -> Score:
    """Decode one score. Raises ValueError if it is malformed."""
    return Score(message.logprob, _pairs(message.top_token_ids, message.top_logprobs))


def prompt_scores_of(part: common_pb2.PromptLogprobs) -> dict[int, Score]:
    """Decode prompt scores, by position. After a preemption the same scores come again. Raises ValueError or IndexError
    if they are malformed."""
    logprobs, ranks = np.frombuffer(part.logprobs, "<f4"), np.frombuffer(part.ranks, "<i4").tolist()
    ids = np.frombuffer(part.top_token_ids, "<i4").reshape(len(ranks), -1).tolist()
    values = np.frombuffer(part.top_logprobs, "<f4").reshape(len(ranks), -1).tolist()
    return {
        part.start + i: Score(logprob, list(zip(ids[i], values[i], strict=True)), ranks[i])
        for i, logprob in enumerate(logprobs.tolist())
    }


def _pairs(token_ids: bytes, logprobs: bytes) -> Sequence[tuple[int, float]]:
    if not token_ids:
        return ()
    ids, values = np.frombuffer(token_ids, "<i4").tolist(), np.frombuffer(logprobs, "<f4").tolist()
    return list(zip(ids, values, strict=True))
