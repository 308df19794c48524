"""What a step computes, and the StepResult that reports it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from gpu_worker.device import fetch
from gpu_worker.sampling.prompt_scores import PromptScores
from gpu_worker.sampling.sampler import Sampled, SamplingRows, Scores
from gpu_worker.steps.pooling import Pooled
from paceline.v1.worker_pb2 import RowError, StepResult, TokenLogprobs

NO_NUMBER = "the model's output contains NaN or infinity"
INVALID_ARGUMENT = 3  # google.rpc.Code
NO_TOKEN = (
    "no token is left to sample: allowed_token_ids, bad_words, logit_bias, min_tokens and structured outputs together "
    "exclude every token"
)


@dataclass(frozen=True)
class Drawn:
    """The sampled tokens of a step, on their way to host memory."""

    tokens: Tensor  # int64 [rows that sample]
    failed: Tensor  # bool [rows that sample]
    ruled_out: Tensor | None  # bool [rows that sample]: failed because the row's own parameters exclude every token
    scores: Scores | None
    slots: np.ndarray  # [rows that sample]
    parameters: SamplingRows
    refused: Mapping[int, str]  # by slot: why its grammar excludes every token

    @cached_property
    def token_ids(self) -> np.ndarray:
        """Token ids, int32 [rows that sample]; -1 for a failed row. Read this when the step is done."""
        tokens = self.tokens.numpy().astype("<i4")
        tokens[self.failed.numpy()] = -1
        return tokens


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """The result of a step's draft rows."""

    slots: np.ndarray  # [sequences with draft rows]
    tokens: Sequence[np.ndarray]  # by sequence: its next tokens, int32; none if it failed

    def add_to(self, result: StepResult) -> None:
        result.draft_num_tokens = np.array([len(tokens) for tokens in self.tokens], "<i4").tobytes()
        result.draft_token_ids = np.concatenate(self.tokens).astype("<i4").tobytes()
        for slot, tokens in zip(self.slots.tolist(), self.tokens, strict=True):
            if not len(tokens):  # not NO_TOKEN: the slot has sampled before, so its parameters allow a token
                result.errors.add(slot=slot, message=NO_NUMBER)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step computes, on its way to host memory. A part that no row needs is None."""

    drawn: Drawn | None = None
    prompts: PromptScores | None = None
    pooled: Pooled | None = None
    drafts: VerifiedDrafts | None = None

    def result(self) -> StepResult:
        """Call this when the step is done."""
        result = StepResult() if self.drawn is None else _result(self.drawn)
        if self.prompts is not None:
            _add_prompt_logprobs(result, self.prompts)
        if self.pooled is not None:
            self.pooled.add_to(result, NO_NUMBER)
        if self.drafts is not None:
            self.drafts.add_to(result)
        return result


def fetch_drawn(sampled: Sampled, slots: np.ndarray, parameters: SamplingRows, refused: Mapping[int, str]) -> Drawn:
    """Queue the copies to host memory."""
    scores = sampled.scores
    if scores is not None:
        scores = Scores(fetch(scores.sampled), fetch(scores.top_tokens), fetch(scores.top))
    ruled_out = None if sampled.ruled_out is None else fetch(sampled.ruled_out)
    return Drawn(fetch(sampled.tokens), fetch(sampled.failed), ruled_out, scores, slots, parameters, refused)


def _result(drawn: Drawn) -> StepResult:
    """The sampled tokens, the failed rows, and the log probabilities that requests ask for."""
    failed = drawn.failed.numpy()
    return StepResult(
        token_ids=drawn.token_ids.tobytes(),
        errors=_row_errors(drawn, failed) if failed.any() else (),
        logprobs=_token_logprobs(drawn.scores, drawn.slots[drawn.parameters.scored], drawn.parameters.num_top),
    )


def _row_errors(drawn: Drawn, failed: np.ndarray) -> Iterator[RowError]:
    no_token = np.zeros_like(failed) if drawn.ruled_out is None else drawn.ruled_out.numpy()
    for row in np.flatnonzero(failed).tolist():
        slot = int(drawn.slots[row])
        if no_token[row]:
            yield RowError(slot=slot, message=drawn.refused.get(slot, NO_TOKEN), code=INVALID_ARGUMENT)
        else:
            yield RowError(slot=slot, message=NO_NUMBER)


def _add_prompt_logprobs(result: StepResult, prompts: PromptScores) -> None:
    known = {error.slot for error in result.errors}
    for scores, are_numbers in prompts.by_chunk():
        result.prompt_logprobs.append(scores)
        if not are_numbers and scores.slot not in known:
            result.errors.add(slot=scores.slot, message=NO_NUMBER)


def _token_logprobs(scores: Scores | None, slots: np.ndarray, num_top: np.ndarray) -> Iterator[TokenLogprobs]:
    if scores is None:
        return
    sampled, ids, values = scores.sampled.tolist(), scores.top_tokens.numpy(), scores.top.numpy()
    for i, (slot, count) in enumerate(zip(slots.tolist(), num_top.tolist(), strict=True)):
        yield TokenLogprobs(
            slot=slot,
            logprob=sampled[i],
            top_token_ids=ids[i, :count].astype("<i4").tobytes(),
            top_logprobs=values[i, :count].astype("<f4").tobytes(),
        )
