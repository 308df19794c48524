"""Other systems in front of a gateway, unmodified: smg by its contracts for vLLM and SGLang, Triton's client, and
reflection."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from tests.support.environments import ROOT, python_of
from tests.support.ports import free_port
from tests.support.stack import Stack

MODEL = "paceline-demo"
CHAT = [{"role": "user", "content": "hello"}]
STORY = [{"role": "user", "content": "Tell me a story about a fox and a hen. " * 12}]
RUNTIMES = ("sglang", "vllm")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("routed"))
    running.gateway_flags = ["--cache", f"127.0.0.1:{running.cache_port}"]
    running.cache_flags = ["--event-tokens"]
    try:
        yield running.up()
    finally:
        running.down()


class Smg:
    """smg in front of one gateway, which it takes for an engine of this runtime."""

    def __init__(self, python: Path, stack: Stack, runtime: str, log: Path) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command: list[Any] = [
            python.parent / "smg",
            "launch",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--enable-igw",
        ]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(self.metrics_port)]
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self._until(lambda: httpx.get(f"{self.url}/workers").status_code == 200)
        worker = {"url": f"grpc://127.0.0.1:{stack.grpc_port}", "runtime_type": runtime, "connection_mode": "grpc"}
        httpx.post(f"{self.url}/workers", json=worker).raise_for_status()
        self._until(lambda: [each["is_healthy"] for each in self.workers] == [True])
        assert [each["runtime_type"] for each in self.workers] == [runtime]

    @property
    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{self.url}/workers").json()["workers"]
        return found

    def metric(self, name: str, label: str) -> float:
        text = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name) and label in line)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            with contextlib.suppress(httpx.HTTPError):
                if condition():
                    return
            time.sleep(0.1)
        raise AssertionError(self.log.read_text(errors="replace")[-4000:])


@pytest.fixture(scope="module", params=RUNTIMES)
def smg(request: pytest.FixtureRequest, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Smg]:
    python = python_of("smg")
    running = Smg(python, stack, request.param, tmp_path_factory.mktemp("smg") / "smg.log")
    try:
        yield running
    finally:
        running.close()


def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def test_smg_gives_the_answers_of_the_gateway(stack: Stack, smg: Smg) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 20, "temperature": 0}
    expected = client(stack.url).chat.completions.create(**asked)
    answer = client(smg.url).chat.completions.create(**asked)
    assert answer.choices[0].message.content == expected.choices[0].message.content
    assert answer.choices[0].finish_reason == expected.choices[0].finish_reason
    assert answer.usage.completion_tokens == expected.usage.completion_tokens
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens, "smg has our tokenizer and chat template"

    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client(smg.url).chat.completions.create(**asked, **options))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == expected.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == expected.usage.completion_tokens


def test_smg_gives_samples_log_probabilities_stops_and_forms(smg: Smg) -> None:
    create = client(smg.url).chat.completions.create
    answer = create(model=MODEL, messages=CHAT, max_tokens=6, temperature=0, n=2, logprobs=True, top_logprobs=2)
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 6
    whole = create(model=MODEL, messages=CHAT, max_tokens=20, temperature=0)
    content = whole.choices[0].message.content or ""
    stop = content.split()[2]
    cut = create(model=MODEL, messages=CHAT, max_tokens=20, temperature=0, stop=[stop])
    assert cut.choices[0].finish_reason == "stop"
    assert (cut.choices[0].message.content or "").rstrip() == content.partition(stop)[0].rstrip()
    schema: dict[str, Any] = {
        "name": "n",
        "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    }
    schema["schema"]["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": schema}
    shaped = create(model=MODEL, messages=CHAT, max_tokens=80, temperature=0, response_format=form)
    assert isinstance(json.loads(shaped.choices[0].message.content)["a"], bool)


def test_smg_routes_by_our_kv_events_and_loads(smg: Smg) -> None:
    hits = smg.metric("smg_cache_aware_policy_branch_total", 'branch="event_hit"')
    for _ in range(3):
        client(smg.url).chat.completions.create(model=MODEL, messages=STORY, max_tokens=4)
        time.sleep(0.5)  # for the event
    assert smg.metric("smg_cache_aware_policy_branch_total", 'branch="event_hit"') > hits
    assert "gap" not in smg.log.read_text(errors="replace").lower()


def test_a_client_that_leaves_smg_ends_its_request_here(stack: Stack, smg: Smg) -> None:
    stream = client(smg.url).chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    stack.wait_metric("paceline_scheduler_num_requests_running", 0)


def test_tritonclient(stack: Stack) -> None:
    python = python_of("tritonclient")
    done = subprocess.run(
        [python, ROOT / "tests/support/triton_script.py", f"127.0.0.1:{stack.grpc_port}", MODEL],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert not done.returncode, done.stderr[-3000:]
    found = json.loads(done.stdout)
    asked = {"model": MODEL, "prompt": "Once there was", "max_tokens": 12, "temperature": 0}
    expected = httpx.post(f"{stack.url}/v1/completions", json=asked, timeout=60).json()["choices"][0]["text"]
    assert found["whole"] == found["by_parameters"] == "".join(found["pieces"]) == expected
    assert len(found["pieces"]) > 1
    assert len(found["output_ids"]) == len(found["from_ids"]) == 12
    assert [found[name] for name in ("live", "ready", "model_ready", "other_ready")] == [True, True, True, False]
    assert found["server"]["name"] == "paceline"
    assert {each["name"] for each in found["model"]["inputs"]} >= {"text_input", "sampling_parameters"}
    assert "text_input or input_ids" in found["stream_error"]
    status, message = found["refusal"]
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert "top_p" in message


def test_reflection_names_every_contract(stack: Stack) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        for version in ("v1alpha", "v1"):
            method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            ask = channel.stream_stream(
                method,
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            [answer] = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=20)
            names = {service.name for service in answer.list_services_response.service}
            assert names >= {
                "paceline.v1.InferenceService",
                "vllm.grpc.engine.VllmEngine",
                "sglang.grpc.scheduler.SglangScheduler",
                "inference.GRPCInferenceService",
            }
            symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService")
            [answer] = ask(iter([symbol]), timeout=20)
            assert re.search(b"ModelStreamInfer", b"".join(answer.file_descriptor_response.file_descriptor_proto))
