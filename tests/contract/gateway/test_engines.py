"""The contracts by which smg drives engines, over a gateway: vllm.grpc.engine and sglang.grpc.scheduler."""

from __future__ import annotations

import hashlib
import io
import zipfile
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.third_party import sglang_scheduler_pb2 as sglang
from paceline.third_party import smg_common_pb2 as smg
from paceline.third_party import vllm_engine_pb2 as vllm
from paceline.third_party.sglang_scheduler_pb2_grpc import SglangSchedulerStub
from paceline.third_party.vllm_engine_pb2_grpc import VllmEngineStub
from services.gateway.text.tokenizer import TextTokenizer
from tests.contract.gateway.conftest import MODEL, MODEL_INFO, Running, Start, eventually, until
from tests.contract.gateway.fake_scheduler import scripted
from tests.contract.gateway.test_openai import CHECKPOINT

PROMPT = [7, 8, 9]


def stub(kind: Any, running: Running) -> Any:
    return kind(grpc.aio.insecure_channel(running.addresses.grpc or ""))


def vllm_request(stream: bool = False, ids: list[int] = PROMPT, **params: Any) -> vllm.GenerateRequest:
    sampling = vllm.SamplingParams(**{"max_tokens": 6, "temperature": 0, **params})
    return vllm.GenerateRequest(
        request_id="r", tokenized=vllm.TokenizedInput(input_ids=ids), stream=stream, sampling_params=sampling
    )


def sglang_request(stream: bool = False, params: dict[str, Any] | None = None, **fields: Any) -> sglang.GenerateRequest:
    sampling = sglang.SamplingParams(**{"max_new_tokens": 6, **(params or {})})
    tokenized = sglang.TokenizedInput(input_ids=PROMPT)
    values = {"request_id": "r", "tokenized": tokenized, "stream": stream, "logprob_start_len": -1, **fields}
    return sglang.GenerateRequest(sampling_params=sampling, **values)


async def answers(call: Any) -> list[Any]:
    return [answer async for answer in call]


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(call)
    return caught.value


async def test_both_contracts_give_the_tokens_of_the_openai_api(running: Running) -> None:
    expected = await running.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0)
    [whole] = await answers(stub(VllmEngineStub, running).Generate(vllm_request()))
    ids = list(whole.complete.output_ids)
    assert TextTokenizer.from_folder(CHECKPOINT).decode(ids, skip_special_tokens=True) == expected.choices[0].text
    assert whole.complete.finish_reason == "length"
    assert (whole.complete.prompt_tokens, whole.complete.completion_tokens, whole.complete.cached_tokens) == (3, 6, 3)

    *chunks, last = await answers(stub(VllmEngineStub, running).Generate(vllm_request(stream=True)))
    assert [token for chunk in chunks for token in chunk.chunk.token_ids] == ids == list(last.complete.output_ids)
    assert sum(chunk.chunk.completion_tokens for chunk in chunks) == 6  # vLLM counts per chunk

    [whole] = await answers(stub(SglangSchedulerStub, running).Generate(sglang_request()))
    assert list(whole.complete.output_ids) == ids
    *chunks, last = await answers(stub(SglangSchedulerStub, running).Generate(sglang_request(stream=True)))
    assert [token for chunk in chunks for token in chunk.chunk.token_ids] == ids == list(last.complete.output_ids)
    assert chunks[-1].chunk.completion_tokens == 6  # SGLang counts from the start
    assert {answer.request_id for answer in chunks} == {"r"}


async def test_a_text_prompt_is_encoded_as_in_the_openai_api(running: Running) -> None:
    expected = await running.openai.completions.create(model=MODEL, prompt="once", max_tokens=6, temperature=0)
    request = vllm.GenerateRequest(text="once", sampling_params=vllm.SamplingParams(max_tokens=6, temperature=0))
    [whole] = await answers(stub(VllmEngineStub, running).Generate(request))
    assert expected.usage is not None
    assert whole.complete.prompt_tokens == expected.usage.prompt_tokens


