"""Headers of llm-d and the Gateway API (sessions, TTFT goals, objectives, tenants), and W3C trace context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from paceline.v1 import inference_pb2, inference_pb2_grpc
from tests.contract.gateway.conftest import MODEL, Lines, Running, Start
from tests.contract.gateway.test_keys import Keys, bearer

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": [7, 8, 9], "max_tokens": 3}


async def asked(running: Running, headers: dict[str, str], status: int = 200, **body: Any) -> Any:
    answer = await running.http.post(PATH, json=BODY | body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()["error"] if status != 200 else running.scheduler.submissions[-1]


async def test_request_metadata_in_headers_reaches_the_scheduler(start: Start) -> None:
    running = await start(settings={"objectives": "critical=7, batch=-2.5"})
    headers = {
        "x-llm-d-slo-ttft-ms": "250",
        "x-llm-d-inference-objective": "critical",
        "x-llm-d-inference-fairness-id": "acme",
        "x-session-id": "chat 1",
    }
    submission = await asked(running, headers)
    assert (submission.ttft_slo_s, submission.priority, submission.tenant) == (0.25, 7.0, "acme")
    assert len(submission.conversation) == 64
    assert (await asked(running, {"x-session-id": "chat 1"})).conversation == submission.conversation
    assert (await asked(running, {"x-session-id": "chat 2"})).conversation != submission.conversation
    older = await asked(running, {"x-gateway-inference-fairness-id": "acme", "x-llm-d-inference-objective": "-3"})
    assert (older.tenant, older.priority, older.conversation) == ("acme", -3.0, "")
    assert (await asked(running, {"x-llm-d-inference-fairness-id": "acme"}, user="someone")).tenant == "acme"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "model": MODEL, "max_tokens": 3}),
    ],
)
async def test_every_api_takes_the_headers(start: Start, path: str, body: dict[str, Any]) -> None:
    running = await start(settings={"objectives": "critical=7"})
    headers = {
        "x-llm-d-slo-ttft-ms": "250",
        "x-llm-d-inference-objective": "critical",
        "x-llm-d-inference-fairness-id": "acme",
        "x-session-id": "chat 1",
    }
    answer = await running.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    submission = running.scheduler.submissions[-1]
    assert (submission.ttft_slo_s, submission.priority, submission.tenant) == (0.25, 7.0, "acme")
    assert len(submission.conversation) == 64
    refused = await running.http.post(path, json=body, headers={"x-llm-d-slo-ttft-ms": "soon"})
    assert (refused.status_code, "x-llm-d-slo-ttft-ms" in refused.text) == (400, True)


@pytest.mark.parametrize(
    ("name", "value", "body"),
    [
        ("x-session-id", "", {}),
        ("x-session-id", "x" * 129, {}),
        ("x-session-id", "caf\u00e9", {}),
        ("x-llm-d-slo-ttft-ms", "soon", {}),
        ("x-llm-d-slo-ttft-ms", "0", {}),
        ("x-llm-d-slo-ttft-ms", "nan", {}),
        ("x-llm-d-slo-ttft-ms", "1e12", {}),
        ("x-llm-d-slo-ttft-ms", "250", {"ttft_slo_s": 1}),
        ("x-llm-d-inference-objective", "important", {}),
        ("x-llm-d-inference-objective", "inf", {}),
        ("x-llm-d-inference-objective", "5", {"priority": 6}),
        ("x-llm-d-inference-fairness-id", "t" * 129, {}),
        ("x-llm-d-inference-fairness-id", "acme", {"tenant": "other"}),
    ],
)
async def test_a_bad_value_is_refused_by_its_name(
    running: Running, name: str, value: str, body: dict[str, Any]
) -> None:
    headers: Any = {name: value.encode("latin-1")}
    error = await asked(running, headers, 400, **body)
    assert error["param"] == name
    assert name in error["message"]


async def test_a_header_may_be_sent_once(running: Running) -> None:
    answer = await running.http.post(PATH, json=BODY, headers=[("x-session-id", "a"), ("x-session-id", "b")])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-session-id")


async def test_a_session_is_released_once(running: Running) -> None:
    await asked(running, {"x-session-id": "mine/e"})
    for status in (204, 404):
        answer = await running.http.delete("/v1/sessions/mine%2Fe")
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "session_id"
    assert (await running.http.delete("/v1/sessions/" + "x" * 200)).status_code == 400


async def test_a_release_without_a_scheduler_gets_a_503(start: Start) -> None:
    running = await start(scheduler_up=False)
    answer = await running.http.delete("/v1/sessions/mine")
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)


async def test_a_key_limits_what_headers_may_say(start: Start, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.toml")
    ours, others = keys.add("a", tenant="acme", max_priority=5), keys.add("b", tenant="other")
    running = await start(settings={"keys_file": str(keys.path)})
    error = await asked(running, bearer(ours, **{"x-llm-d-inference-fairness-id": "other"}), 403)
    assert error["reason"] == "tenant_not_allowed"
    error = await asked(running, bearer(ours, **{"x-llm-d-inference-objective": "6"}), 403)
    assert error["reason"] == "priority_not_allowed"
    first = await asked(running, bearer(ours, **{"x-session-id": "s"}))
    second = await asked(running, bearer(others, **{"x-session-id": "s"}))
    assert first.conversation != second.conversation
    assert (await running.http.delete("/v1/sessions/s")).status_code == 401
    running.scheduler.conversations.remove(second.conversation)
    for secret, status in ((others, 404), (ours, 204)):
        answer = await running.http.delete("/v1/sessions/s", headers=bearer(secret))
        assert answer.status_code == status


async def test_the_trace_of_the_client_is_on_the_lines_of_its_request(running: Running, lines: Lines) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    await asked(running, {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "x-request-id": "traced"})
    await asked(running, {"traceparent": "00-nonsense", "x-request-id": "untraced"})
    traces = {line["request_id"]: line.get("trace_id") for line in lines() if line["message"] == "request finished"}
    assert traces == {"traced": trace, "untraced": None}
    assert [one.trace_id for one in running.scheduler.submissions] == [trace, ""]


async def test_a_gateway_without_tracing_forwards_the_parent_span_of_a_sampled_request(running: Running) -> None:
    """If the scheduler does trace, its spans belong to the client's trace."""
    parent = "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"
    await asked(running, {"traceparent": f"00-{parent}-01"})
    await asked(running, {"traceparent": f"00-{parent}-00"})
    assert [one.span_id for one in running.scheduler.submissions] == ["00f067aa0ba902b7", ""]


async def test_the_trace_of_a_grpc_client_goes_with_its_request(running: Running) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[7]))
    request.sampling.max_tokens = 2
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        generate = inference_pb2_grpc.InferenceServiceStub(channel).Generate
        for metadata in ([("traceparent", f"00-{trace}-00f067aa0ba902b7-01")], []):
            async for _ in generate(request, metadata=metadata):
                pass
    assert [one.trace_id for one in running.scheduler.submissions] == [trace, ""]
