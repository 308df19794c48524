"""A server with int8 weights."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from demo.corpus import held_out
from tests.support.stack import Stack

INT8 = ["--threads", "1", "--dtype", "bfloat16", "--quantization", "int8"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"), worker_flags=INT8, gateway_flags=["--dtype", "bfloat16"])
    try:
        yield stack.up()
    finally:
        stack.down()


def test_answers_are_right_beside_a_second_worker_of_the_same_kind(stack: Stack) -> None:
    """The demo task `lookup` copies exact tokens of the prompt, so a wrong int8 matmul gives wrong answers. The gateway
    has the same --dtype as the workers, and serves them."""
    stack.start("worker-2")
    examples = held_out("lookup", 20, seed=3)
    with httpx.Client(base_url=stack.url, timeout=120, trust_env=False) as http:
        right = 0
        for example in examples:
            body = {"messages": list(example.messages), "temperature": 0, "max_tokens": 40}
            answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
            right += answer["choices"][0]["message"]["content"] == example.answer
    assert right >= 18