async def test_several_samples_and_a_seed(running: Running) -> None:
    request = vllm_request(stream=True, temperature=1.0, seed=5, n=3)
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    complete = {}
    for answer in await answers(stub(VllmEngineStub, running).Generate(request)):
        if answer.WhichOneof("response") == "chunk":
            found[answer.chunk.index] += answer.chunk.token_ids
        else:
            complete[answer.complete.index] = list(answer.complete.output_ids)
    assert found == complete
    assert len({tuple(ids) for ids in found.values()}) == 3
    [again] = await answers(stub(VllmEngineStub, running).Generate(vllm_request(temperature=1.0, seed=5)))
    assert list(again.complete.output_ids) == found[0]


async def test_unset_numbers_are_neutral_and_not_the_models_defaults(running: Running) -> None:
    await answers(stub(VllmEngineStub, running).Generate(vllm_request(top_k=2**32 - 1)))
    await answers(stub(SglangSchedulerStub, running).Generate(sglang_request(params={"top_k": -1})))
    for submission in running.scheduler.submissions:
        sampling = submission.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 1.0, 0, 0.0)
        assert sampling.repetition_penalty == 0.0  # neutral on the wire


async def test_stop_strings_and_stop_tokens_are_named(start: Start) -> None:
    ids = TextTokenizer.from_folder(CHECKPOINT).encode("one two three four", add_special_tokens=False)
    running = await start(next_token=scripted(ids))
    [whole] = await answers(stub(VllmEngineStub, running).Generate(vllm_request(stop=["o thr"], max_tokens=50)))
    assert (whole.complete.finish_reason, whole.complete.matched_stop_str) == ("stop", "o thr")
    stopped = sglang_request(params={"stop": ["o thr"], "max_new_tokens": 50})
    [other] = await answers(stub(SglangSchedulerStub, running).Generate(stopped))
    assert other.complete.matched_stop_str == "o thr"
    assert list(other.complete.output_ids) == list(whole.complete.output_ids)
    of_both: list[tuple[Any, Any]] = [
        (vllm_request(stop_token_ids=[ids[1]], max_tokens=50), VllmEngineStub),
        (sglang_request(params={"stop_token_ids": [ids[1]], "max_new_tokens": 50}), SglangSchedulerStub),
    ]
    for wanted, kind in of_both:
        [whole] = await answers(stub(kind, running).Generate(wanted))
        assert (whole.complete.finish_reason, whole.complete.matched_token_id) == ("stop", ids[1])
        assert list(whole.complete.output_ids) == ids[:2]


