"""docs/metrics.md against what the services serve."""

from __future__ import annotations

import json
import math
import re
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import load
from tests.support.stack import Stack

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(?P<name>paceline_\w+)` \| (?P<kind>\w+) \|(?P<labels>[^|]*)\|", re.MULTILINE)

# Name, kind, labels.
Series = tuple[str, str, frozenset[str]]


def served(url: str) -> set[Series]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found = set()
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("paceline_") or family.name.endswith("_created"):
            continue
        assert family.samples, f"{family.name} has no sample: its labels cannot be told"
        labels = frozenset(label for sample in family.samples for label in sample.labels if label != "le")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found.add((name, family.type, labels))
    return found


def documented() -> list[Series]:
    rows = ROW.finditer(PAGE.read_text(encoding="utf-8"))
    return [(row["name"], row["kind"], frozenset(re.findall(r"\w+", row["labels"]))) for row in rows]


async def test_the_reference_names_every_series_and_no_other(stack: Stack) -> None:
    """With its kind and its labels."""
    wanted = [load.Wanted(prompt, 5) for prompt in load.random_prompts(2, 8, 1000, longest=60)]
    for stream in await load.stream_all(stack.url, wanted):
        assert not stream.errors
    urls = [stack.url, *(f"http://127.0.0.1:{port}" for port in stack.metrics_ports.values())]
    found = set().union(*map(served, urls))
    table = documented()
    assert len(table) == len(set(table))
    assert found - set(table) == set(), "served, and not in docs/metrics.md"
    assert set(table) - found == set(), "in docs/metrics.md, and not served"


SERVICES = ("gateway", "scheduler", "cache", "worker")


def urls_of(stack: Stack) -> dict[str, str]:
    """Where each service serves its metrics."""
    ports = {name.partition("-")[0]: port for name, port in stack.metrics_ports.items()}
    return {"gateway": stack.url, **{name: f"http://127.0.0.1:{port}" for name, port in ports.items()}}


@pytest.mark.parametrize("service", SERVICES)
async def test_names_and_buckets_follow_the_conventions_of_prometheus(stack: Stack, service: str) -> None:
    """Base units, help texts, the service's name, the process's series, and no observation above the last bucket."""
    wanted = [load.Wanted(prompt, 5) for prompt in load.random_prompts(2, 8, 1000, longest=60)]
    for stream in await load.stream_all(stack.url, wanted):
        assert not stream.errors
    with urllib.request.urlopen(f"{urls_of(stack)[service]}/metrics", timeout=20) as answer:  # noqa: ASYNC210
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    [info] = families["paceline_build_info"].samples
    assert (info.labels["service"], info.labels["version"], info.value) == (service, version("paceline"), 1)
    assert {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"} <= set(families)
    own = {name: family for name, family in families.items() if name.startswith(f"paceline_{service}_")}
    assert len(own) > 5
    for name, family in own.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]+", name)
        assert family.documentation, f"{name} has no help text"
        assert not re.search(r"(_ms|_us|_milliseconds|_percent|_count|_sum|_bucket)$", name), name
        if family.type == "histogram" and not name.endswith("_seconds"):
            assert re.search(r"_(tokens|n|preemptions)$", name), f"{name} does not end with its unit"
        counts = {float(one.labels["le"]): one.value for one in family.samples if one.name.endswith("_bucket")}
        if counts and name.endswith("_seconds"):
            assert counts[sorted(counts)[-2]] == counts[math.inf], f"{name}: observations above the last bucket"


def test_all_services_use_the_model_name_that_clients_use(stack: Stack) -> None:
    names = set()
    for url in (stack.url, f"http://127.0.0.1:{stack.metrics_ports['scheduler']}"):
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
            names |= set(re.findall(r'model_name="([^"]*)"', answer.read().decode()))
    assert names == {"paceline-demo"}


def under_vllms_names(stack: Stack) -> dict[str, float]:
    """The values of all series with vLLM's prefix, summed over the labels, and the figures of cache_config_info."""
    with urllib.request.urlopen(f"{stack.url}/metrics", timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples if family.name.startswith("vllm:") else ():
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
            if family.name == "vllm:cache_config_info":
                found |= {label: float(value) for label, value in sample.labels.items()}
    return found


def until_moved(stack: Stack, **wanted: float) -> dict[str, float]:
    """All values, as soon as the wanted ones are as given: the scheduler's values arrive with its next heartbeat."""
    end_s, values = time.monotonic() + 30, {f"vllm:{name}": value for name, value in wanted.items()}
    while not (found := under_vllms_names(stack)).items() >= values.items():
        assert time.monotonic() < end_s, found
        time.sleep(0.05)
    return found


def ask(stack: Stack, **fields: Any) -> Any:
    body = {"prompt": list(range(20, 220)), "temperature": 0, "ignore_eos": True, **fields}
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(f"{stack.url}/v1/completions", data, headers)
    return urllib.request.urlopen(request, timeout=100)


def test_the_series_with_vllms_names_move(own_stack: Stack) -> None:
    """Through scheduler, worker and cache: running requests, used blocks, reused tokens."""
    own_stack.up()
    idle = until_moved(own_stack, num_requests_running=0, cache_config_info=1)
    assert idle["block_size"] > 1
    assert idle["num_gpu_blocks"] > 1
    with ask(own_stack, max_tokens=1200, stream=True) as stream:
        stream.readline()
        busy = until_moved(own_stack, num_requests_running=1)
        assert 0 < busy["vllm:kv_cache_usage_perc"] <= 1
        stream.read()
    until_moved(own_stack, num_requests_running=0, kv_cache_usage_perc=0, prefix_cache_queries_total=200)
    with ask(own_stack, max_tokens=5) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 5
    hits = until_moved(own_stack, prefix_cache_queries_total=400)["vllm:prefix_cache_hits_total"]
    assert 200 - 2 * idle["block_size"] < hits < 200
    until_moved(
        own_stack,
        request_success_total=2,
        prompt_tokens_total=400,
        prompt_tokens_cached_total=hits,
        generation_tokens_total=1205,
        time_to_first_token_seconds_count=2,
        inter_token_latency_seconds_count=1203,
        e2e_request_latency_seconds_count=2,
        request_params_max_tokens_sum=1205,
        iteration_tokens_total_sum=400 - hits + 1205,
    )


def reported_load(stack: Stack, wanted_format: str) -> str | None:
    """The ORCA header of an answer."""
    headers = {"content-type": "application/json", "endpoint-load-metrics-format": wanted_format}
    body = {"prompt": [20, 21, 22], "max_tokens": 1}
    asked = urllib.request.Request(f"{stack.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=100) as answer:
        return answer.headers["endpoint-load-metrics"]


def test_an_answer_reports_the_load_to_balancers_that_ask(own_stack: Stack) -> None:
    """ORCA, as vLLM writes it: the same figures as the metrics."""
    own_stack.up()
    until_moved(own_stack, num_requests_running=0, cache_config_info=1)
    text = reported_load(own_stack, "TEXT")
    usage_text = re.fullmatch(
        r"TEXT named_metrics\.kv_cache_usage_perc=(\S+), named_metrics\.num_requests_waiting=0\.0", text or ""
    )
    assert usage_text, text
    assert float(usage_text[1]) < 0.001  # the request's own block, if a heartbeat came while it ran
    with ask(own_stack, max_tokens=1200, stream=True) as stream:
        stream.readline()
        usage = until_moved(own_stack, num_requests_running=1)["vllm:kv_cache_usage_perc"]
        form, _, report = (reported_load(own_stack, "json") or "").partition(" ")
        assert form == "JSON"
        named = json.loads(report)["named_metrics"]
        assert set(named) == {"kv_cache_usage_perc", "num_requests_waiting"}
        assert 0 < usage <= named["kv_cache_usage_perc"] <= 1
        stream.read()
    assert reported_load(own_stack, "BIN") is None
