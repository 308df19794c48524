"""Requests that schemathesis makes from the gateway's and OpenAI's API descriptions get no answer of 500 or above.

Its requests are legal by the description in half of the examples, and broken in one place in the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.contract.gateway.conftest import MODEL, Running

OPENAI = Path(__file__).parents[2] / "support" / "openai-subset.json.gz"
EXAMPLES = 15  # legal ones for each operation, and as many broken ones
OPTIONS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}
STORED = ("/v1/files", "/v1/batches")
NOT_ASKED = {"/ready"}  # it answers 503 on purpose


def without_headers(api: dict[str, Any]) -> dict[str, Any]:
    """The description without headers. test_headers.py tests them. With random headers, most requests are refused."""
    for operations in api["paths"].values():
        for operation in operations.values():
            kept = [one for one in operation.get("parameters", ()) if one.get("in") != "header"]
            operation["parameters"] = kept
    return api


def ask(api: dict[str, Any], base_url: str, num_examples: int) -> dict[str, list[int]]:
    """The statuses by operation. A thread of its own runs this."""
    statuses: dict[str, list[int]] = {}
    found: Any
    for found in schemathesis.openapi.from_dict(api).get_all_operations():
        operation = found.ok()
        if operation.path in NOT_ASKED:
            continue
        seen = statuses.setdefault(operation.label, [])
        try_cases(operation.as_strategy(generation_mode=GenerationMode.POSITIVE), base_url, num_examples, seen)
        with contextlib.suppress(Unsatisfiable):  # a request without parameters or a body cannot be broken
            try_cases(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), base_url, num_examples, seen)
    return statuses


def try_cases(cases: Any, base_url: str, num_examples: int, seen: list[int]) -> None:
    @settings(**OPTIONS, max_examples=num_examples)
    @given(case=cases)
    def check(case: Any) -> None:
        response = case.call(base_url=base_url, timeout=30)
        seen.append(response.status_code)
        assert response.status_code < 500, (case.as_curl_command(), response.text[:2000])

    check()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stored", [False, True])
async def test_requests_made_from_the_gateways_document(running: Running, stored: bool) -> None:
    """`stored`: the paths of files and batches. They run apart: they take as long as all other paths together."""
    api = (await running.http.get("/openapi.json")).json()
    is_stored = [path for path in api["paths"] if path.startswith(STORED)]
    api["paths"] = {path: each for path, each in api["paths"].items() if (path in is_stored) == stored}
    named = {"CompletionRequest", "ChatRequest", "EmbeddingRequest", "TokenizeRequest", "DetokenizeRequest"}
    for name in named | {"ResponsesRequest", "MessagesRequest"}:  # for any other name, most requests would be refused
        api["components"]["schemas"][name]["properties"]["model"] = {"const": MODEL}
    messages = api["components"]["schemas"]["MessagesRequest"]
    messages["required"].append("max_tokens")  # optional only in count_tokens
    fields, short = messages["properties"], {"const": [{"role": "user", "content": "x"}]}
    fields["messages"] = {"anyOf": [short, fields["messages"]]}  # turns without any text are refused
    statuses = await asyncio.to_thread(ask, without_headers(api), str(running.http.base_url), EXAMPLES)
    if stored:
        assert statuses.keys() >= {"POST /v1/files", "POST /v1/batches", "GET /v1/files/{file_id}/content"}
        assert 200 in statuses["POST /v1/files"]
    else:
        assert statuses.keys() >= {"POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize"}
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages/count_tokens"):
            assert 200 in statuses[f"POST {path}"], path  # the requests reach the model
    for operation, seen in statuses.items():
        method, _, path = operation.partition(" ")
        described = api["paths"][path][method.lower()]["responses"]
        # 405: a broken request has another method.
        assert {str(status) for status in seen} <= described.keys() | {"405"}, operation


async def test_requests_made_from_openais_description(running: Running) -> None:
    api = json.loads(gzip.decompress(OPENAI.read_bytes()))
    statuses = await asyncio.to_thread(ask, api, f"{running.http.base_url}/v1", EXAMPLES)
    assert statuses
