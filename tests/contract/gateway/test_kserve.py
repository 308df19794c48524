"""The Open Inference Protocol over a gateway, with generated stubs. tests/e2e/test_outside_routers.py uses Triton's
client."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import orjson
import pytest

from paceline.third_party import kserve_inference_pb2 as pb
from paceline.third_party.kserve_inference_pb2_grpc import GRPCInferenceServiceStub
from services.gateway.errors import ApiError
from services.gateway.grpc import kserve
from services.gateway.grpc.kserve_tensors import read_inputs
from tests.contract.gateway.conftest import MODEL, Running, Start, eventually, until


def stub(running: Running) -> Any:
    return GRPCInferenceServiceStub(grpc.aio.insecure_channel(running.addresses.grpc or ""))


def tensor(name: str, datatype: str, data: Any) -> tuple[Any, bytes]:
    if datatype == "BYTES":
        raw, count = len(data).to_bytes(4, "little") + data, 1
    else:
        dtype = {"BOOL": "?", "INT32": "<i4", "INT64": "<i8", "FP32": "<f4"}[datatype]
        raw, count = np.asarray(data, dtype).tobytes(), len(data)
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[count]), raw


def request(*tensors: tuple[Any, bytes], model: str = MODEL, **fields: Any) -> pb.ModelInferRequest:
    raw = [data for _, data in tensors]
    inputs = [each for each, _ in tensors]
    return pb.ModelInferRequest(
        **{"model_name": model, "id": "q", "inputs": inputs, "raw_input_contents": raw, **fields}
    )


TEXT = tensor("text_input", "BYTES", b"once")
STREAM = tensor("stream", "BOOL", [True])


def parameters(**values: Any) -> tuple[Any, bytes]:
    return tensor("sampling_parameters", "BYTES", orjson.dumps(values))


SHORT = parameters(max_tokens=6, temperature=0)


def outputs(response: pb.ModelInferResponse) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        found[output.name] = raw[4:].decode() if output.datatype == "BYTES" else np.frombuffer(raw, "<i4").tolist()
    return found


async def stream(running: Running, *requests: pb.ModelInferRequest) -> list[pb.ModelStreamInferResponse]:
    async def asked() -> AsyncIterator[pb.ModelInferRequest]:
        for one in requests:
            yield one

    return [response async for response in stub(running).ModelStreamInfer(asked())]


async def test_a_text_prompt_gets_the_text_of_the_openai_api(running: Running) -> None:
    expected = await running.openai.completions.create(model=MODEL, prompt="once", max_tokens=6, temperature=0)
    found = outputs(answer := await stub(running).ModelInfer(request(TEXT, SHORT)))
    assert (found["text_output"], found["finish_reason"]) == (expected.choices[0].text, "length")
    assert len(found["output_ids"]) == 6
    assert (answer.id, answer.model_name, answer.model_version) == ("q", MODEL, "1")
    ids = await stub(running).ModelInfer(request(tensor("input_ids", "INT64", [7, 8, 9]), SHORT))
    assert len(outputs(ids)["output_ids"]) == 6


async def test_inputs_in_contents_take_effect_and_so_do_parameters_and_named_outputs(running: Running) -> None:
    typed = pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1, 1])
    typed.contents.bytes_contents.append(b"once")
    with_prompt = pb.ModelInferRequest.InferInputTensor(name="exclude_input_in_output", datatype="BOOL", shape=[1])
    with_prompt.contents.bool_contents.append(False)
    asked = pb.ModelInferRequest(
        model_name=MODEL,
        inputs=[typed, with_prompt],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="text_output")],
    )
    asked.parameters["max_tokens"].int64_param = 6
    asked.parameters["temperature"].double_param = 0.0
    asked.parameters["priority"].uint64_param = 3
    asked.parameters["timeout"].int64_param = 5_000_000
    found = outputs(await stub(running).ModelInfer(asked))
    assert set(found) == {"text_output"}
    assert found["text_output"].startswith("once")
    [submission] = running.scheduler.submissions
    assert (submission.priority, submission.deadline_s) == (-3.0, 5.0)


async def test_fields_that_completions_ignore_are_ignored(running: Running) -> None:
    [answer] = await stream(running, request(TEXT, parameters(store=True, metadata={"a": "b"}, max_tokens=2)))
    assert not answer.error_message
    [answer] = await stream(running, request(TEXT, parameters(store="yes")))
    assert "store: must be of the type boolean" in answer.error_message


async def test_a_stream_has_a_response_for_each_piece(start: Start) -> None:
    running = await start(step_s=0.01)
    whole = outputs(await stub(running).ModelInfer(request(TEXT, SHORT)))
    responses = await stream(running, request(TEXT, SHORT, STREAM), request(TEXT, SHORT, id="whole"))
    assert not any(response.error_message for response in responses)
    parts = [response.infer_response for response in responses if response.infer_response.id == "q"]
    assert len(parts) > 2
    assert "".join(outputs(part)["text_output"] for part in parts) == whole["text_output"]
    assert [token for part in parts for token in outputs(part)["output_ids"]] == whole["output_ids"]
    finals = [part.parameters["triton_final_response"].bool_param for part in parts]
    assert finals == [False] * (len(parts) - 1) + [True]
    [other] = [response.infer_response for response in responses if response.infer_response.id == "whole"]
    assert outputs(other) == whole


async def test_an_error_ends_its_request_and_not_the_stream(running: Running) -> None:
    bad, good = await stream(running, request(TEXT, parameters(max_tokens=-1), id="bad"), request(TEXT, SHORT))
    assert "max_tokens" in bad.error_message
    assert bad.infer_response.id == "bad"
    assert outputs(good.infer_response)["finish_reason"] == "length"


async def test_a_bug_ends_its_request_and_not_the_stream(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise TypeError("a bug")

    monkeypatch.setattr(kserve, "read_inputs", fail)
    [failed] = await stream(running, request(TEXT, SHORT))
    assert "internal error" in failed.error_message
    assert failed.infer_response.id == "q"


async def test_a_client_that_leaves_ends_its_requests(start: Start) -> None:
    running = await start(step_s=0.01)
    call = stub(running).ModelStreamInfer()
    for _ in range(3):
        await call.write(request(TEXT, parameters(max_tokens=1500), STREAM))
    await call.read()
    assert running.scheduler.num_running == 3
    call.cancel()
    await until(lambda: not running.scheduler.num_running)


async def test_the_number_of_streams_is_limited(start: Start) -> None:
    running = await start(settings={"max_body_bytes": 2**20, "max_bodies_bytes": 2 * 2**20})
    first, second = (stub(running).ModelStreamInfer() for _ in range(2))
    for call in (first, second):
        await call.write(request(TEXT, SHORT))
        assert not (await call.read()).error_message
    with pytest.raises(grpc.aio.AioRpcError, match="2 streams are open already"):
        await stub(running).ModelStreamInfer().read()
    first.cancel()

    async def served() -> bool:
        try:
            return not (await stream(running, request(TEXT, SHORT)))[0].error_message
        except grpc.aio.AioRpcError:
            return False

    await eventually(served)
    second.cancel()


async def test_a_client_gets_the_state_and_metadata_of_the_server(running: Running) -> None:
    server = stub(running)
    assert (await server.ServerLive(pb.ServerLiveRequest())).live
    assert (await server.ServerReady(pb.ServerReadyRequest())).ready
    assert (await server.ModelReady(pb.ModelReadyRequest(name=MODEL))).ready
    assert not (await server.ModelReady(pb.ModelReadyRequest(name="other"))).ready
    assert (await server.ServerMetadata(pb.ServerMetadataRequest())).name == "paceline"
    metadata = await server.ModelMetadata(pb.ModelMetadataRequest(name=MODEL, version="1"))
    assert {each.name for each in metadata.inputs} >= {"text_input", "sampling_parameters", "stream"}
    assert {each.name for each in metadata.outputs} == {"text_output", "output_ids", "finish_reason"}
    for unknown in (pb.ModelMetadataRequest(name="other"), pb.ModelMetadataRequest(name=MODEL, version="2")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.ModelMetadata(unknown)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (request(), "text_input or input_ids"),
        (request(TEXT, tensor("input_ids", "INT32", [1])), "text_input or input_ids"),
        (request(TEXT, TEXT), "text_input is given twice"),
        (request(tensor("image", "BYTES", b"x")), "'image'"),
        (request(tensor("text_input", "INT32", [1])), "text_input must be of type BYTES"),
        (request(tensor("input_ids", "FP32", [1.0])), "input_ids must be of type INT32"),
        (request(tensor("input_ids", "INT32", [-1])), "input_ids"),
        (request(tensor("input_ids", "INT32", [7] * 3000)), "input_ids"),
        (request((TEXT[0], b"\x09\0\0\0once")), "text_input must be 1 element"),
        (request((TEXT[0], b"\x02\0\0\0\xff\xfe")), "text_input is not UTF-8"),
        (request(TEXT, raw_input_contents=[]), "text_input must have 1 element, not 0"),
        (request(TEXT, raw_input_contents=[b"", b""]), "raw_input_contents has 2 entries"),
        (
            request((pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[2]), TEXT[1])),
            "shape",
        ),
        (request(TEXT, STREAM), "stream"),
        (request(TEXT, tensor("sampling_parameters", "BYTES", b"{")), "sampling_parameters is not JSON"),
        (request(TEXT, tensor("sampling_parameters", "BYTES", b"[]")), "sampling_parameters must be a JSON object"),
        (request(TEXT, parameters(logprobs=1)), "'logprobs'"),
        (request(TEXT, parameters(nonsense=1)), "'nonsense'"),
        (request(TEXT, parameters(top_p=2)), "top_p"),
        (request(TEXT, parameters(**{f"p{i}": 1 for i in range(257)})), "sampling_parameters has 257 entries"),
        (request(TEXT, parameters(top_k="a")), "top_k"),
        (request(TEXT, SHORT, parameters={"max_tokens": pb.InferParameter(int64_param=3)}), "given twice"),
        (request(TEXT, parameters={"timeout": pb.InferParameter(string_param="5")}), "timeout"),
        (request(TEXT, outputs=[{"name": "x"}]), "'x'"),
    ],
)
async def test_bad_input_is_refused_by_name(running: Running, asked: pb.ModelInferRequest, named: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(running).ModelInfer(asked)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert named in (caught.value.details() or "")
    assert not running.scheduler.submissions


@pytest.mark.parametrize("field", ["inputs", "outputs", "parameters"])
async def test_a_list_of_a_million_entries_is_refused_before_a_loop_over_them(start: Start, field: str) -> None:
    running = await start(settings={"max_body_bytes": 16 * 2**20})
    many = pb.ModelInferRequest(model_name=MODEL)
    if field == "parameters":
        for number in range(1_000_000):
            many.parameters[f"{number}"].int64_param = 1
    else:
        many.MergeFromString(many.SerializeToString() + (b"\x2a\0" if field == "inputs" else b"\x32\0") * 1_000_000)
    assert len(getattr(many, field)) == 1_000_000
    with pytest.raises(grpc.aio.AioRpcError, match=f"{field} has 1000000 entries; at most"):
        await stub(running).ModelInfer(many)
    began_s = time.perf_counter()
    with pytest.raises(ApiError):
        read_inputs(many, 100)
    assert time.perf_counter() - began_s < 0.05


async def test_another_model_or_version_is_not_found(running: Running) -> None:
    for asked in (request(TEXT, model="other"), request(TEXT, model_version="2")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(running).ModelInfer(asked)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
