"""Tensors of the Open Inference Protocol: inputs to Python values, and outputs to tensors. Knows no socket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from paceline.third_party import kserve_inference_pb2 as pb
from services.gateway.errors import invalid

MAX_PARAMETERS_BYTES = 2**20  # characters of sampling_parameters
# Entries of a request's lists, checked before any loop over them: 1,000,000 outputs took the event loop 1.5 s. This
# server knows fewer than 100 parameters, 5 inputs and 3 outputs.
MAX_PARAMETERS, MAX_TENSORS = 256, 16
_TYPES: dict[str, tuple[Any, str]] = {
    "BOOL": (np.dtype("?"), "bool_contents"),
    "INT32": (np.dtype("<i4"), "int_contents"),
    "INT64": (np.dtype("<i8"), "int64_contents"),
    "UINT32": (np.dtype("<u4"), "uint_contents"),
    "UINT64": (np.dtype("<u8"), "uint64_contents"),
}
_TOKEN_TYPES = ("INT32", "INT64", "UINT32", "UINT64")
# Name, data type and shape. The text inputs and outputs are those of Triton's vLLM backend.
INPUTS = (
    ("text_input", "BYTES", (1,)),
    ("input_ids", "INT32", (-1,)),
    ("sampling_parameters", "BYTES", (1,)),
    ("stream", "BOOL", (1,)),
    ("exclude_input_in_output", "BOOL", (1,)),
)
OUTPUTS = (("text_output", "BYTES", (1,)), ("output_ids", "INT32", (-1,)), ("finish_reason", "BYTES", (1,)))
_OUTPUT_NAMES = frozenset(name for name, _, _ in OUTPUTS)
_NUMBERS = ("int64_param", "uint64_param", "double_param")  # kinds of parameters
# The parameter that tritonclient sends for its argument `enable_empty_final_response`.
_EMPTY_FINAL = "triton_enable_empty_final_response"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one request. `prompt`: a text or token ids; `prompt_name`: the input that has it."""

    prompt: str | Sequence[int]
    prompt_name: str
    parameters: dict[str, Any]  # sampling parameters and metadata, by the names of the HTTP API
    stream: bool
    with_prompt: bool  # the text begins with the prompt
    outputs: frozenset[str]


def read_inputs(request: pb.ModelInferRequest, max_tokens: int) -> Inputs:
    """Decode the inputs. `max_tokens`: the longest list of token ids. Raises ApiError 400 that names the input."""
    for field, most in (("inputs", MAX_TENSORS), ("outputs", MAX_TENSORS), ("parameters", MAX_PARAMETERS)):
        _check_length(field, len(getattr(request, field)), most)
    values = _values(request, max_tokens)
    if ("text_input" in values) == ("input_ids" in values):
        raise invalid("inputs", "inputs: give either text_input or input_ids")
    name = "text_input" if "text_input" in values else "input_ids"
    with_prompt = values.get("exclude_input_in_output") is False
    if with_prompt and name == "input_ids":
        raise invalid("exclude_input_in_output", "exclude_input_in_output: false is only possible with text_input")
    return Inputs(
        prompt=values[name],
        prompt_name=name,
        parameters=_parameters(values.get("sampling_parameters", ""), request.parameters),
        stream=values.get("stream", False),
        with_prompt=with_prompt,
        outputs=_requested(request),
    )


def response(
    request_id: str, model: str, outputs: frozenset[str], text: str, token_ids: Sequence[int], finish_reason: str
) -> pb.ModelInferResponse:
    """An answer, or a part of it. `finish_reason` is empty until the last part."""
    message = pb.ModelInferResponse(model_name=model, model_version="1", id=request_id)
    raw = {
        "text_output": _text_bytes(text),
        "output_ids": np.asarray(token_ids, "<i4").tobytes(),
        "finish_reason": _text_bytes(finish_reason),
    }
    for name, datatype, shape in OUTPUTS:
        if name in outputs:
            message.outputs.add(name=name, datatype=datatype, shape=[len(token_ids) if n < 0 else n for n in shape])
            message.raw_output_contents.append(raw[name])
    message.parameters["triton_final_response"].bool_param = bool(finish_reason)
    return message


def _check_length(field: str, count: int, most: int) -> None:
    if count > most:
        raise invalid(field, f"{field} has {count} entries; at most {most} are possible")


