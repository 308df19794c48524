"""The series under vLLM's names: names, kinds and labels of vLLM 0.32, and the figures behind them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.v1.common_pb2 import FINISH_REASON_ERROR
from paceline.v1.inference_pb2 import QUEUE_LIMIT_REQUESTS, QUEUE_LIMIT_TOKENS, Ending, StepTokens
from tests.contract.gateway.conftest import MODEL, Running, Start, eventually
from tests.contract.gateway.test_metrics import BODY, PATH

PAGE = Path(__file__).parents[3] / "docs" / "vllm-metrics.md"
OF_ENGINE = frozenset({"model_name", "engine"})
# By name: kind and labels. The name has no prefix `vllm:`. A counter's name has no `_total`, because vLLM declares
# counters without it.
FROM_THE_SCHEDULER: dict[str, tuple[str, frozenset[str]]] = {
    "num_requests_running": ("gauge", OF_ENGINE),
    "num_requests_waiting": ("gauge", OF_ENGINE),
    "num_requests_waiting_by_reason": ("gauge", OF_ENGINE | {"reason"}),
    "kv_cache_usage_perc": ("gauge", OF_ENGINE),
    "cache_config_info": (
        "gauge",
        frozenset({"block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency", "engine"}),
    ),
    "iteration_tokens_total": ("histogram", OF_ENGINE),
    "num_preemptions": ("counter", OF_ENGINE),
    "prefix_cache_queries": ("counter", OF_ENGINE),
    "prefix_cache_hits": ("counter", OF_ENGINE),
    "spec_decode_num_drafts": ("counter", OF_ENGINE),
    "spec_decode_num_draft_tokens": ("counter", OF_ENGINE),
    "spec_decode_num_accepted_tokens": ("counter", OF_ENGINE),
}
FROM_THE_GATEWAY: dict[str, tuple[str, frozenset[str]]] = {
    "prompt_tokens": ("counter", OF_ENGINE),
    "prompt_tokens_cached": ("counter", OF_ENGINE),
    "generation_tokens": ("counter", OF_ENGINE),
    "request_success": ("counter", OF_ENGINE | {"finished_reason"}),
    "admission_rejections": ("counter", frozenset({"model_name", "reason"})),
    **dict.fromkeys(
        (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "request_time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "request_num_preemptions",
            "request_prompt_tokens",
            "request_prefill_kv_computed_tokens",
            "request_generation_tokens",
            "request_max_num_generation_tokens",
            "request_params_n",
            "request_params_max_tokens",
        ),
        ("histogram", OF_ENGINE),
    ),
}
ALL = FROM_THE_SCHEDULER | FROM_THE_GATEWAY
LOAD: dict[str, Any] = {"num_running": 3, "num_waiting": 2, "num_blocks": 100, "num_used_blocks": 25, "block_size": 16}
LOAD |= {"num_preemptions": 7, "prefix_query_tokens": 500, "prefix_hit_tokens": 120}
LOAD |= {"num_drafts": 10, "num_draft_tokens": 50, "num_accepted_tokens": 40}
LOAD |= {"step_tokens": StepTokens(bounds=[1, 8], counts=[4, 2, 1], total=50)}


async def families(running: Running) -> dict[str, Any]:
    """The metric families with vLLM's prefix, by name."""
    text = (await running.http.get("/metrics")).text
    found = [family for family in text_string_to_metric_families(text) if family.name.startswith("vllm:")]
    assert len({family.name for family in found}) == len(found)
    return {family.name.removeprefix("vllm:"): family for family in found}


async def values(running: Running) -> dict[tuple[str, ...], float]:
    """The values, by the sample's name and the values of its labels other than `model_name` and `engine`."""
    return {
        (
            sample.name.removeprefix("vllm:"),
            *(value for name, value in sorted(sample.labels.items()) if name not in OF_ENGINE),
        ): sample.value
        for family in (await families(running)).values()
        for sample in family.samples
    }


def shape(family: Any) -> tuple[str, frozenset[str]]:
    labels = {label for sample in family.samples for label in sample.labels if label != "le"}
    return family.type, frozenset(labels)


async def told(running: Running) -> None:
    """Waits until the gateway knows the load."""
    running.scheduler.load = LOAD

    async def there() -> bool:
        return "num_requests_running" in await families(running)

    await eventually(there)


async def test_names_kinds_and_labels_are_vllms(start: Start) -> None:
    running = await start()
    await told(running)
    found = await families(running)
    assert {name: shape(family) for name, family in found.items()} == ALL
    for family in found.values():
        for sample in family.samples:
            assert sample.labels.get("engine", "0") == "0"
            assert sample.labels.get("model_name", MODEL) == MODEL


