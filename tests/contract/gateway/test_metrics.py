"""What a gateway's /metrics and its log say of finished requests."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.v1 import inference_pb2, inference_pb2_grpc
from tests.contract.gateway.conftest import MODEL, Lines, Running, Start, eventually, until
from tests.support.fake_session import ERROR

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": [7, 8, 9, 10], "max_tokens": 6, "ignore_eos": True}


async def samples(running: Running) -> dict[tuple[str, ...], float]:
    """The samples by name and label values, in the order of the labels' names."""
    text = (await running.http.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return {
        (sample.name.removeprefix("paceline_gateway_"), *(value for _, value in sorted(sample.labels.items()))): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }


async def until_samples(running: Running, wanted: dict[tuple[str, ...], float]) -> None:
    async def there() -> bool:
        found = await samples(running)
        return {key: found.get(key) for key in wanted} == wanted

    await eventually(there)


async def test_series_of_requests_have_the_served_models_name(start: Start) -> None:
    running = await start(settings={"served_model_name": "my-model"})
    assert (await running.http.post(PATH, json=BODY)).status_code == 200
    await until_samples(
        running,
        {
            ("requests_total", "completion", "length", "my-model"): 1,
            ("prompt_tokens_total", "my-model"): 4,
            ("prompt_tokens_cached_total", "my-model"): 3,
            ("generation_tokens_total", "my-model"): 6,
            ("request_queue_time_seconds_sum", "my-model"): 0.25,
            ("request_prefill_time_seconds_sum", "my-model"): 0.5,
            ("request_decode_time_seconds_sum", "my-model"): 1.5,
            ("request_prompt_tokens_bucket", "2.0", "my-model"): 0,
            ("request_prompt_tokens_bucket", "5.0", "my-model"): 1,
            ("request_generation_tokens_sum", "my-model"): 6,
            ("request_time_per_output_token_seconds_count", "my-model"): 1,
            ("time_to_first_token_seconds_count", "my-model"): 1,
            ("inter_token_latency_seconds_count", "my-model"): 5,
            ("e2e_request_latency_seconds_count", "my-model"): 1,
        },
    )


async def test_one_token_has_no_time_per_output_token(start: Start) -> None:
    running = await start()
    await running.http.post(PATH, json=BODY | {"max_tokens": 1})
    await until_samples(
        running,
        {("time_to_first_token_seconds_count", MODEL): 1, ("request_time_per_output_token_seconds_count", MODEL): 0},
    )


async def test_the_first_tenants_and_those_of_the_settings_have_series(start: Start) -> None:
    """Two unknown tenants get series, the others do not. A tenant named `other` is counted with these others."""
    running = await start(settings={"metrics_tenants": 2, "metrics_tenant_names": "acme, late"})
    for tenant in ("a", "", "b", "c", "other", "late"):
        fields = {"tenant": tenant} if tenant else {}
        assert (await running.http.post(PATH, json=BODY | fields)).status_code == 200
    await until_samples(
        running,
        {
            ("tenant_requests_total", "length", MODEL, "a"): 1,
            ("tenant_requests_total", "length", MODEL, "default"): 1,
            ("tenant_requests_total", "length", MODEL, "late"): 1,
            ("tenant_requests_total", "length", MODEL, "other"): 3,
            ("tenant_prompt_tokens_total", MODEL, "acme"): 0,
            ("tenant_prompt_tokens_total", MODEL, "other"): 12,
            ("tenant_prompt_tokens_cached_total", MODEL, "a"): 3,
            ("tenant_generation_tokens_total", MODEL, "a"): 6,
            ("tenant_time_to_first_token_seconds_count", MODEL, "a"): 1,
            ("tenant_request_queue_time_seconds_sum", MODEL, "other"): 0.75,
        },
    )
    tenants = {key[-1] for key in await samples(running) if key[0] == "tenant_prompt_tokens_total"}
    assert tenants == {"a", "default", "late", "acme", "other"}


async def test_any_name_of_a_tenant_can_be_scraped(start: Start) -> None:
    running = await start()
    name = 'a"b\\c\n\u2603{}'
    assert (await running.http.post(PATH, json=BODY | {"tenant": name})).status_code == 200
    await until_samples(running, {("tenant_requests_total", "length", MODEL, name): 1})
    broken = '{"prompt":[7],"max_tokens":1,"tenant":"\\ud800"}'
    assert (await running.http.post(PATH, content=broken)).status_code == 400
    assert (await running.http.get("/metrics")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_finished_request_has_one_log_line(start: Start, lines: Lines, stream: bool) -> None:
    running = await start()
    body = BODY | {"tenant": "acme", "stream": stream}
    answer = await running.http.post(PATH, json=body, headers={"X-Request-ID": "abc"})
    await until(lambda: len(lines()) == 1)
    [line] = lines()
    data = answer.text.splitlines()[0].removeprefix("data: ") if stream else answer.text
    told = {name: line[name] for name in line if not name.endswith("_s") and name not in ("timestamp", "logger")}
    assert told == {
        "level": "info",
        "service": "gateway",
        "message": "request finished",
        "id": json.loads(data)["id"],
        "request_id": "abc",
        "endpoint": "completion",
        "tenant": "acme",
        "model": MODEL,
        "status": 200,
        "finish_reason": "length",
        "prompt_tokens": 4,
        "output_tokens": 6,
        "cached_tokens": 3,
        "preemptions": 2,
    }
    assert (line["queue_s"], line["prefill_s"], line["decode_s"]) == (0.25, 0.5, 1.5)
    assert 0 < line["ttft_s"] <= line["total_s"]


async def test_the_line_names_losses_and_host_tokens_where_there_are_some(running: Running, lines: Lines) -> None:
    running.scheduler.timing.num_losses, running.scheduler.timing.num_cached_host_tokens = 1, 2
    assert (await running.http.post(PATH, json=BODY)).status_code == 200
    await until(lambda: len(lines()) == 1)
    [line] = lines()
    assert (line["losses"], line["cached_host_tokens"], line["cached_tokens"]) == (1, 2, 3)


async def test_all_samples_of_a_request_share_one_log_line(start: Start, lines: Lines) -> None:
    """Two prompts with two samples each. The line counts tokens as the usage does."""
    running = await start()
    body = BODY | {"prompt": [[7, 8, 9, 10], [7, 8, 9, 11]], "n": 2}
    answer = (await running.http.post(PATH, json=body)).json()
    await until(lambda: len(lines()) == 1)
    [line] = lines()
    assert (line["sequences"], line["finish_reason"]) == (4, "length")
    assert (line["prompt_tokens"], line["output_tokens"]) == (8, 24)
    assert (line["prompt_tokens"], line["output_tokens"]) == (
        answer["usage"]["prompt_tokens"],
        answer["usage"]["completion_tokens"],
    )
    assert line["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 6


async def test_the_line_of_a_request_with_a_stop_string_counts_the_tokens_of_its_usage(
    start: Start, lines: Lines
) -> None:
    running = await start(tokens_per_step=4)
    body = {"prompt": [7, 8, 9], "max_tokens": 64, "ignore_eos": True, "temperature": 0}
    text = (await running.http.post(PATH, json=body)).json()["choices"][0]["text"]
    answer = (await running.http.post(PATH, json=body | {"stop": text[8:10]})).json()
    await until(lambda: len(lines()) == 2)
    assert lines()[1]["finish_reason"] == answer["choices"][0]["finish_reason"] == "stop"
    assert lines()[1]["output_tokens"] == answer["usage"]["completion_tokens"]


async def test_failures_aborts_and_refusals_have_lines(start: Start, lines: Lines) -> None:
    running = await start(step_s=0.005)
    assert (await running.http.post(PATH, json=BODY | {"prompt": ""})).status_code == 400
    [refused] = lines()
    assert (refused["message"], refused["status"], refused["endpoint"]) == ("request refused", 400, "completion")
    assert refused["error"] == "the prompt is empty"
    running.scheduler.reject = lambda _: inference_pb2.Ending(reason=ERROR, code=13, message="boom")
    assert (await running.http.post(PATH, json=BODY)).status_code == 500
    await until(lambda: len(lines()) == 2)
    failed = lines()[1]
    assert (failed["status"], failed["finish_reason"], failed["error"]) == (500, "error", "boom")
    assert failed["queue_s"] is None
    running.scheduler.reject = lambda _: None
    task = asyncio.create_task(running.http.post(PATH, json=BODY | {"max_tokens": 2000, "n": 2}))
    await until(lambda: running.scheduler.num_running == 2)
    task.cancel()
    await until(lambda: len(lines()) == 3)
    assert (lines()[2]["status"], lines()[2]["finish_reason"]) == (499, "abort")


async def test_overload_writes_no_lines(start: Start, lines: Lines) -> None:
    running = await start(settings={"max_live_requests": 1})
    running.scheduler.paused = True
    first = asyncio.create_task(running.http.post(PATH, json=BODY))
    await until(lambda: running.scheduler.num_running == 1)
    assert (await running.http.post(PATH, json=BODY)).status_code == 429
    running.scheduler.paused = False
    assert (await first).status_code == 200
    await until(lambda: len(lines()) > 0)
    assert [line["status"] for line in lines()] == [200]


async def test_a_resumed_request_has_a_line_for_the_resume_and_a_line_for_its_end(start: Start, lines: Lines) -> None:
    running = await start(step_s=0.003)
    body, key = BODY | {"max_tokens": 200, "stream": True}, {"Idempotency-Key": "k"}
    async with running.http.stream("POST", PATH, json=body, headers=key | {"X-Request-ID": "one"}) as answer:
        await anext(answer.aiter_lines())
    answer_ids = {running.scheduler.submissions[0].answer_id}
    assert (await running.http.post(PATH, json=body, headers=key | {"X-Request-ID": "two"})).status_code == 200
    await until(lambda: len(lines()) > 1)
    taken_up, finished = lines()
    assert (taken_up["message"], taken_up["request_id"]) == ("request taken up", "two")
    assert taken_up["first_request_id"] == "one"
    assert (finished["message"], finished["request_id"], finished["status"]) == ("request finished", "one", 200)
    assert {taken_up["id"], finished["id"]} == answer_ids


async def test_finished_and_refused_grpc_requests_have_a_log_line(start: Start, lines: Lines) -> None:
    running = await start()
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(request_id="abc", tenant="acme")
        request.token_ids.ids.extend([7, 8, 9])
        request.sampling.max_tokens = 5
        request.sampling.ignore_eos = True
        async for _ in stub.Generate(request):
            pass
        request.sampling.max_tokens = -1
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in stub.Generate(request):
                pass
    await until(lambda: len(lines()) == 2)
    finished, refused = lines()
    assert (finished["id"], finished["request_id"], finished["endpoint"]) == ("abc", "abc", "grpc")
    assert (finished["tenant"], finished["output_tokens"], finished["status"]) == ("acme", 5, 200)
    assert (refused["message"], refused["request_id"], refused["status"]) == ("request refused", "abc", 400)


@pytest.mark.parametrize("how", ["flag", "level"])
async def test_the_lines_can_be_turned_off(start: Start, lines: Lines, how: str) -> None:
    running = await start(settings={"log_requests": how != "flag"})
    if how == "level":
        logging.getLogger().setLevel("WARNING")
    assert (await running.http.post(PATH, json=BODY)).status_code == 200
    assert (await running.http.post(PATH, json=BODY | {"prompt": ""})).status_code == 400
    await until_samples(running, {("requests_total", "completion", "length", MODEL): 1})
    assert lines() == []
