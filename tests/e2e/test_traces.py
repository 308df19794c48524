"""Spans of real services at an OpenTelemetry collector."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise
from pathlib import Path

import grpc.aio
import pytest

from paceline.v1 import inference_pb2, inference_pb2_grpc
from tests.support import load
from tests.support.collector import Collector, SentSpan
from tests.support.ports import free_port
from tests.support.stack import Stack

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
SLACK_NS = 2_000_000  # two processes tell the time, each from its own clock


def traced_stack(stack: Stack, url: str) -> Stack:
    stack.environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    return stack


def children(spans: list[SentSpan], parent: SentSpan) -> list[SentSpan]:
    return sorted((span for span in spans if span.parent_id == parent.span_id), key=lambda span: span.start_ns)


def the_one(spans: list[SentSpan], name: str) -> SentSpan:
    [found] = [span for span in spans if span.name == name]
    return found


def has_ended(spans: list[SentSpan]) -> bool:
    """Whether the last spans have arrived, the scheduler's and the gateway's. Their children do not arrive later."""
    return {"llm_request", "text_completion paceline-demo"} <= {span.name for span in spans}


def counted(url: str) -> dict[str, float]:
    """The spans of a service by their outcome."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        found = re.findall(r'paceline_trace_spans_total{outcome="(\w+)"} (\S+)', answer.read().decode())
    return {outcome: float(value) for outcome, value in found}


async def post(stack: Stack, headers: dict[str, str], **fields: object) -> None:
    body = {"prompt": list(range(20, 220)), "temperature": 0, "ignore_eos": True, **fields}
    async with load.client(stack.url) as http:
        answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


async def test_a_request_through_a_killed_worker_is_one_trace_in_order(own_stack: Stack) -> None:
    """The spans of the client, the gateway, the scheduler and the phases are nested. The recovery is a phase."""
    with Collector() as collector:
        own_stack.worker_flags = ["--threads", "1", "--max-batched-tokens", "128"]
        stack = await asyncio.to_thread(traced_stack(own_stack, collector.url).up)
        asked = asyncio.create_task(post(stack, {**TRACED, "x-request-id": "mine"}, max_tokens=1500))
        await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_requests_running", 1)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(stack.kill, "worker-1")
        assert not asked.done()
        await asyncio.to_thread(stack.start, "worker-1")
        await asked
        spans = await asyncio.to_thread(collector.wait, has_ended)
    assert {span.trace_id for span in spans} == {TRACE}
    assert len({span.span_id for span in spans}) == len(spans)
    assert {span.state for span in spans if span.service == "paceline-gateway"} == {"vendor=1"}
    root = the_one(spans, "text_completion paceline-demo")
    assert (root.service, root.parent_id, root.is_server) == ("paceline-gateway", PARENT, True)
    [request] = children(spans, root)
    assert (request.service, request.name) == ("paceline-scheduler", "llm_request")
    phases = children(spans, request)
    assert len(spans) == 2 + len(phases)
    names = re.sub(r"(prefill )+", "prefill ", " ".join(span.name for span in phases) + " ")
    assert names == "queued prefill decode recovered prefill decode "
    inside = [root, request, *phases]
    for span in inside:
        assert root.start_ns - SLACK_NS <= span.start_ns <= span.end_ns <= root.end_ns + SLACK_NS, span
    assert request.start_ns <= phases[0].start_ns
    assert phases[-1].end_ns <= request.end_ns
    for before, after in pairwise(phases):
        assert before.end_ns <= after.start_ns, (before, after)
    _check_attributes(root, request, phases)