async def test_the_figures_of_the_scheduler(start: Start) -> None:
    running = await start()
    await told(running)
    assert (await values(running)).items() >= {
        ("num_requests_running",): 3,
        ("num_requests_waiting",): 2,
        ("num_requests_waiting_by_reason", "capacity"): 2,
        ("num_requests_waiting_by_reason", "deferred"): 0,
        ("kv_cache_usage_perc",): 0.25,
        ("cache_config_info", "16", str(100 / (2048 // 16)), "1600", "100"): 1,
        ("iteration_tokens_total_bucket", "1.0"): 4,
        ("iteration_tokens_total_bucket", "8.0"): 6,
        ("iteration_tokens_total_count",): 7,
        ("iteration_tokens_total_sum",): 50,
        ("num_preemptions_total",): 7,
        ("prefix_cache_queries_total",): 500,
        ("prefix_cache_hits_total",): 120,
        ("spec_decode_num_drafts_total",): 10,
        ("spec_decode_num_draft_tokens_total",): 50,
        ("spec_decode_num_accepted_tokens_total",): 40,
    }.items()


async def test_requests_that_a_limit_of_the_queue_refuses_are_counted_by_limit(start: Start) -> None:
    """The scheduler refuses some requests. The gateway refuses others, because the scheduler has reported a full queue.
    A bad request is not counted."""
    running = await start()
    limits = iter((QUEUE_LIMIT_REQUESTS, QUEUE_LIMIT_TOKENS))
    running.scheduler.reject = lambda submission: Ending(
        handle=submission.handle, reason=FINISH_REASON_ERROR, code=8, message="queue: full", queue_limit=next(limits)
    )
    for _ in range(2):
        assert (await running.http.post(PATH, json=BODY)).status_code == 429
    assert (await running.http.post(PATH, json=BODY | {"max_tokens": 0})).status_code == 400
    running.scheduler.queue_limit = QUEUE_LIMIT_TOKENS
    running.scheduler.set_full(True)

    async def is_full() -> bool:
        return (await running.http.post(PATH, json=BODY | {"max_tokens": 0})).status_code == 429

    await eventually(is_full)
    found = await values(running)
    assert found["admission_rejections_total", "max_num_queued_reqs"] == 1
    assert found["admission_rejections_total", "max_num_queued_tokens"] == 2
    own = (await running.http.get("/metrics")).text
    assert f'paceline_gateway_queue_refusals_total{{limit="tokens",model_name="{MODEL}"}} 2.0' in own


async def test_without_a_scheduler_its_figures_are_absent(start: Start) -> None:
    running = await start()
    await told(running)
    await running.scheduler.stop()

    async def absent() -> bool:
        return (await families(running)).keys() == FROM_THE_GATEWAY.keys()

    await eventually(absent)


async def test_the_figures_of_the_gateway(start: Start) -> None:
    running = await start()
    for body in (BODY, BODY | {"n": 3, "max_tokens": 2}):
        assert (await running.http.post(PATH, json=body)).status_code == 200
    assert (await running.http.post(PATH, json=BODY | {"max_tokens": 0})).status_code == 400
    wanted = {
        ("prompt_tokens_total",): 16,
        ("prompt_tokens_cached_total",): 12,
        ("generation_tokens_total",): 12,
        ("request_success_total", "length"): 4,
        ("request_success_total", "stop"): 0,
        ("request_success_total", "abort"): 0,
        ("request_success_total", "error"): 0,
        ("time_to_first_token_seconds_count",): 4,
        ("inter_token_latency_seconds_count",): 8,
        ("e2e_request_latency_seconds_count",): 4,
        ("request_time_per_output_token_seconds_count",): 4,
        ("request_queue_time_seconds_sum",): 1,
        ("request_prefill_time_seconds_sum",): 2,
        ("request_decode_time_seconds_sum",): 6,
        ("request_inference_time_seconds_sum",): 8,
        ("request_num_preemptions_sum",): 8,
        ("request_prompt_tokens_sum",): 16,
        ("request_prefill_kv_computed_tokens_sum",): 4,
        ("request_generation_tokens_sum",): 12,
        ("request_max_num_generation_tokens_sum",): 8,
        ("request_params_n_sum",): 4,
        ("request_params_n_count",): 2,
        ("request_params_max_tokens_sum",): 8,
    }
    found: dict[tuple[str, ...], float | None] = {}

    async def there() -> bool:
        now = await values(running)
        found.update({key: now.get(key) for key in wanted})
        return found == wanted

    try:
        await eventually(there)
    except TimeoutError:
        assert found == wanted


async def test_vllms_names_can_be_switched_off(start: Start) -> None:
    running = await start(settings={"vllm_metrics": False})
    assert not await families(running)
    assert "paceline_gateway_requests_total" in (await running.http.get("/metrics")).text


@pytest.mark.parametrize(("source", "wanted"), [("all", FROM_THE_SCHEDULER), ("gateway", FROM_THE_GATEWAY)])
def test_the_page_lists_all_series_and_their_sources(source: str, wanted: dict[str, Any]) -> None:
    rows = re.findall(r"^\| `vllm:(\w+)` \| (all|gateway) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    documented = [name.removesuffix("_total") if name not in wanted else name for name, of in rows if of == source]
    assert sorted(documented) == sorted(wanted)
