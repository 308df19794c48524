"""The public gRPC API of a running server: the Python client, and what generic tools use."""

from __future__ import annotations

import socket
import sys
import time
from contextlib import ExitStack

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from demo import CHECKPOINT
from paceline.v1.inference_pb2 import GenerateRequest, SamplingOptions, TokenIds
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from services.client import AsyncPacelineClient, InvalidRequest, PacelineClient
from tests.support import reference
from tests.support.stack import Stack

PROMPT = [50, 60, 70, 80]


def test_text_messages_and_token_ids_give_tokens_and_text(stack: Stack) -> None:
    right = reference.greedy(CHECKPOINT, PROMPT, 20)
    with PacelineClient(f"127.0.0.1:{stack.grpc_port}") as client:
        whole = client.generate(token_ids=PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
        pieces = list(client.stream(token_ids=PROMPT, max_tokens=20, temperature=0, ignore_eos=True))
        answer = client.generate(messages=[{"role": "user", "content": "What is 3 + 4?"}], temperature=0)
        story = client.generate(prompt="Once there was a fox", max_tokens=10, temperature=0)
    assert list(whole.token_ids) == right
    assert "".join(piece.text for piece in pieces) == whole.text
    assert answer.text == "3 + 4 = 7."
    assert story.text


async def test_the_async_client_streams_the_same(stack: Stack) -> None:
    async with AsyncPacelineClient(f"127.0.0.1:{stack.grpc_port}") as client:
        pieces = [piece async for piece in client.stream(token_ids=PROMPT, max_tokens=20, temperature=0)]
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert tokens == reference.greedy(CHECKPOINT, PROMPT, 20, ignore_eos=False)


def test_bad_arguments_name_the_field(stack: Stack) -> None:
    with PacelineClient(f"127.0.0.1:{stack.grpc_port}") as client:
        with pytest.raises(InvalidRequest, match="max_tokens"):
            client.generate(token_ids=PROMPT, max_tokens=-3)
        with pytest.raises(InvalidRequest, match="token id 1000000"):
            client.generate(token_ids=[10**6], max_tokens=3)


def test_the_scheduler_itself_takes_token_ids(stack: Stack) -> None:
    options = SamplingOptions(temperature=0, max_tokens=20, ignore_eos=True)
    with grpc.insecure_channel(stack.scheduler) as channel:
        stub = InferenceServiceStub(channel)
        messages = list(stub.Generate(GenerateRequest(token_ids=TokenIds(ids=PROMPT), sampling=options), timeout=60))
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(GenerateRequest(text="hello"), timeout=60))
    assert [token for message in messages for token in message.token_ids] == reference.greedy(CHECKPOINT, PROMPT, 20)
    assert messages[-1].usage.completion_tokens == 20
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("service", "port"),
    [("InferenceService", "grpc_port"), ("WorkerService", "scheduler_port"), ("CacheService", "cache_port")],
)
def test_reflection_lists_the_services(stack: Stack, service: str, port: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{getattr(stack, port)}") as channel:
        assert f"paceline.v1.{service}" in ProtoReflectionDescriptorDatabase(channel).get_services()


# The preface of HTTP/2 and an empty SETTINGS frame: after them, gRPC treats the connection as a client's.
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_a_client_that_opens_all_connections_locks_out_no_other_client(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("PACELINE_GATEWAY_MAX_GRPC_CONNECTIONS", "24")
    stack.start_gateway("gateway-small")
    request.addfinalizer(lambda: stack.kill("gateway-small"))
    port = stack.gateway_ports["gateway-small"][1]
    with ExitStack() as flood:
        for _ in range(48):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = flood.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options))
            channel.subscribe(lambda _: None, try_to_connect=True)
        limit_s = time.monotonic() + 20
        # One answer is enough. The flood connects again at once, so a second greeting may find all connections taken.
        while not (served := greets(port)) and time.monotonic() < limit_s:
            time.sleep(0.1)
        assert served


def greets(port: int) -> bool:
    """Whether the server takes a connection from another address."""
    try:
        with socket.create_connection(("127.0.0.1", port), 5, source_address=("127.0.0.2", 0)) as connection:
            connection.sendall(HELLO)
            return bool(connection.recv(9))
    except OSError:
        return False
