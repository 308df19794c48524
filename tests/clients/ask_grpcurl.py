"""grpcurl: it has no .proto file, and asks the server for its contracts by reflection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from checks import MODEL, run

TARGET = os.environ["PACELINE_GRPC"]
CONTRACTS = {
    "grpc.health.v1.Health",
    "inference.GRPCInferenceService",
    "paceline.v1.InferenceService",
    "sglang.grpc.scheduler.SglangScheduler",
    "vllm.grpc.engine.VllmEngine",
}


def grpcurl(*arguments: str, data: object = None) -> str:
    """Returns what grpcurl writes to stdout. If grpcurl fails, raises AssertionError with its stderr."""
    command = [str(Path(sys.executable).parent / "grpcurl"), "-plaintext", "-max-time", "60"]
    said = [] if data is None else ["-d", json.dumps(data)]
    done = subprocess.run(
        [*command, *said, TARGET, *arguments], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def messages(text: str) -> list[dict[str, Any]]:
    """The JSON objects that stand one after another in the text."""
    decoder, found, rest = json.JSONDecoder(), [], text.lstrip()
    while rest:
        message, end = decoder.raw_decode(rest)
        found.append(message)
        rest = rest[end:].lstrip()
    return found


def lists() -> None:
    found = set(grpcurl("list").split())
    assert found >= CONTRACTS, CONTRACTS - found


def describes() -> None:
    for contract in sorted(CONTRACTS):
        assert f"{contract} is a service" in grpcurl("describe", contract)
    assert "token_ids" in grpcurl("describe", "paceline.v1.GenerateRequest")


def healths() -> None:
    [answer] = messages(grpcurl("grpc.health.v1.Health/Check", data={}))
    assert answer == {"status": "SERVING"}, answer


def generates() -> None:
    asked = {"text": "Once there was", "model": MODEL, "sampling": {"max_tokens": 8, "temperature": 0}}
    answers = messages(grpcurl("paceline.v1.InferenceService/Generate", data=asked))
    assert "".join(answer.get("text", "") for answer in answers), answers
    assert sum(len(answer.get("token_ids", [])) for answer in answers) == 8, answers
    assert answers[-1]["finish_reason"] == "FINISH_REASON_LENGTH", answers[-1]


def infers() -> None:
    answer = grpcurl("inference.GRPCInferenceService/ModelMetadata", data={"name": MODEL})
    assert "text_input" in answer


def errors() -> None:
    asked = {"text": "a", "model": MODEL, "sampling": {"temperature": -1}}
    refused = ""
    try:
        grpcurl("paceline.v1.InferenceService/Generate", data=asked)
    except AssertionError as error:
        refused = str(error)
    assert "InvalidArgument" in refused, refused
    assert "temperature" in refused, refused


run(list=lists, describe=describes, health=healths, generate=generates, model_metadata=infers, error=errors)
