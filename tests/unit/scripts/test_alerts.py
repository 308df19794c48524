"""The alert rules of deploy/monitoring: promtool checks them, and each has a test, a runbook and series that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.support.prometheus import PROMTOOL, needs_prometheus

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "monitoring"


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@needs_prometheus
def test_promtool_finds_the_rules_right_and_each_alert_fires_as_its_test_says() -> None:
    for arguments in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        run = subprocess.run([str(PROMTOOL), *arguments], cwd=FOLDER, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr


@needs_prometheus
def test_promtool_finds_the_configuration_right() -> None:
    run = subprocess.run(
        [str(PROMTOOL), "check", "config", "prometheus.yml"], cwd=FOLDER, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_each_alert_is_tested_to_fire() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {alert["alert"] for alert in alerts()}


def test_each_alert_has_a_runbook() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    assert headings == [alert["alert"] for alert in alerts()]
    for alert in alerts():
        assert alert["annotations"]["runbook"] == f"docs/runbooks.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("page", "ticket")


def test_the_rules_name_series_of_the_metrics_page() -> None:
    text = (FOLDER / "alerts.yml").read_text()
    named = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bpaceline_\w+", text)}
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [name for name in sorted(named) if f"`{name}`" not in page] == []
