"""`paceline bench` against a running Paceline server, and against one with only the required parts of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from services.cli.bench.main import main
from tests.support.ports import free_port
from tests.support.stack import Stack

SHORT = ["--input-tokens", "20-40", "--output-tokens", "4-8"]
SESSIONS = ["--turns", "2", "--think-time", "50ms", "--tool-time", "50ms", "--tool-tokens", "10"]
COUNTERS = {
    "requests": "paceline_gateway_requests_total",
    "prompt_tokens": "paceline_gateway_prompt_tokens_total",
    "cached_tokens": "paceline_gateway_prompt_tokens_cached_total",
    "output_tokens": "paceline_gateway_generation_tokens_total",
}
TRACE = [
    {"timestamp": 100 * i, "input_length": 40, "output_length": 4, "hash_ids": [0, 1, 9 + i]} for i in range(8)
]  # 0.7 s


def counts(stack: Stack) -> dict[str, float]:
    """The gateway's counters."""
    text = httpx.get(f"{stack.url}/metrics", trust_env=False).text
    return {
        name: sum(float(value) for value in re.findall(rf"^{series}\{{.*\}} (\S+)$", text, re.MULTILINE))
        for name, series in COUNTERS.items()
    }


def measure(url: str, folder: Path, *flags: str, code: int = 0) -> dict[str, Any]:
    """Run the command, and return its JSON."""
    path = folder / "run.json"
    assert main(["--url", url, "--json", str(path), "--html", str(folder / "run.html"), "--seed", "5", *flags]) == code
    report: dict[str, Any] = json.loads(path.read_text())
    assert (folder / "run.html").read_text().count("<svg") > 2
    return report


def total(report: dict[str, Any], name: str) -> int:
    return sum(stage["summary"][name] or 0 for stage in report["stages"])


def planned(stage: dict[str, Any]) -> list[float]:
    """The times at which the load should send the requests, sorted."""
    return sorted(request["sent_s"] - request["late_s"] for request in stage["requests"])