def _check_attributes(root: SentSpan, request: SentSpan, phases: list[SentSpan]) -> None:
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "paceline-demo",
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 1500,
        "gen_ai.usage.input_tokens": 200,
        "gen_ai.usage.output_tokens": 1500,
        "gen_ai.response.finish_reasons": ["length"],
        "http.response.status_code": 200,
    }
    assert root.attributes.items() >= wanted.items(), root.attributes
    assert request.attributes["gen_ai.usage.completion_tokens"] == 1500
    assert request.attributes["paceline.losses"] == 1
    assert not root.is_error
    assert not request.is_error
    chunks = [span.attributes for span in phases if span.name == "prefill"]
    sizes = [chunk["paceline.tokens"] for chunk in chunks]
    assert sizes[:2] == [128, 72]  # at most --max-batched-tokens
    assert sum(sizes[2:]) > 200  # prompt and output so far, again
    assert len({chunk["paceline.worker"] for chunk in chunks}) == 2
    [recovered] = [span for span in phases if span.name == "recovered"]
    assert "worker" in recovered.attributes["paceline.detail"]
    text = json.dumps([span.attributes for span in [root, request, *phases]])
    assert "prompt_token_ids" not in text


async def test_the_client_decides_whether_its_request_is_traced(own_stack: Stack) -> None:
    """A request without trace context begins a new trace. A context that is not sampled gives no trace. A sampled
    context is continued, also over gRPC."""
    with Collector() as collector:
        stack = await asyncio.to_thread(traced_stack(own_stack, collector.url).up)
        await post(stack, {"traceparent": f"00-{TRACE}-{PARENT}-00"}, max_tokens=3)
        await post(stack, {}, max_tokens=3, n=2, temperature=1, prompt=[5])
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[7]))
        request.sampling.max_tokens = 2
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
            generate = inference_pb2_grpc.InferenceServiceStub(channel).Generate
            metadata = [("traceparent", f"00-{TRACE}-{PARENT}-01"), ("x-request-id", "by-grpc")]
            async for _ in generate(request, metadata=metadata):
                pass
        spans = await asyncio.to_thread(collector.wait, lambda spans: sum(s.name == "llm_request" for s in spans) == 3)
        spans = await asyncio.to_thread(collector.wait, lambda spans: sum(s.is_server for s in spans) == 2)
    by_grpc, own = [[s for s in spans if (s.trace_id == TRACE) is theirs] for theirs in (True, False)]
    assert [s.parent_id for s in by_grpc if s.is_server] == [PARENT]
    assert [s.attributes["paceline.endpoint"] for s in by_grpc if s.is_server] == ["grpc"]
    [root] = [s for s in own if s.is_server]
    assert (root.parent_id, len({s.trace_id for s in own})) == ("", 1)
    assert [s.name for s in children(own, root)] == ["llm_request"] * 2
    assert root.attributes["gen_ai.usage.num_sequences"] == 2
    told = await asyncio.to_thread(counted, stack.url)
    assert told == {"exported": 2, "failed": 0, "dropped": 0}
    finished = [
        json.loads(line) for line in (stack.folder / "gateway.log").read_text().splitlines() if "finished" in line
    ]
    assert root.trace_id in [line.get("trace_id") for line in finished]


async def test_without_a_collector_requests_are_answered_and_lost_spans_are_counted(own_stack: Stack) -> None:
    stack = traced_stack(own_stack, f"http://127.0.0.1:{free_port()}")
    stack.environment |= {"OTEL_BSP_MAX_QUEUE_SIZE": "4", "OTEL_EXPORTER_OTLP_TIMEOUT": "60"}
    await asyncio.to_thread(stack.up)
    for _ in range(12):
        await post(stack, TRACED, max_tokens=2)
    port = stack.metrics_ports["scheduler"]
    told = await asyncio.to_thread(counted, f"http://127.0.0.1:{port}")
    # 4 spans of each request at least; up to 4 wait and up to 4 are being sent.
    assert told["dropped"] >= 12 * 4 - 8
    assert told["exported"] == 0
    began_s = time.monotonic()
    await asyncio.to_thread(stack.down)
    assert time.monotonic() - began_s < 20


@pytest.mark.parametrize("service", ["scheduler_svc.server", "services.gateway.server"])
def test_without_an_endpoint_nothing_of_opentelemetry_is_imported(service: str) -> None:
    code = f"import sys, {service}; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert ran.stdout.strip() == "[]"
