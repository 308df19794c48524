"""The dashboards and alerts of deploy/monitoring on a real Prometheus that scrapes running services."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.monitoring import dashboard_files
from deploy.monitoring.grafana import text
from services.client import PacelineClient
from tests.support.prometheus import Prometheus, needs_prometheus, prometheus
from tests.support.stack import Stack

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
FILES = sorted((FOLDER / "dashboards").glob("*.json"))
EMPTY = ("paceline_gateway_quota_refusals_total",)  # series that this stack lacks, because it has no API keys

pytestmark = needs_prometheus


def queries(path: Path) -> list[str]:
    panels = json.loads(path.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def filled_in(query: str) -> str:
    """With what Grafana puts in for its variables."""
    return query.replace("$__rate_interval", "1m").replace("$model", ".*")


@pytest.fixture(scope="module")
def watching(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has seen requests come and end."""
    targets = {**stack.metrics_ports, "gateway": stack.http_port}
    rules = [FOLDER / "alerts.yml"]
    with (
        prometheus(tmp_path_factory.mktemp("prometheus"), targets, rules) as running,
        PacelineClient(f"127.0.0.1:{stack.grpc_port}") as client,
    ):
        deadline_s = time.monotonic() + 60
        # rate() needs two scrapes of a histogram that exists from the first request on.
        while running.num_series("rate(paceline_gateway_tenant_time_to_first_token_seconds_count[1m]) > 0") == 0:
            assert time.monotonic() < deadline_s, "Prometheus sees no request"
            client.generate(prompt="Once there was a fox", max_tokens=8, temperature=0)
        yield running


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_query_of_a_dashboard_gives_a_series(watching: Prometheus, path: Path) -> None:
    empty = [query for query in queries(path) if not any(name in query for name in EMPTY)]
    deadline_s = time.monotonic() + 30
    # rate() needs two scrapes of each service.
    while empty and time.monotonic() < deadline_s:
        empty = [query for query in empty if watching.num_series(filled_in(query)) == 0]
        time.sleep(0.2)
    assert empty == []


def test_the_models_to_choose_from_are_those_that_are_served(watching: Prometheus, stack: Stack) -> None:
    [name] = {
        query.removeprefix("label_values(").split(",")[0]
        for path in FILES
        for query in (_variable(json.loads(path.read_text()), "model")["query"]["query"],)
    }
    labels: list[dict[str, str]] = watching.get("series", **{"match[]": name})
    [served] = httpx.get(f"{stack.url}/v1/models").json()["data"]
    assert {label["model_name"] for label in labels} == {served["id"]}


def _variable(model: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in model["templating"]["list"] if each["name"] == name)
    return found


def test_the_alerts_are_loaded_and_none_fires_for_a_healthy_server(watching: Prometheus) -> None:
    deadline_s = time.monotonic() + 30
    while any(rule["health"] == "unknown" for rule in _rules(watching)):
        assert time.monotonic() < deadline_s, "the rules are not evaluated"
        time.sleep(0.2)
    assert {(rule["name"], rule["health"], rule.get("lastError", "")) for rule in _rules(watching)} == {
        (rule["name"], "ok", "") for rule in _rules(watching)
    }
    assert [rule["name"] for rule in _rules(watching) if rule.get("state") == "firing"] == []


def _rules(watching: Prometheus) -> list[dict[str, Any]]:
    return [rule for group in watching.get("rules")["groups"] for rule in group["rules"]]


def test_the_files_are_those_that_dashboard_files_writes() -> None:
    written = {path.name: path.read_text() for path in FILES}
    assert written == {f"{each.name}.json": text(each) for each in dashboard_files.DASHBOARDS}