def test_every_mode_counts_as_the_server_does(stack: Stack, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    probes: dict[str, float] = {}
    modes: dict[str, list[str]] = {
        "concurrency": [*SHORT, "--concurrency", "1,3", "--sessions", "6"],
        "rate": [*SHORT, "--rate", "20", "--duration", "0.5s"],
        "poisson": [*SHORT, "--poisson", "20", "--duration", "0.5s", "--workload", "shared-prefix"],
        "ramp": [*SHORT, "--ramp", "20-40", "--duration", "0.5s", "--slo", "ttft=100s"],
        "trace": ["--trace", str(trace), "--trace-speed", "1,4"],
        "sessions": [*SHORT, *SESSIONS, "--concurrency", "4", "--sessions", "5", "--workload", "agent,multi-turn"],
    }
    for mode, flags in modes.items():
        before = counts(stack)
        report = measure(f"{stack.url}/v1", tmp_path, "--ignore-eos", "--prefix-tokens", "60", *flags)
        after = counts(stack)
        assert total(report, "succeeded") == total(report, "requests"), (mode, report["stages"])
        # The server also counts the bench's own probes of its token counts. They are the same 3 requests in each mode.
        probed = {name: after[name] - before[name] - total(report, name) for name in COUNTERS}
        assert probed["requests"] == 3, mode
        assert 0 <= probed.pop("cached_tokens") <= probed["prompt_tokens"], mode
        probes = probes or probed
        assert probed == probes, mode
        assert not [note for note in report["notes"] if "usage" in note or "count" in note]
        if mode == "rate":
            assert total(report, "requests") == 10
            assert planned(report["stages"][0]) == pytest.approx([i / 20 for i in range(10)], abs=0.001)
        if mode == "ramp":
            assert report["ramp"] == {"holds": 40, "breaks": None, "limit": 40}
            assert [stage["load"]["value"] for stage in report["stages"]] == [20, 40]
        if mode == "trace":
            requests = [stage["summary"]["requests"] for stage in report["stages"]]
            assert requests == [8, 8]
            for stage, speed in zip(report["stages"], (1, 4), strict=True):
                assert planned(stage) == pytest.approx([i / 10 / speed for i in range(8)], abs=0.001)
            # Two of three blocks are the same in all requests.
            assert total(report, "cached_tokens") > 0
        if mode == "sessions":
            requests = report["stages"][0]["requests"]
            assert {request["kind"] for request in requests} == {"agent", "multi-turn"}
            assert max(request["turn"] for request in requests) >= 3


def test_prompts_have_the_wanted_length(stack: Stack, tmp_path: Path) -> None:
    for endpoint in ("chat", "completion"):
        report = measure(
            stack.url, tmp_path, "--endpoint", endpoint, "--concurrency", "4", "--sessions", "8",
            "--input-tokens", "400", "--output-tokens", "4",
        )  # fmt: skip
        mean = total(report, "prompt_tokens") / total(report, "requests")
        assert mean == pytest.approx(400, rel=0.1), endpoint
    flags = ["--endpoint", "completion", "--token-ids", "1000", "--concurrency", "2", "--sessions", "4"]
    report = measure(stack.url, tmp_path, "--input-tokens", "100", "--output-tokens", "4", *flags)
    assert total(report, "prompt_tokens") == 400


def test_ctrl_c_reports_what_was_measured(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    flags = ["--url", stack.url, "--concurrency", "2", "--duration", "60s", *SHORT, "--json", str(path)]
    running = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "bench", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    before = counts(stack)["requests"]
    deadline = time.monotonic() + 30
    while counts(stack)["requests"] < before + 8:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=30)
    assert running.returncode == 130, err
    assert "Traceback" not in err
    report = json.loads(path.read_text())
    assert report["interrupted"]
    assert total(report, "succeeded") >= 4
    assert total(report, "succeeded") == total(report, "requests")
    assert "2 at once" in out


class Stranger:
    """An OpenAI-compatible server that knows no usage in streams, and refuses every field that it does not need."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.port = free_port()
        routes = [Route("/v1/models", self.models), Route("/v1/chat/completions", self.chat, methods=["POST"])]
        self._server = uvicorn.Server(
            uvicorn.Config(
                Starlette(routes=routes),
                host="127.0.0.1",
                port=self.port,
                lifespan="off",
                log_config=None,  # uvicorn's would change the logging of the whole process
                access_log=False,
            )
        )
        self._thread = threading.Thread(target=self._server.run)

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "stranger", "object": "model"}]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        if unknown := body.keys() - {"model", "messages", "max_tokens", "stream"}:
            return JSONResponse({"error": {"message": f"unknown {unknown}", "code": "unknown_parameter"}}, 400)
        self.bodies.append(body)
        if not body.get("stream"):
            return JSONResponse({"choices": [{"message": {"role": "assistant", "content": "x"}}]})
        if len(self.bodies) % 4 == 0:
            return JSONResponse({"error": {"message": "busy", "type": "overloaded"}}, 429)
        return StreamingResponse(self.stream(body["max_tokens"]), media_type="text/event-stream")

    async def stream(self, tokens: int) -> Any:
        for i in range(tokens):
            await asyncio.sleep(0.01)
            yield f"data: {json.dumps({'choices': [{'delta': {'content': f'word{i} '}}]})}\r\n\r\n"
        yield 'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    running = Stranger()
    running.start()
    try:
        yield running
    finally:
        running.stop()


def test_a_server_that_reports_no_usage_is_measured_by_its_chunks(stranger: Stranger, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{stranger.port}"
    report = measure(url, tmp_path, "--concurrency", "2", "--sessions", "12", "--output-tokens", "5")
    assert report["model"] == "stranger"
    (stage,) = report["stages"]
    summary = stage["summary"]
    assert summary["requests"] == 12
    assert summary["failures"] == {"HTTP 429 overloaded": summary["requests"] - summary["succeeded"]}
    assert summary["succeeded"] == 9
    assert summary["output_tokens"] == 5 * 9
    assert (summary["is_counted"], summary["prompt_tokens"], summary["cached_tokens"]) == (False, 0, None)
    assert summary["itl"]["count"] == 4 * 9
    assert summary["itl"]["mean"] >= 0.009
    assert summary["ttft"]["p50"] >= 0.01
    notes = " ".join(report["notes"])
    for words in ("does not count prompt tokens", "refuses `stream_options`", "output tokens are pieces"):
        assert words in notes
    sent = [body for body in stranger.bodies if body["max_tokens"] == 5]
    assert len({body["messages"][0]["content"] for body in sent}) == 12


def test_a_rate_that_a_foreign_server_refuses_breaks_the_slo(stranger: Stranger, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{stranger.port}"
    flags = ["--ramp", "200-400", "--duration", "0.3s", "--output-tokens", "2", "--slo", "e2e=5s,share=0.95"]
    report = measure(url, tmp_path, *flags, "--precision", "1")
    # Every fourth request fails, at each rate.
    assert report["ramp"]["holds"] is None
    assert [stage["load"]["value"] for stage in report["stages"]] == [200, 100, 50, 25]
    for stage in report["stages"]:
        assert stage["summary"]["requests"] >= 8
        assert stage["summary"]["good_share"] == pytest.approx(0.75, abs=0.15)
