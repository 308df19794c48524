"""Triton's gRPC client: the Open Inference Protocol v2."""

from __future__ import annotations

import json
import os
import queue
import urllib.request
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from checks import MODEL, URL, run
from tritonclient.utils import InferenceServerException

PROMPT = "Once there was"
client = triton.InferenceServerClient(os.environ["PACELINE_GRPC"])


def text(name: str, value: str) -> Any:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], object))
    return tensor


def flag(name: str, value: bool) -> Any:
    tensor = triton.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


inputs = [text("text_input", PROMPT), text("sampling_parameters", json.dumps({"max_tokens": 12, "temperature": 0}))]


def expected() -> str:
    """The text of the same request over HTTP."""
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{URL}/v1/completions", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: str = json.load(answer)["choices"][0]["text"]
        return found


def healths() -> None:
    said = client.is_server_live(), client.is_server_ready(), client.is_model_ready(MODEL), client.is_model_ready("x")
    assert said == (True, True, True, False), said


def metadata() -> None:
    assert client.get_server_metadata(as_json=True)["name"] == "paceline"
    names = {each["name"] for each in client.get_model_metadata(MODEL, as_json=True)["inputs"]}
    assert names >= {"text_input", "sampling_parameters"}, names


def infers() -> None:
    answer = client.infer(MODEL, inputs, request_id="q", outputs=[triton.InferRequestedOutput("text_output")])
    assert answer.as_numpy("text_output")[0].decode() == expected()


def parameters() -> None:
    answer = client.infer(MODEL, inputs[:1], parameters={"max_tokens": 12, "temperature": 0.0})
    assert answer.as_numpy("text_output")[0].decode() == expected()
    assert len(answer.as_numpy("output_ids")) == 12


def token_ids() -> None:
    ids = triton.InferInput("input_ids", [3], "INT32")
    ids.set_data_from_numpy(np.array([7, 8, 9], np.int32))
    assert len(client.infer(MODEL, [ids, inputs[1]]).as_numpy("output_ids")) == 12


def streams() -> None:
    results: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: results.put((result, error)))
    client.async_stream_infer(MODEL, [*inputs, flag("stream", True)], request_id="s", enable_empty_final_response=True)
    pieces = []
    final = False
    while not final:
        result, error = results.get(timeout=60)
        assert error is None, error
        pieces.append(result.as_numpy("text_output")[0].decode())
        final = result.get_response().parameters["triton_final_response"].bool_param
    assert len(pieces) > 1
    assert "".join(pieces) == expected()
    client.async_stream_infer(MODEL, inputs[1:], request_id="bad")
    error = results.get(timeout=60)[1]
    assert "text_input or input_ids" in str(error), error
    client.stop_stream()


def errors() -> None:
    refusal = None
    try:
        client.infer(MODEL, inputs, parameters={"top_p": 2.0})
    except InferenceServerException as error:
        refusal = error
    assert refusal is not None
    assert refusal.status() == "StatusCode.INVALID_ARGUMENT", refusal.status()
    assert "top_p" in refusal.message(), refusal.message()


run(health=healths, metadata=metadata, infer=infers, parameters=parameters, token_ids=token_ids, stream=streams,
    error=errors)  # fmt: skip
