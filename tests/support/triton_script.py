"""Runs in the environment of tritonclient: talks to a gateway, and prints what it got as JSON.

Arguments: host:port of the gateway, and the model's name.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton  # type: ignore[import-not-found]
from tritonclient.utils import InferenceServerException  # type: ignore[import-not-found]


def text(name: str, value: str) -> Any:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], object))
    return tensor


def flag(name: str, value: bool) -> Any:
    tensor = triton.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def main(target: str, model: str) -> None:
    client = triton.InferenceServerClient(target)
    found: dict[str, Any] = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(model),
        "other_ready": client.is_model_ready("other"),
        "server": client.get_server_metadata(as_json=True),
        "model": client.get_model_metadata(model, as_json=True),
    }
    sampling = json.dumps({"max_tokens": 12, "temperature": 0})
    inputs = [text("text_input", "Once there was"), text("sampling_parameters", sampling)]
    whole = client.infer(model, inputs, request_id="q", outputs=[triton.InferRequestedOutput("text_output")])
    found["whole"] = whole.as_numpy("text_output")[0].decode()
    by_parameters = client.infer(model, inputs[:1], parameters={"max_tokens": 12, "temperature": 0.0})
    found["by_parameters"] = by_parameters.as_numpy("text_output")[0].decode()
    found["output_ids"] = by_parameters.as_numpy("output_ids").tolist()
    ids = triton.InferInput("input_ids", [3], "INT32")
    ids.set_data_from_numpy(np.array([7, 8, 9], np.int32))
    found["from_ids"] = client.infer(model, [ids, inputs[1]]).as_numpy("output_ids").tolist()

    results: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: results.put((result, error)))
    client.async_stream_infer(model, [*inputs, flag("stream", True)], request_id="s", enable_empty_final_response=True)
    pieces = []
    while True:
        result, error = results.get(timeout=60)
        assert error is None, error
        answer = result.get_response()
        pieces.append(result.as_numpy("text_output")[0].decode())
        if answer.parameters["triton_final_response"].bool_param:
            break
    found["pieces"] = pieces
    client.async_stream_infer(model, inputs[1:], request_id="bad")
    found["stream_error"] = str(results.get(timeout=60)[1])
    client.stop_stream()
    try:
        client.infer(model, inputs, parameters={"top_p": 2.0})
    except InferenceServerException as refusal:
        found["refusal"] = [refusal.status(), refusal.message()]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
