"""The client's own logic: what it sends, returns and raises."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

from paceline.v1 import common_pb2, inference_pb2
from services.client import (
    BeamHypothesis,
    BeamParams,
    InvalidRequest,
    Overloaded,
    PacelineClient,
    PacelineError,
    Piece,
    Unavailable,
    Usage,
)
from services.client.types import Options, Sampling, error_from, make_request, piece_from, result_from


def test_only_given_arguments_are_sent() -> None:
    request = make_request("hi", None, None, "m", {"temperature": 0, "stop": ["a"]})
    assert (request.text, request.model) == ("hi", "m")
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("max_tokens")
    assert list(request.sampling.stop) == ["a"]
    chat = make_request(None, [{"role": "user", "content": "x"}], None, "", {})
    assert chat.messages.messages[0].content == "x"
    assert list(make_request(None, None, [1, 2], "", {}).token_ids.ids) == [1, 2]


def test_a_share_above_zero_arrives_above_zero() -> None:
    """Numbers travel as 32-bit floats."""
    given: dict[str, Any] = {"top_p": 1e-46, "typical_p": 1e-300}
    sampling = make_request("hi", None, None, "", given).sampling  # type: ignore[arg-type]
    assert (sampling.top_p, sampling.typical_p) == (2.0**-149, 2.0**-149)
    assert make_request("hi", None, None, "", {"top_p": 0.0}).sampling.top_p == 0.0, (
        "0.0 is sent unchanged, and the server refuses it"
    )


def test_every_sampling_option_is_sent() -> None:
    given: dict[str, Any] = {
        "min_p": 0.5, "typical_p": 0.25, "repetition_penalty": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "logit_bias": {7: 1.5}, "bad_words": ["a", [1, 2]], "allowed_token_ids": [5], "logprobs": 0,
        "prompt_logprobs": 2, "include_stop_str_in_output": True, "skip_special_tokens": False,
        "json_schema": {"type": "object"}, "regex": "a+", "choice": ["a", "b"], "grammar": "start: A",
    }  # fmt: skip
    sampling = make_request("hi", None, None, "", given).sampling  # type: ignore[arg-type]
    for name in (
        "min_p",
        "typical_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "prompt_logprobs",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "regex",
        "choice",
        "grammar",
    ):
        assert getattr(sampling, name) == given[name]
    assert sampling.json_schema == '{"type": "object"}'
    assert dict(sampling.logit_bias) == {7: 1.5}
    assert (list(sampling.bad_words), [list(word.ids) for word in sampling.bad_word_ids]) == (["a"], [[1, 2]])
    assert list(sampling.allowed_token_ids) == [5]
    assert sampling.HasField("logprobs")
    assert set(given) <= set(Sampling.__annotations__)
    with pytest.raises(TypeError, match="allowed_token_ids"):
        make_request("hi", None, None, "", {"allowed_token_ids": []})


def test_options_outside_sampling_are_sent() -> None:
    beam = BeamParams(width=4, num_return=2, length_penalty=0.5, early_stopping="never")
    request = make_request(
        "hi", None, None, "", {"priority": 2, "tenant": "a", "deadline_s": 5, "beam": beam, "seed": 1}
    )
    assert (request.priority, request.tenant, request.deadline_s, request.sampling.seed) == (2, "a", 5, 1)
    assert (request.beam.width, request.beam.num_return, request.beam.length_penalty) == (4, 2, 0.5)
    assert request.beam.early_stopping == inference_pb2.EARLY_STOPPING_NEVER
    assert not make_request("hi", None, None, "", {}).HasField("beam")
    response = inference_pb2.GenerateResponse(text="a", finish_reason=common_pb2.FINISH_REASON_STOP)
    response.usage.completion_tokens = 3
    response.hypotheses.add(text="a", token_ids=[1, 2], score=-0.5, finish_reason=common_pb2.FINISH_REASON_LENGTH)
    assert result_from([piece_from(response)]).hypotheses == (BeamHypothesis("a", [1, 2], -0.5, "length"),)


@pytest.mark.parametrize("prompts", [(None, None, None), ("a", [], None), ("a", None, [1])])
def test_a_request_needs_exactly_one_kind_of_prompt(
    prompts: tuple[str | None, list[dict[str, str]] | None, list[int] | None],
) -> None:
    with pytest.raises(TypeError, match="exactly one"):
        make_request(*prompts, "", {})


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="there is no option 'best_of'"):
        make_request("a", None, None, "", {"best_of": 2})  # type: ignore[typeddict-unknown-key]


def test_empty_prompts_keep_their_kind() -> None:
    assert make_request("", None, None, "", {}).WhichOneof("prompt") == "text"
    assert make_request(None, [], None, "", {}).WhichOneof("prompt") == "messages"
    assert make_request(None, None, [], "", {}).WhichOneof("prompt") == "token_ids"


def test_a_result_joins_its_pieces() -> None:
    first = piece_from(inference_pb2.GenerateResponse(token_ids=[1, 2], text="a"))
    assert first == Piece("a", [1, 2])
    last = piece_from(
        inference_pb2.GenerateResponse(
            token_ids=[3],
            text="b",
            finish_reason=common_pb2.FINISH_REASON_STOP,
            usage=inference_pb2.Usage(prompt_tokens=4, completion_tokens=3, cached_tokens=2),
        )
    )
    result = result_from([first, last])
    assert (result.text, result.token_ids, result.finish_reason) == ("ab", [1, 2, 3], "stop")
    assert result.usage == Usage(4, 3, 2)


@pytest.mark.parametrize("pieces", [[], [Piece("a", [1])]])
def test_a_stream_that_just_stops_is_an_error(pieces: list[Piece]) -> None:
    with pytest.raises(Unavailable, match="without a finish reason"):
        result_from(pieces)


def test_errors_have_types_and_the_servers_message() -> None:
    error = error_from(grpc.StatusCode.INVALID_ARGUMENT, "bad", [("field", "sampling.top_p")])
    assert isinstance(error, InvalidRequest)
    assert (str(error), error.field, error.retry_after_s) == ("bad", "sampling.top_p", None)
    error = error_from(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [("retry-after-s", "1.5")])
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 1.5
    assert type(error_from(grpc.StatusCode.INTERNAL, None, None)) is PacelineError


def test_no_server_at_the_address_raises_unavailable() -> None:
    with PacelineClient("127.0.0.1:1", retry_for_s=0) as client, pytest.raises(Unavailable):
        client.generate("x", timeout_s=60)


def test_a_single_stop_string_is_not_split_into_letters() -> None:
    sampling = make_request("a", None, None, "", {"stop": "zebra", "bad_words": "yak"}).sampling
    assert list(sampling.stop) == ["zebra"]
    assert list(sampling.bad_words) == ["yak"]


@pytest.mark.parametrize("name", sorted(Options.__annotations__))
def test_options_that_are_none_are_left_out(name: str) -> None:
    options: Any = {name: None}
    assert make_request("hi", None, None, "", options) == make_request("hi", None, None, "", {})


def test_numpy_arrays_are_accepted_as_lists() -> None:
    ids = np.array([3, 4], np.int32)
    options: Any = {"allowed_token_ids": ids, "stop_token_ids": ids, "bad_words": [ids], "seed": np.int64(-2)}
    lists: Any = {"allowed_token_ids": [3, 4], "stop_token_ids": [3, 4], "bad_words": [[3, 4]], "seed": -2}
    assert make_request(None, None, ids, "", options) == make_request(None, None, [3, 4], "", lists)  # type: ignore[arg-type]


def test_seeds_mean_the_same_as_over_http() -> None:
    assert make_request("a", None, None, "", {"seed": -2}).sampling.seed == 2**64 - 2
    assert not make_request("a", None, None, "", {"seed": -1}).sampling.HasField("seed")


@pytest.mark.parametrize(
    ("options", "name"),
    [({"seed": 2**64}, "seed"), ({"resume_after": -1}, "resume_after"), ({"stop": ["\ud83d"]}, "stop")],
)
def test_a_value_that_the_protocol_cannot_carry_is_named(options: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: "):
        make_request("a", None, None, "", options)
