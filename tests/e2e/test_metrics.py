"""docs/metrics.md against what the services serve."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

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


def test_all_services_call_the_model_what_clients_call_it(stack: Stack) -> None:
    names = set()
    for url in (stack.url, f"http://127.0.0.1:{stack.metrics_ports['scheduler']}"):
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
            names |= set(re.findall(r'model_name="([^"]*)"', answer.read().decode()))
    assert names == {"paceline-demo"}
