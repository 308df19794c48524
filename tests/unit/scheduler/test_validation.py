"""How a submission is checked before the model is known."""

from __future__ import annotations

import pytest

from paceline.v1.common_pb2 import RetentionRange, SamplingParams
from paceline.v1.inference_pb2 import Submission
from scheduler_svc.core.admission.sampling_checks import MAX_PROMPT_LOGPROBS
from scheduler_svc.core.admission.validation import MAX_CHARS, check_submission, new_request, trace_of
from scheduler_svc.core.rejection import Rejection

SHORT = SamplingParams(top_p=1.0, max_tokens=1)


def test_output_tokens_that_are_not_whole_are_refused() -> None:
    submission = Submission(prompt_token_ids=bytes(4), output_token_ids=b"123")
    with pytest.raises(Rejection, match="output_token_ids: is not packed int32"):
        check_submission(new_request("s", submission, 0.0), submission)


def test_a_prompt_range_that_begins_after_the_prompt_is_ignored_beside_an_output_range() -> None:
    about_prompt, about_output = RetentionRange(start=2, end=4, priority=50), RetentionRange(priority=60, decode=True)
    submission = Submission(prompt_token_ids=bytes(8), cache_retention=[about_prompt, about_output])
    assert new_request("s", submission, 0.0).metadata.cache_retention == (RetentionRange(start=2, priority=60),)


@pytest.mark.parametrize("scores", [False, True])
def test_only_a_prompt_with_log_probabilities_is_limited_by_their_number(scores: bool) -> None:
    sampling = SamplingParams(top_p=1.0, max_tokens=1, prompt_logprobs=scores)
    submission = Submission(prompt_token_ids=bytes(4 * MAX_PROMPT_LOGPROBS + 4), sampling=sampling)
    if not scores:
        check_submission(new_request("s", submission, 0.0), submission)
        return
    with pytest.raises(Rejection, match="prompt_logprobs: "):
        check_submission(new_request("s", submission, 0.0), submission)


def test_a_name_may_be_as_long_as_its_limit() -> None:
    for length in (MAX_CHARS, MAX_CHARS + 1):
        submission = Submission(prompt_token_ids=bytes(4), request_id="r" * length, sampling=SHORT)
        if length == MAX_CHARS:
            check_submission(new_request("s", submission, 0.0), submission)
        else:
            with pytest.raises(
                Rejection, match=f"request_id: has {length} characters; at most {MAX_CHARS} are possible"
            ):
                check_submission(new_request("s", submission, 0.0), submission)


@pytest.mark.parametrize(
    ("trace_id", "span_id", "field"),
    [("4" * 31, "5" * 16, "trace_id"), ("0" * 32, "5" * 16, "trace_id"), ("4" * 32, "G" * 16, "span_id")],
)
def test_a_span_without_ids_of_the_standard_is_refused_by_name(trace_id: str, span_id: str, field: str) -> None:
    with pytest.raises(Rejection) as refused:
        trace_of(Submission(trace_id=trace_id, span_id=span_id))
    assert refused.value.field == field
    assert trace_of(Submission(trace_id="4" * 32, span_id="5" * 16)).parent_id == "5" * 16
