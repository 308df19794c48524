"""InferenceService.Generate at the scheduler: options become parameters, or are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.v1.common_pb2 import RetentionRange, SamplingParams
from paceline.v1.inference_pb2 import BeamOptions, GenerateRequest, SamplingOptions, TokenIds
from scheduler_svc.core.admission.sampling_checks import check_sampling
from scheduler_svc.core.rejection import Rejection
from scheduler_svc.generate import to_submission
from services.runtime.tracing.context import TraceContext, bind_context

PROMPT = TokenIds(ids=[1, 2, 3])


def test_every_option_reaches_the_parameters() -> None:
    options = SamplingOptions(
        temperature=0.5, top_p=0.75, top_k=3, seed=9, max_tokens=7, min_tokens=2, ignore_eos=True, stop_token_ids=[4],
        min_p=0.25, typical_p=0.5, repetition_penalty=1.5, presence_penalty=-1, frequency_penalty=0.5,
        logit_bias={5: 2.0}, bad_word_ids=[TokenIds(ids=[6, 7])], allowed_token_ids=[8, 9], logprobs=0,
        prompt_logprobs=3,
    )  # fmt: skip
    sampling = to_submission(GenerateRequest(token_ids=PROMPT, sampling=options), None).sampling
    unlike = {"logit_bias", "bad_word_ids", "bad_words", "allowed_token_ids", "logprobs", "prompt_logprobs", "stop"}
    unlike |= {"include_stop_str_in_output", "skip_special_tokens"}  # about text, which the scheduler does not have
    unlike |= {"json_schema", "regex", "choice", "grammar"}
    for field in SamplingOptions.DESCRIPTOR.fields:
        if field.name not in unlike:
            assert getattr(sampling, field.name) == getattr(options, field.name), field.name
    assert dict(sampling.logit_bias) == {5: 2.0}
    assert np.frombuffer(sampling.bad_words[0], "<i4").tolist() == [6, 7]
    assert np.frombuffer(sampling.allowed_token_ids, "<i4").tolist() == [8, 9]
    assert (sampling.logprobs, sampling.num_top_logprobs) == (True, 0)
    assert (sampling.prompt_logprobs, sampling.num_top_prompt_logprobs) == (True, 3)
    plain = to_submission(GenerateRequest(token_ids=PROMPT), None).sampling
    assert (plain.logprobs, plain.prompt_logprobs, plain.repetition_penalty) == (False, False, 0.0)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"stop": ["x"]}, "stop"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"regex": "x"}, "regex"),
        ({"choice": ["x"]}, "choice"),
        ({"grammar": "x"}, "grammar"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"typical_p": 0}, "typical_p"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_impossible_values_are_refused_by_name(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(Rejection) as refused:
        to_submission(GenerateRequest(token_ids=PROMPT, sampling=SamplingOptions(**wrong)), None)
    assert refused.value.field == name


def test_cache_fields_are_passed_on_unchanged() -> None:
    kept = [RetentionRange(end=8, priority=90, duration_ms=5), RetentionRange(priority=3, decode=True)]
    made = to_submission(GenerateRequest(token_ids=PROMPT, cache_salt="pepper", cache_retention=kept), None)
    assert (made.cache_salt, list(made.cache_retention)) == ("pepper", kept)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("idempotency_key", {"idempotency_key": "k"}),  # without a seed
        ("resume_after", {"resume_after": 3}),
        ("resume_after", {"resume_after": 3, "resume_token_ids": [7, 7]}),
        ("resume_token_ids", {"resume_after": 2, "resume_token_ids": [7, 7]}),
    ],
)
def test_fields_that_need_stored_answers_are_refused(field: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(Rejection) as refused:
        to_submission(GenerateRequest(token_ids=PROMPT, **wrong), None)
    assert refused.value.field == field


@pytest.mark.parametrize("sampling", [SamplingOptions(seed=3), SamplingOptions(temperature=0)])
def test_a_resubmission_continues_after_the_delivered_tokens(sampling: SamplingOptions) -> None:
    sampling.prompt_logprobs = 1
    again: dict[str, Any] = {"resume_after": 2, "resume_token_ids": [7, 8], "idempotency_key": "k"}
    submission = to_submission(GenerateRequest(token_ids=PROMPT, sampling=sampling, **again), None)
    assert np.frombuffer(submission.output_token_ids, np.int32).tolist() == [7, 8]
    assert not submission.sampling.prompt_logprobs, "they came with the first token"


def test_a_beam_search_refuses_fields_for_samples() -> None:
    beam = BeamOptions(width=2)
    for name in ("temperature", "top_p", "top_k", "min_p", "typical_p"):
        value: Any = 3 if name == "top_k" else 0.5
        options = SamplingOptions(**{name: value})
        with pytest.raises(Rejection) as refused:
            to_submission(GenerateRequest(token_ids=PROMPT, sampling=options, beam=beam), None)
        assert refused.value.field == name
    assert to_submission(GenerateRequest(token_ids=PROMPT, sampling=SamplingOptions(temperature=0), beam=beam), None)


def test_the_smallest_repetition_penalty_is_accepted() -> None:
    """As a float32 it is a little less than its limit."""
    check_sampling(SamplingParams(top_p=1, max_tokens=1, repetition_penalty=0.01))


@pytest.mark.parametrize(("sampled", "span_id"), [(True, "5" * 16), (False, "")])
def test_the_trace_of_a_client_of_the_scheduler_itself_is_passed_on(sampled: bool, span_id: str) -> None:
    request = GenerateRequest(token_ids=PROMPT)
    bind_context(TraceContext("4" * 32, "5" * 16, sampled))
    try:
        submission = to_submission(request, None)
    finally:
        bind_context(None)
    assert (submission.trace_id, submission.span_id) == ("4" * 32, span_id)
    assert to_submission(request, None).trace_id == ""