def _requested(request: pb.ModelInferRequest) -> frozenset[str]:
    names = {output.name for output in request.outputs}
    if unknown := sorted(names - _OUTPUT_NAMES):
        raise invalid("outputs", f"outputs: there is no output {unknown[0][:80]!r}")
    return frozenset(names) or _OUTPUT_NAMES


def _values(request: pb.ModelInferRequest, max_tokens: int) -> dict[str, Any]:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise invalid(
            "raw_input_contents", f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs"
        )
    known = {name for name, _, _ in INPUTS}
    values: dict[str, Any] = {}
    for i, tensor in enumerate(request.inputs):
        name = tensor.name
        if name not in known:
            raise invalid("inputs", f"inputs: there is no input {name[:80]!r}")
        if name in values:
            raise invalid("inputs", f"inputs: {name} is given twice")
        elements = _elements(tensor, raw[i] if raw else None, max_tokens)
        values[name] = elements if name == "input_ids" else elements[0]
    return values


def _elements(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None, max_tokens: int) -> list[Any]:
    name, datatype = tensor.name, tensor.datatype
    wanted = _TOKEN_TYPES if name == "input_ids" else tuple(kind for other, kind, _ in INPUTS if other == name)
    if datatype not in wanted:
        raise invalid(name, f"{name} must be of type {' or '.join(wanted)}, not {datatype[:20]!r}")
    most = max_tokens if name == "input_ids" else 1
    elements: list[Any]
    if datatype == "BYTES":
        elements = [_text(name, raw, tensor.contents.bytes_contents)]
    else:
        dtype, contents = _TYPES[datatype]
        if raw is not None and len(raw) % dtype.itemsize:
            raise invalid(name, f"{name} has {len(raw)} bytes, which is no multiple of {dtype.itemsize}")
        given = getattr(tensor.contents, contents)
        count = len(given) if raw is None else len(raw) // dtype.itemsize
        if count > most:
            raise invalid(name, f"{name} has {count} elements; at most {most} are possible")
        elements = list(given) if raw is None else np.frombuffer(raw, dtype).tolist()
    count = len(elements)
    if name != "input_ids" and count != 1:
        raise invalid(name, f"{name} must have 1 element, not {count}")
    if len(tensor.shape) > 2 or any(n < 0 for n in tensor.shape) or _product(tensor.shape) != count:
        raise invalid(name, f"{name} has {count} elements, which is not its shape {list(tensor.shape[:4])}")
    return elements


def _product(shape: Sequence[int]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product


def _text(name: str, raw: bytes | None, contents: Sequence[bytes]) -> str:
    if raw is None:
        if len(contents) != 1:
            raise invalid(name, f"{name} must have 1 element, not {len(contents)}")
        [data] = contents
    else:
        if len(raw) < 4 or int.from_bytes(raw[:4], "little") != len(raw) - 4:
            raise invalid(name, f"{name} must be 1 element: 4 bytes with its length, then its bytes")
        data = raw[4:]
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise invalid(name, f"{name} is not UTF-8") from None


def _text_bytes(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "little") + data


def _parameters(text: str, given: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """The sampling parameters: a JSON object in the input of that name, and the request's own parameters."""
    if len(text) > MAX_PARAMETERS_BYTES:
        raise invalid("sampling_parameters", f"sampling_parameters has more than {MAX_PARAMETERS_BYTES} characters")
    try:
        parameters = orjson.loads(text) if text else {}
    except orjson.JSONDecodeError as error:
        raise invalid("sampling_parameters", f"sampling_parameters is not JSON: {error}") from None
    if not isinstance(parameters, dict):
        raise invalid("sampling_parameters", "sampling_parameters must be a JSON object")
    _check_length("sampling_parameters", len(parameters), MAX_PARAMETERS)
    for name, parameter in given.items():
        if name == _EMPTY_FINAL:  # a final response here is never empty: it has the finish reason
            continue
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise invalid("parameters", f"parameters: {name[:80]!r} has no value")
        value = getattr(parameter, kind)
        if name == "timeout":  # tritonclient's: microseconds
            if kind not in _NUMBERS:
                raise invalid("timeout", "timeout must be a number of microseconds")
            name, value = "deadline_s", value / 1e6
        elif name == "priority" and kind in ("uint64_param", "int64_param"):
            value = -float(value)  # Triton's: a smaller number is more urgent
        if name in parameters:
            raise invalid("parameters", f"parameters: {name[:80]!r} is given twice")
        parameters[name] = value
    return parameters
