"""Every gRPC method of every service under messages that make no sense: bits flipped, bytes cut, any value anywhere.

The methods are those that the servers' reflection names, so a new one is tried, too. Each call is served or ends with a
status that blames the caller. Afterwards requests still get their exact tokens.
"""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import zlib
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any

import grpc
import grpc.aio
import httpx
import numpy as np
import psutil
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import paceline.third_party
import paceline.v1
from paceline.third_party import kserve_inference_pb2, sglang_scheduler_pb2, vllm_engine_pb2
from paceline.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, common_pb2, inference_pb2, worker_pb2
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from services.runtime.reflection.both_names import describe_v1
from services.runtime.rpc import MAX_MESSAGE_BYTES, open_channel
from tests.support.ports import free_port
from tests.support.proto_garbage import mangled, random_message
from tests.support.stack import Stack
from tests.support.untyped_grpc import untyped
from tests.unit.cache import driver as cache_ops

for package in (paceline.v1, paceline.third_party):
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")

UNARY_CALLS, STREAMS, AT_ONCE = 80, 24, 8
NUM_RESETS, NUM_QUESTIONS = 1000, 1000
# Seconds for which the test waits for an answer.
PATIENCE_S = 0.2
SERVERS = ("gateway", "scheduler", "cache", "worker")
# Statuses that blame the server.
OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
PROMPT = [5, 6, 7, 8] * 5
MAX_GROWTH_BYTES = 150 * 2**20


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that the test may break."""
    running = Stack(tmp_path_factory.mktemp("fuzzed"), worker_flags=["--threads", "1", "--port", str(free_port())])
    running.gateway_flags = ["--cache", f"127.0.0.1:{running.cache_port}"]  # for SubscribeKvEvents
    running.cache_flags = ["--event-tokens"]
    try:
        yield running.up()
    finally:
        running.down()


def target(stack: Stack, server: str) -> str:
    ports = (stack.grpc_port, stack.scheduler_port, stack.cache_port, stack.worker_flags[-1])
    return f"127.0.0.1:{dict(zip(SERVERS, ports, strict=True))[server]}"


async def methods(channel: grpc.aio.Channel) -> list[MethodDescriptor]:
    """The methods of all services that the server's reflection names."""
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
    answer = await call.read()
    names = [service.name for service in answer.list_services_response.service]
    assert len(names) >= 2, "health and reflection; a worker has no other service"
    describe_v1()
    pool = descriptor_pool.Default()
    return [method for name in names for method in pool.FindServiceByName(name).methods]


async def model(stack: Stack) -> common_pb2.ModelInfo:
    async with open_channel(stack.scheduler) as channel:
        call = untyped(InferenceServiceStub(channel)).Session()
        asks = inference_pb2.SessionOpen(session_id="asks", response_window=8)
        await call.write(inference_pb2.SessionRequest(open=asks))
        info: common_pb2.ModelInfo = (await call.read()).status.model
        call.cancel()
    return info