async def test_log_probabilities(running: Running) -> None:
    [whole] = await answers(stub(VllmEngineStub, running).Generate(vllm_request(logprobs=2, prompt_logprobs=1)))
    output, prompt = whole.complete.output_logprobs, whole.complete.input_logprobs
    assert list(output.token_ids) == list(whole.complete.output_ids)
    assert len(output.token_logprobs) == 6
    assert [len(top.token_ids) for top in output.top_logprobs] == [2] * 6
    assert list(prompt.token_ids) == PROMPT
    assert [value.HasField("value") for value in prompt.token_logprobs] == [False, True, True]
    fields: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 1}
    [other] = await answers(stub(SglangSchedulerStub, running).Generate(sglang_request(**fields)))
    assert list(other.complete.output_logprobs.token_ids) == list(output.token_ids)
    assert list(other.complete.input_logprobs.token_ids) == PROMPT[1:]
    *chunks, last = await answers(stub(SglangSchedulerStub, running).Generate(sglang_request(stream=True, **fields)))
    streamed = [value for chunk in chunks for value in chunk.chunk.output_logprobs.token_logprobs]
    assert streamed == list(last.complete.output_logprobs.token_logprobs)
    assert len(streamed) == 6
    assert [chunk.chunk.HasField("input_logprobs") for chunk in chunks][:2] == [True, False]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (vllm_request(truncate_prompt_tokens=3), "sampling_params.truncate_prompt_tokens"),
        (vllm_request(structural_tag="x"), "sampling_params.structural_tag"),
        (vllm_request(max_tokens=0), "sampling_params.max_tokens"),
        (vllm_request(logprobs=-1), "sampling_params.logprobs"),
        (vllm_request(temperature=-1.0), "sampling_params.temperature"),
        (vllm_request(stop=["x"] * 17), "sampling_params.stop"),
        (vllm_request(n=65), "n"),
        (vllm_request(ids=[5000]), "tokenized.input_ids"),
        (vllm_request(ids=[5] * 5000), "tokenized.input_ids"),
        (vllm_request(ids=[]), "tokenized.input_ids"),
        (vllm.GenerateRequest(), "input"),
        (vllm.GenerateRequest(text="x", data_parallel_rank=1), "data_parallel_rank"),
        (vllm.GenerateRequest(text="x", kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (vllm.GenerateRequest(text="x", media_refs=vllm.MediaRefs()), "media_refs"),
        (sglang_request(params={"structural_tag": "x"}), "sampling_params.structural_tag"),
        (sglang_request(params={"stream_interval": 4}), "sampling_params.stream_interval"),
        (sglang_request(params={"logit_bias": {"x": 1.0}}), "sampling_params.logit_bias"),
        (sglang_request(params={"max_new_tokens": 0}), "sampling_params.max_new_tokens"),
        (sglang_request(lora_id="a"), "lora_id"),
        (sglang_request(return_hidden_states=True), "return_hidden_states"),
        (sglang_request(input_embeds=[0.5]), "input_embeds"),
        (sglang_request(token_ids_logprob=[1]), "token_ids_logprob"),
        (sglang_request(return_logprob=True, top_logprobs_num=21), "sampling_params.top_logprobs_num"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(running: Running, request_: Any, field: str) -> None:
    kind = VllmEngineStub if isinstance(request_, vllm.GenerateRequest) else SglangSchedulerStub
    error = await refusal(stub(kind, running).Generate(request_))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (error.details() or "")
    assert not running.scheduler.submissions


async def test_structured_outputs_reach_the_scheduler(running: Running) -> None:
    for constraint in ({"json_object": True}, {"regex": "[0-9]+"}, {"choice": vllm.ChoiceConstraint(choices=["a"])}):
        await answers(stub(VllmEngineStub, running).Generate(vllm_request(**constraint)))
    await answers(stub(SglangSchedulerStub, running).Generate(sglang_request(params={"json_schema": "{}"})))
    assert all(submission.sampling.grammar for submission in running.scheduler.submissions)
    assert len(running.scheduler.submissions) == 4


async def test_an_abort_ends_the_answer_with_its_reason(start: Start) -> None:
    running = await start(step_s=0.01)
    engine, scheduler = stub(VllmEngineStub, running), stub(SglangSchedulerStub, running)
    call = engine.Generate(vllm_request(stream=True, max_tokens=1500, n=2))
    await anext(aiter(call))
    await engine.Abort(vllm.AbortRequest(request_ids=["other", "r"]))
    rest = await answers(call)
    assert [answer.complete.finish_reason for answer in rest if answer.HasField("complete")] == ["abort"] * 2
    await until(lambda: not running.scheduler.num_running)
    call = scheduler.Generate(sglang_request(stream=True, params={"max_new_tokens": 1500}))
    await anext(aiter(call))
    assert (await scheduler.Abort(sglang.AbortRequest(request_id="r"))).success
    assert (await answers(call))[-1].complete.finish_reason == "abort"
    assert not (await scheduler.Abort(sglang.AbortRequest(request_id="r"))).success
    await until(lambda: not running.scheduler.num_running)


async def test_an_abort_of_very_many_ids_is_refused(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(VllmEngineStub, running).Abort(vllm.AbortRequest(request_ids=[""] * 20_000))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "request_ids" in (caught.value.details() or "")


async def test_a_router_that_leaves_ends_its_request(start: Start) -> None:
    running = await start(step_s=0.01)
    engine = stub(VllmEngineStub, running)
    call = engine.Generate(vllm_request(stream=True, max_tokens=1500, n=2))
    await call.read()
    assert (await engine.GetServerInfo(vllm.GetServerInfoRequest())).active_requests == 1
    call.cancel()
    await until(lambda: not running.scheduler.num_running)

    async def forgotten() -> bool:
        return not (await engine.GetServerInfo(vllm.GetServerInfoRequest())).active_requests

    await eventually(forgotten)


async def test_a_router_gets_health_and_model_info(start: Start) -> None:
    running = await start()
    engine, scheduler = stub(VllmEngineStub, running), stub(SglangSchedulerStub, running)
    assert (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy
    assert (await scheduler.HealthCheck(sglang.HealthCheckRequest())).healthy
    for info in (
        await engine.GetModelInfo(vllm.GetModelInfoRequest()),
        await scheduler.GetModelInfo(sglang.GetModelInfoRequest()),
    ):
        assert (info.served_model_name, info.max_context_length, info.vocab_size) == (MODEL, 2048, 1024)
        assert list(info.eos_token_ids) == sorted(MODEL_INFO.eos_token_ids)
        assert info.is_generation
        assert (info.model_path, info.tokenizer_path) == (MODEL, MODEL), "no folder of this machine"
        assert info.model_type
        assert info.architectures
    served = await engine.GetServerInfo(vllm.GetServerInfoRequest())
    assert (served.server_type, served.data_parallel_size) == ("vllm-grpc", 1)
    assert served.uptime_seconds > 0
    running.scheduler.load = {"num_running": 3, "num_waiting": 2, "num_waiting_tokens": 90, "num_blocks": 100}
    running.scheduler.load |= {"num_used_blocks": 25, "block_size": 16, "num_slots": 8}

    async def told() -> bool:
        return bool((await engine.GetLoads(vllm.GetLoadsRequest())).loads[0].num_running_reqs)

    await eventually(told)
    loads = (await engine.GetLoads(vllm.GetLoadsRequest())).loads[0]
    others = await scheduler.GetLoads(sglang.GetLoadsRequest())
    for load in (loads, others.loads[0]):
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 2, 5)
        assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (400, 1600, 0.25)
        assert (load.max_running_requests, load.num_waiting_uncached_tokens) == (8, 90)
    assert others.aggregate.total_reqs == 5
    assert (await scheduler.GetServerInfo(sglang.GetServerInfoRequest())).server_args["max_running_requests"] == 8


async def test_a_data_parallel_rank_of_minus_1_is_accepted(running: Running) -> None:
    """Some routers send -1 when they choose no rank."""
    for call in (
        stub(VllmEngineStub, running).Generate(vllm.GenerateRequest(text="x", data_parallel_rank=-1)),
        stub(SglangSchedulerStub, running).Generate(sglang_request(data_parallel_rank=-1)),
    ):
        assert (await answers(call))[-1].HasField("complete")


@pytest.mark.parametrize("kind", [VllmEngineStub, SglangSchedulerStub])
async def test_the_tokenizer_comes_as_an_archive(running: Running, kind: Any) -> None:
    chunks = await answers(stub(kind, running).GetTokenizer(smg.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json") == (CHECKPOINT / "tokenizer.json").read_bytes()
        assert {"config.json", "tokenizer_config.json"} <= set(archive.namelist())


async def test_the_gateways_own_chat_template_is_in_the_archive(start: Start) -> None:
    running = await start(settings={"chat_template": "{{ messages[0].content }}"})
    chunks = await answers(stub(VllmEngineStub, running).GetTokenizer(smg.GetTokenizerRequest()))
    with zipfile.ZipFile(io.BytesIO(b"".join(chunk.data for chunk in chunks))) as archive:
        assert archive.read("chat_template.jinja") == b"{{ messages[0].content }}"


async def test_methods_that_are_not_served_say_so(running: Running) -> None:
    engine, scheduler = stub(VllmEngineStub, running), stub(SglangSchedulerStub, running)
    for call in (
        engine.FlushCache(smg.FlushCacheRequest()),
        engine.StartProfile(smg.StartProfileRequest()),
        engine.StopProfile(smg.StopProfileRequest()),
        scheduler.FlushCache(smg.FlushCacheRequest()),
        scheduler.StartProfile(smg.StartProfileRequest()),
        scheduler.StopProfile(smg.StopProfileRequest()),
        scheduler.LoadLoRAAdapter(sglang.LoadLoRAAdapterRequest()),
        scheduler.UnloadLoRAAdapter(sglang.UnloadLoRAAdapterRequest()),
    ):
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        assert ":" in await call.details()
    assert not (await scheduler.ListLoadedLoRAAdapters(sglang.ListLoadedLoRAAdaptersRequest())).loaded_adapters
    for kind in (VllmEngineStub, SglangSchedulerStub):
        error = await refusal(stub(kind, running).SubscribeKvEvents(smg.SubscribeKvEventsRequest()))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "--cache" in (error.details() or "")
