"""A pytest plugin for vLLM's tests: keeps those that ask a server, and writes their outcomes.

It runs in vLLM's environment. The other tests are of vLLM's own classes, so they say nothing about another server.
`--outcomes FILE`: a line of JSON for each test, with its id, `passed`, `failed` or `skipped`, and the end of the error.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

SERVER = "RemoteOpenAIServer("
ERROR_CHARS = 2000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, default=None)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.outcomes:
        config.pluginmanager.register(Outcomes(config.option.outcomes))


def asks_a_server(item: pytest.Function) -> bool:
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    functions = [item.function, *(one.func for several in fixtures for one in several)]
    return any(SERVER in source for source in sources(functions))


def sources(functions: Iterable[Callable[..., object]]) -> Iterable[str]:
    for function in functions:
        try:
            yield inspect.getsource(inspect.unwrap(function))
        except (OSError, TypeError):
            continue


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if isinstance(item, pytest.Function) and asks_a_server(item)]
    chosen = set(map(id, kept))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = kept


class Outcomes:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._outcome: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test passes only if its set-up and its tear-down do, too."""
        known = self._outcome.get(report.nodeid, ("passed", ""))
        if known[0] == "passed" and report.outcome != "passed":
            known = (report.outcome, f"{report.when}: {report.longreprtext[-ERROR_CHARS:]}")
        self._outcome[report.nodeid] = known
        if report.when == "teardown":
            outcome, error = self._outcome.pop(report.nodeid)
            with self.path.open("a") as file:
                file.write(json.dumps({"test": report.nodeid, "outcome": outcome, "error": error}) + "\n")