def well_formed(method: str, info: common_pb2.ModelInfo) -> list[Message]:
    """Valid messages of a method, in a useful order; empty if this test knows none for the method."""
    ids = np.array(PROMPT, np.int32).tobytes()
    sampling = common_pb2.SamplingParams(max_tokens=4, top_p=1.0, repetition_penalty=1.2, logprobs=True)
    match method:
        case "VllmEngine.Generate":
            tokens = vllm_engine_pb2.TokenizedInput(input_ids=PROMPT)
            params = vllm_engine_pb2.SamplingParams(max_tokens=4, n=2, logprobs=1, stop=["x"], json_object=True)
            return [vllm_engine_pb2.GenerateRequest(tokenized=tokens, sampling_params=params, stream=True)]
        case "SglangScheduler.Generate":
            ids_ = sglang_scheduler_pb2.TokenizedInput(input_ids=PROMPT)
            limits = sglang_scheduler_pb2.SamplingParams(max_new_tokens=4, n=2, regex="a+")
            return [sglang_scheduler_pb2.GenerateRequest(tokenized=ids_, sampling_params=limits, return_logprob=True)]
        case "ModelInfer" | "ModelStreamInfer":
            inputs = [
                kserve_inference_pb2.ModelInferRequest.InferInputTensor(name=name, datatype=kind, shape=[size])
                for name, kind, size in (("input_ids", "INT32", len(PROMPT)), ("sampling_parameters", "BYTES", 1))
            ]
            raw = [ids, b'\x10\0\0\0{"max_tokens": 4}']
            infer = kserve_inference_pb2.ModelInferRequest(inputs=inputs, raw_input_contents=raw)
            return [infer, infer] if method == "ModelStreamInfer" else [infer]
        case "Generate":
            options = inference_pb2.SamplingOptions(max_tokens=4, temperature=0.5, seed=3, stop=["x"], logprobs=2)
            wanted = inference_pb2.TokenIds(ids=PROMPT)
            return [inference_pb2.GenerateRequest(token_ids=wanted, sampling=options, tenant="a", cache_salt="b")]
        case "Session":
            submissions = [
                inference_pb2.Submission(handle=i, request_id="r", prompt_token_ids=ids, sampling=sampling)
                for i in (1, 2)
            ]
            return [
                inference_pb2.SessionRequest(open=inference_pb2.SessionOpen(session_id="fuzz", response_window=4)),
                inference_pb2.SessionRequest(submissions=submissions),
                inference_pb2.SessionRequest(responses_read=1),
                inference_pb2.SessionRequest(cancels=[1, 2], responses_read=2),
            ]
        case "WorkerService.Link":
            sizes: dict[str, Any] = {"block_size": 16, "num_blocks": 64, "max_num_seqs": 8, "max_batched_tokens": 256}
            kept = worker_pb2.KeptSequence(token_ids=ids, num_computed_tokens=20, block_table=ids[:8])
            join = worker_pb2.WorkerRegistration(name="fuzz", model=info, num_host_blocks=8, kept=[kept], **sizes)
            messages: dict[str, Any] = {
                "registration": join,
                "heartbeat": worker_pb2.Heartbeat(),
                "result": worker_pb2.StepResult(step=1, token_ids=ids[:8]),
                "failure": worker_pb2.StepFailure(first_step=1, last_step=1, message="fuzz"),
                "drain": worker_pb2.WorkerDrain(),
            }
            return [worker_pb2.WorkerServiceLinkRequest(**{name: value}) for name, value in messages.items()]
        case "CacheService.Link":
            begin = [cache_ops.add_worker_op(0, 8, 4), cache_ops.match_op(1, PROMPT[:16]), cache_ops.admit_op(1, 0)]
            end = [cache_ops.commit_op([(1, [], 16)]), cache_ops.free_op([1])]
            return [
                cache_pb2.CacheServiceLinkRequest(epoch=1, exchange=i + 1, ops=ops)
                for i, ops in enumerate((begin, end))
            ]
        case "SetPolicy":
            return [admin_pb2.SetPolicyRequest(choice=admin_pb2.PolicyChoice(preset="vllm", order="lpm"))]
        case "PinPrefix":
            return [cache_pb2.PinPrefixRequest(name="p", token_ids=ids)]
        case _:
            return []


def draw(rng: Random, method: MethodDescriptor, info: common_pb2.ModelInfo) -> list[bytes]:
    """The messages of one call."""
    meant = well_formed(f"{method.containing_service.name}.{method.name}", info) or well_formed(method.name, info)
    data = [message.SerializeToString() for message in meant]
    anything = [random_message(rng, method.input_type).SerializeToString() for _ in range(4)]
    if not method.client_streaming:
        return [mangled(rng, rng.choice(data * 4 + anything))]
    count = rng.randrange(1, 8)
    if not data or not rng.randrange(4):
        return [mangled(rng, rng.choice(data + anything)) for _ in range(count)]
    if not rng.randrange(3):
        data[0] = mangled(rng, data[0])
    rest = [mangled(rng, rng.choice(data + anything)) for _ in range(count)]
    return [*data[: rng.randrange(1, len(data) + 1)], *rest]


async def call(channel: Any, method: MethodDescriptor, messages: list[bytes]) -> grpc.StatusCode | None:
    """The call's status. None if it takes longer than PATIENCE_S, or if it had ended before we wrote a message."""
    path = f"/{method.containing_service.full_name}/{method.name}"

    async def requests() -> AsyncIterator[bytes]:
        for message in messages:
            yield message
            await asyncio.sleep(0.002)

    asked = channel.stream_stream(path)(requests() if method.client_streaming else _one(messages[0]))
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for _ in asked:
                pass
    except TimeoutError:
        asked.cancel()
        return None
    except grpc.aio.AioRpcError as error:
        return None if error.details() == "Internal error from Core" else error.code()
    return grpc.StatusCode.OK


async def _one(message: bytes) -> AsyncIterator[bytes]:
    yield message


async def fuzz(stack: Stack, server: str, method: MethodDescriptor, info: common_pb2.ModelInfo) -> None:
    rng = Random(zlib.crc32(f"{server} {method.full_name}".encode()))
    async with open_channel(target(stack, server)) as channel:
        left = iter([draw(rng, method, info) for _ in range(STREAMS if method.client_streaming else UNARY_CALLS)])

        async def send() -> None:
            for messages in left:
                status = await call(channel, method, messages)
                assert status not in OURS, (server, method.full_name, status, messages)

        await asyncio.gather(*(send() for _ in range(AT_ONCE)))
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert health.status == health_pb2.HealthCheckResponse.SERVING


