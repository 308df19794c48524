"""Unmodified clients of a gateway's other gRPC contracts: smg with those of vLLM and SGLang, Triton's client, and
reflection."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from tests.clients.run import CLIENTS, Client, check
from tests.support.environments import python_of
from tests.support.smg import Smg
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


@pytest.fixture(scope="module", params=RUNTIMES)
def smg(request: pytest.FixtureRequest, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Smg]:
    python = python_of("smg")
    running = Smg(python, stack.grpc_port, request.param, tmp_path_factory.mktemp("smg") / "smg.log")
    try:
        yield running
    finally:
        running.close()


def assert_all_worked(client: Client, command: list[str], stack: Stack, log: Path, smg_url: str = "") -> None:
    outcome = check(client, command, stack, log, smg_url)
    assert outcome.all_worked, (outcome, log.read_text()[-3000:])


def openai_client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def test_smg_gives_the_answers_of_the_gateway(stack: Stack, smg: Smg, tmp_path: Path) -> None:
    """OpenAI's client asks: whole and streamed, samples with log probabilities, stop strings, structured outputs."""
    client = next(client for client in CLIENTS if client.key == "smg")
    assert_all_worked(client, [sys.executable, str(client.script)], stack, tmp_path / "log", smg.url)


def test_smg_routes_by_the_gateways_kv_events_and_loads(smg: Smg) -> None:
    hits = smg.metric("smg_cache_aware_policy_branch_total", 'branch="event_hit"')
    for _ in range(3):
        openai_client(smg.url).chat.completions.create(model=MODEL, messages=STORY, max_tokens=4)
        time.sleep(0.5)  # for the event
    assert smg.metric("smg_cache_aware_policy_branch_total", 'branch="event_hit"') > hits
    # A word: the names of requests are random letters.
    assert not re.search(r"\bgap\b", smg.log.read_text(errors="replace"), re.IGNORECASE)


def test_a_client_that_leaves_smg_ends_its_request_here(stack: Stack, smg: Smg) -> None:
    stream = openai_client(smg.url).chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    stack.wait_metric("paceline_scheduler_num_requests_running", 0)


def test_tritonclient(stack: Stack, tmp_path: Path) -> None:
    client = next(client for client in CLIENTS if client.key == "tritonclient")
    assert_all_worked(client, [str(python_of("tritonclient")), str(client.script)], stack, tmp_path / "log")


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
