"""Idempotency keys: what they may be, what a request is, and the seeds that come of them."""

from __future__ import annotations

import pytest

from paceline.v1 import inference_pb2
from services.gateway.engine.idempotency import RequestKey, body_fingerprint, check_key, message_fingerprint
from services.gateway.errors import ApiError


@pytest.mark.parametrize("key", ["x", "8e03978e-40d5-43e8-bc93-6894a57f9324", '"quoted"', "a b", "~" * 255])
def test_a_valid_key_is_accepted(key: str) -> None:
    assert check_key([key], "Idempotency-Key") == key
    assert check_key([], "Idempotency-Key") is None


@pytest.mark.parametrize("keys", [[""], ["x" * 256], ["a\tb"], ["a\x00"], ["schlüssel"], ["a", "a"]])
def test_other_keys_are_refused(keys: list[str]) -> None:
    with pytest.raises(ApiError, match="Idempotency-Key") as refused:
        check_key(keys, "Idempotency-Key")
    assert (refused.value.status, refused.value.param) == (400, "Idempotency-Key")


def test_a_body_is_the_same_however_it_is_written() -> None:
    body = {"prompt": "x", "n": 2, "stream_options": {"include_usage": True}}
    assert body_fingerprint("chat", body) == body_fingerprint("chat", dict(reversed(body.items())))
    others = [("completion", body), ("chat", {**body, "n": 3}), ("chat", {**body, "n": 2.0}), ("chat", {})]
    assert len({body_fingerprint(kind, other) for kind, other in [("chat", body), *others]}) == 5


def test_a_message_is_the_same_at_every_attempt() -> None:
    request = inference_pb2.GenerateRequest(text="x", idempotency_key="k")
    request.sampling.logit_bias.update({1: 2.0, 3: 4.0})
    again = inference_pb2.GenerateRequest(text="x", idempotency_key="k", resume_after=5, request_id="second")
    again.sampling.logit_bias.update({3: 4.0, 1: 2.0})
    assert message_fingerprint(request) == message_fingerprint(again)
    assert again.resume_after == 5
    again.priority = 1.0
    assert message_fingerprint(request) != message_fingerprint(again)


def test_seeds_and_ids_follow_from_tenant_and_key_alone() -> None:
    def key(tenant: str, name: str, fingerprint: bytes = b"") -> RequestKey:
        return RequestKey(tenant, name, fingerprint, "Idempotency-Key", "")

    assert key("t", "k", b"1").seed(0) == key("t", "k", b"2").seed(0) == 18071940434897793557
    assert key("t", "k").answer_id == key("t", "k", b"2").answer_id
    names = [("", "a"), ("a", ""), ("a", "b"), ("ab", ""), ("a:1", "b"), ("a", "1:b")]
    assert len({key(*name).seed(prompt) for name in names for prompt in range(3)}) == 18
    assert len({key(*name).answer_id for name in names}) == 6


def test_the_same_key_of_another_api_key_is_another_request() -> None:
    owners = ("", "a", "b", "owner", "answer", "seed")
    keys = [RequestKey("t", "k", b"", "Idempotency-Key", owner) for owner in owners]
    assert len({key.answer_id for key in keys}) == len({key.seed(0) for key in keys}) == len(owners)
    assert keys[1].seed(0) == RequestKey("t", "k", b"x", "Idempotency-Key", "a").seed(0)  # the same at every gateway
