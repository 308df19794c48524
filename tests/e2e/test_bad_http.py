"""Bad HTTP requests against the real services: the right status, the field at fault, nothing harmed, nothing kept."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.openai.schema import ChatRequest, CompletionRequest
from tests.support.bad_http import CASES, CHATS, COMPLETIONS, RAW_CASES, Case
from tests.support.stack import Stack

PROMPT = [5, 6, 7, 8] * 5


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture(autouse=True, scope="module")
def unharmed(stack: Stack, http: httpx.Client) -> Iterator[None]:
    """Health is green, a request gets the tokens that it got before, and when nothing runs no block is used."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    right = http.post(COMPLETIONS, json=body).json()["choices"]
    yield
    assert http.get("/health").status_code == 200
    assert http.get("/ready").status_code == 200
    assert http.post(COMPLETIONS, json=body).json()["choices"] == right
    stack.wait_metric("paceline_scheduler_num_requests_running", 0)
    stack.wait_metric("paceline_scheduler_kv_cache_usage_ratio", 0)
    stack.wait_metric('paceline_cache_blocks{state="used",worker="1"}', 0, of="cache")
    assert all(process.poll() is None for process in stack.processes.values()), stack.logs()


def check_answer(answer: httpx.Response, name: str) -> dict[str, Any]:
    """Checks that a refusal has OpenAI's error shape. Returns the error."""
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code", "reason"}, name
    assert error["message"], name
    assert len(answer.content) < 2000, "an error does not repeat the request"
    return error


@pytest.mark.parametrize("kind", sorted({case.name.split()[0] for case in CASES}))
def test_each_case_of_the_corpus_gets_its_status_and_param(http: httpx.Client, kind: str) -> None:
    for case in (case for case in CASES if case.name.split()[0] == kind):
        answer = http.post(case.path, content=case.content, headers=list(case.headers))
        assert answer.status_code == case.status, (case.name, answer.text[:300])
        if case.status != 200:
            assert check_answer(answer, case.name)["param"] == case.param, (case.name, answer.text[:300])


@pytest.mark.parametrize("case", RAW_CASES, ids=lambda case: case.name)
def test_bytes_on_a_socket(stack: Stack, http: httpx.Client, case: Any) -> None:
    with socket.create_connection(("127.0.0.1", stack.http_port), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):  # refused before all of it was sent
            connection.sendall(case.data)
            if case.closes:
                connection.shutdown(socket.SHUT_WR)
        try:
            answer = connection.recv(65536)
        except ConnectionResetError:  # as good as a connection that is closed: no answer
            answer = b""
    assert (int(answer.split(b" ")[1]) if answer else 0) in case.statuses, answer[:300]
    assert http.get("/health").status_code == 200


# Values of all JSON types. The numbers 0, 1, -1 and 2, at which many fields have limits, come often.
NUMBERS = (
    st.integers(-(2**65), 2**65) | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0, 1, -1, 2])
)
TEXTS = st.text(max_size=20)  # without lone surrogates, which are not valid JSON
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "x"]), "content": TEXTS | VALUES})
)


def bodies(cls: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Known fields and random names, with values of any type. The token limits stay small, so each answer is quick."""
    names = st.sampled_from(sorted(cls.model_fields.keys() - {"max_tokens", "max_completion_tokens", "min_tokens"}))
    return st.dictionaries(names | TEXTS, VALUES, max_size=4)


FUZZ = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def check_any(http: httpx.Client, case: Case) -> None:
    answer = http.post(case.path, content=case.content, headers=list(case.headers))
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text[:300]
    if answer.status_code != 200:
        check_answer(answer, case.name)


@FUZZ
@given(bodies(CompletionRequest))
def test_any_completion(http: httpx.Client, body: dict[str, Any]) -> None:
    whole = {"prompt": [5], "max_tokens": 2} | body
    check_any(http, Case("any", 0, content=json.dumps(whole).encode()))


@FUZZ
@given(bodies(ChatRequest), MESSAGES)
def test_any_chat(http: httpx.Client, body: dict[str, Any], messages: list[Any]) -> None:
    whole = {"messages": messages, "max_tokens": 2} | body
    check_any(http, Case("any", 0, content=json.dumps(whole).encode(), path=CHATS))


@FUZZ
@given(st.sampled_from([case.content for case in CASES if len(case.content) < 2000]), st.data())
def test_any_bytes(http: httpx.Client, content: bytes, data: st.DataObject) -> None:
    """Bodies of the corpus with a piece replaced."""
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, len(content)))
    check_any(http, Case("any", 0, content=content[:start] + data.draw(st.binary(max_size=8)) + content[end:]))
