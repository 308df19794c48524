"""Each sampling parameter reaches the worker, and each metadata field reaches the scheduler.

If a layer on this way lacks a field, a test here fails.
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from gpu_worker.sampling import filters
from gpu_worker.sampling.logits_processors import read_logits_options
from gpu_worker.sampling.processors import penalise
from gpu_worker.steps.slots import SlotBuffers, SlotLimits
from paceline import request_fields
from paceline.request_fields import FILTER_NAMES, METADATA, PENALTY_NAMES, SAMPLING, MetadataField, SamplingParam
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.inference_pb2 import EmbedRequest, GenerateRequest, SamplingOptions, Submission
from paceline.v1.worker_pb2 import NewSequence, StepPlan
from scheduler_svc.core.admission.validation import new_request
from scheduler_svc.generate import to_submission
from services.client.types import make_request
from services.gateway.engine.request import RequestBuilder, check_metadata
from services.gateway.engine.sampling import FieldNames, sampling_params
from services.gateway.grpc.inference_service import _choices
from services.gateway.openai import schema
from services.gateway.text.id_tokenizer import IdTokenizer
from services.gateway.text.model_files import ModelFiles

DOCS = Path(__file__).parents[2] / "docs"
FILES = ModelFiles(Path(), 50, 50, frozenset())
BUILDER = RequestBuilder(IdTokenizer(50), FILES)
LIMITS = SlotLimits(4, 16, 64, 4, 16, 50, ())
KINDS = {
    float: FieldDescriptor.CPPTYPE_FLOAT,
    int: FieldDescriptor.CPPTYPE_INT32,
    str: FieldDescriptor.CPPTYPE_STRING,
    bool: FieldDescriptor.CPPTYPE_BOOL,
}
METADATA_VALUES: dict[type, float | str | bool] = {float: 2.5, str: "x", bool: True}
each_param = pytest.mark.parametrize("param", SAMPLING.values(), ids=lambda param: param.name)
each_field = pytest.mark.parametrize("field", METADATA.values(), ids=lambda field: field.name)


def legal_value(param: SamplingParam) -> float:
    """Not the default, and exact in 32 bits."""
    return param.kind(0.5 if param.high == param.default else param.high)


@each_param
def test_a_parameter_has_a_field_of_its_type_in_both_messages(param: SamplingParam) -> None:
    for message in (SamplingOptions, SamplingParams):
        assert message.DESCRIPTOR.fields_by_name[param.name].cpp_type == KINDS[param.kind]
    assert SamplingOptions.DESCRIPTOR.fields_by_name[param.name].has_presence, "0 is not the same as not given"


@each_param
def test_a_parameter_travels_from_the_client_to_the_worker(param: SamplingParam) -> None:
    """Over HTTP, over gRPC, and through the scheduler's own Generate."""
    value = legal_value(param)
    given: Any = {param.name: value}
    request = make_request(None, None, [1], "", given)
    body = schema.parse(schema.CompletionRequest, {"prompt": [1], **given}, 50)
    for choices in (body.sampling(), _choices(request.sampling)):
        sampling = sampling_params(choices, FILES, BUILDER, FieldNames())
        assert getattr(sampling, param.name) == value
    submission = to_submission(request, None)
    assert getattr(submission.sampling, param.name) == value
    received = new_request("s", submission, 0.0).sampling
    if param.processor == "penalty":
        options = read_logits_options(received, 50)
        assert options is not None
        assert dict(zip(PENALTY_NAMES, options.penalties, strict=True))[param.name] == value
    else:
        slots = SlotBuffers(LIMITS)
        new = NewSequence(slot=2, token_ids=bytes(4), num_prompt_tokens=1, block_table=b"\1\0\0\0", sampling=received)
        plan = StepPlan(step=1, new_sequences=[new], prefill_slots=b"\2\0\0\0", prefill_tokens=b"\1\0\0\0")
        rows = slots.sampling_rows(slots.apply(plan))
        assert rows.columns[param.name] == [value]


@each_param
def test_a_parameter_that_is_not_given_has_its_default(param: SamplingParam) -> None:
    body = schema.parse(schema.CompletionRequest, {"prompt": [1]}, 50)
    for sampling in (
        sampling_params(body.sampling(), FILES, BUILDER, FieldNames()),
        to_submission(make_request(None, None, [1], "", {}), None).sampling,
    ):
        assert param.from_wire(getattr(sampling, param.name)) == param.default


def test_the_worker_can_apply_each_parameter() -> None:
    assert filters.FILTERS.keys() == set(FILTER_NAMES)
    assert set(PENALTY_NAMES) < inspect.signature(penalise).parameters.keys()


@each_field
def test_metadata_has_a_field_of_its_type_in_all_messages(field: MetadataField) -> None:
    for message in (EmbedRequest, GenerateRequest, Submission):
        assert message.DESCRIPTOR.fields_by_name[field.name].cpp_type == KINDS[field.kind]


@each_field
def test_metadata_travels_from_the_client_to_the_scheduler(field: MetadataField) -> None:
    value = METADATA_VALUES[field.kind]
    given: Any = {field.name: value}
    request = make_request(None, None, [1], "", given)
    submissions = [
        schema.parse(schema.CompletionRequest, {"prompt": [1], **given}, 50).metadata(),
        check_metadata({name: getattr(request, name) or None for name in METADATA}),
        to_submission(request, None),
    ]
    for submission in submissions:
        assert getattr(submission, field.name) == value
        assert getattr(new_request("s", submission, 0.0).metadata, field.name) == value


def test_the_docs_show_the_rows_of_the_table() -> None:
    """Print them with: python -c 'from paceline.request_fields import docs_rows; print(docs_rows())'"""
    assert f"\n{request_fields.docs_rows()}\n" in (DOCS / "sampling.md").read_text("utf-8")


def test_the_table_imports_only_the_standard_library() -> None:
    """The scheduler's core may import it."""
    tree = ast.parse(inspect.getsource(request_fields))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names
