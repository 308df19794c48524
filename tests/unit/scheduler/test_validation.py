"""How a submission is checked before the model is known."""

from __future__ import annotations

import pytest

from paceline.v1.common_pb2 import RetentionRange
from paceline.v1.inference_pb2 import Submission
from scheduler_svc.core.admission.validation import check_submission, new_request
from scheduler_svc.core.rejection import Rejection


def test_output_tokens_that_are_not_whole_are_refused() -> None:
    submission = Submission(prompt_token_ids=bytes(4), output_token_ids=b"123")
    with pytest.raises(Rejection, match="output_token_ids: is not packed int32"):
        check_submission(new_request("s", submission, 0.0), submission)


def test_a_range_that_begins_where_the_prompt_ends_is_left_out_beside_one_of_the_output() -> None:
    about_prompt, about_output = RetentionRange(start=2, end=4, priority=50), RetentionRange(priority=60, decode=True)
    submission = Submission(prompt_token_ids=bytes(8), cache_retention=[about_prompt, about_output])
    assert new_request("s", submission, 0.0).cache_retention == (RetentionRange(start=2, priority=60),)