async def clean_up(stack: Stack) -> None:
    """A random message may be a valid admin call: undo its changes of the policy and of pins."""
    async with open_channel(stack.scheduler) as channel:
        await admin_pb2_grpc.AdminServiceStub(channel).SetPolicy(admin_pb2.SetPolicyRequest())
    async with open_channel(target(stack, "cache")) as channel:
        admin = cache_pb2_grpc.CacheAdminServiceStub(channel)
        for pin in (await admin.ListPins(cache_pb2.ListPinsRequest())).pins:
            await admin.UnpinPrefix(cache_pb2.UnpinPrefixRequest(name=pin.name))


async def tokens(stack: Stack) -> list[int]:
    """The tokens of a greedy request."""
    async with open_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=PROMPT),
            sampling=inference_pb2.SamplingOptions(max_tokens=12, temperature=0, ignore_eos=True),
        )
        answer = InferenceServiceStub(channel).Generate(request, timeout=60)
        return [token async for response in answer for token in response.token_ids]


def resident(stack: Stack) -> dict[str, int]:
    return {name: psutil.Process(process.pid).memory_info().rss for name, process in stack.processes.items()}


@pytest.mark.parametrize("server", SERVERS)
async def test_random_messages_to_every_method_do_no_harm(stack: Stack, server: str) -> None:
    right, before = await tokens(stack), resident(stack)
    info = await model(stack)
    async with open_channel(target(stack, server)) as channel:
        found = await methods(channel)
    for method in found:
        await fuzz(stack, server, method, info)
        await clean_up(stack)
        assert await tokens(stack) == right, method.full_name
    assert all(process.poll() is None for process in stack.processes.values()), stack.logs()
    answer = await asyncio.to_thread(httpx.get, f"{stack.url}/health", trust_env=False, timeout=60)
    assert answer.status_code == 200
    await asyncio.to_thread(stack.wait_ready)
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_workers", 1)
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_requests_running", 0)
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0)
    grown = {name: size - before[name] for name, size in resident(stack).items()}
    assert max(grown.values()) < MAX_GROWTH_BYTES, grown


@pytest.mark.parametrize("server", SERVERS)
async def test_odd_calls_get_the_right_grpc_status(stack: Stack, server: str) -> None:
    """An unknown method, 1 MiB of metadata, a deadline in the past or far in the future, a message that is too large,
    and bytes that are no message."""
    right = await tokens(stack)
    async with open_channel(target(stack, server), [("grpc.max_send_message_length", -1)]) as channel:
        check = "/grpc.health.v1.Health/Check"
        cases = [
            ("/paceline.v1.Nothing/Nowhere", b"", (), 60.0, grpc.StatusCode.UNIMPLEMENTED),
            (check, b"", (), -1.0, grpc.StatusCode.DEADLINE_EXCEEDED),
            (check, b"", (), 1e9, grpc.StatusCode.OK),
            (check, b"", (("x", "y" * 2**20),), 60.0, grpc.StatusCode.RESOURCE_EXHAUSTED),
            (check, bytes(MAX_MESSAGE_BYTES + 1), (), 60.0, grpc.StatusCode.RESOURCE_EXHAUSTED),
            (check, b"\xff" * 9, (), 60.0, grpc.StatusCode.INVALID_ARGUMENT),
        ]
        for path, message, metadata, timeout_s, status in cases:
            answer = untyped(channel).unary_unary(path)(message, metadata=metadata, timeout=timeout_s)
            assert await answer.code() is status, (path, len(message), timeout_s)
    assert await tokens(stack) == right


@pytest.mark.parametrize("server", SERVERS)
async def test_floods_of_resets_and_reflection_requests_do_no_harm(stack: Stack, server: str) -> None:
    """Streams that are opened and reset at once (RST_STREAM), and 1,000 reflection requests on one stream."""
    right, before = await tokens(stack), resident(stack)
    async with open_channel(target(stack, server)) as channel:
        found = await methods(channel)
        for method in (method for method in found if method.server_streaming):
            path = f"/{method.containing_service.full_name}/{method.name}"
            for _ in range(NUM_RESETS // AT_ONCE):
                calls = [untyped(channel).stream_stream(path)() for _ in range(AT_ONCE)]
                await asyncio.sleep(0)  # sends the calls
                for opened in calls:
                    opened.cancel()
    # A new connection: the resets have damaged the client's end of the other one.
    async with grpc.aio.insecure_channel(target(stack, server)) as channel:
        ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol=found[-1].full_name)
        flood = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask] * NUM_QUESTIONS))
        async with asyncio.timeout(60):
            assert len([answer async for answer in flood]) == NUM_QUESTIONS
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert await tokens(stack) == right
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0)
    grown = {name: size - before[name] for name, size in resident(stack).items()}
    assert max(grown.values()) < MAX_GROWTH_BYTES, grown
