"""Records which tests run which lines. A mutation is tried on the tests that could notice it, the quickest first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import coverage
import pytest

# The mutated modules: those that decide, without the gRPC servers around them.
MODULES = (
    "scheduler_svc/core/**/*.py",
    "scheduler_svc/policies/**/*.py",
    "cache_svc/core/**/*.py",
    "gpu_worker/steps/slots.py",
    "services/gateway/engine/live_request.py",
    "services/gateway/engine/session_core.py",
    "services/client/continuation.py",
)
LEFT_OUT = ("invariants.py", "api.py", "__init__.py")  # checks of the debug mode; re-exports
TESTS = (
    "tests/unit/scheduler",
    "tests/unit/policies",
    "tests/unit/cache",
    "tests/unit/worker/test_protocol.py",
    "tests/unit/worker/test_history.py",
    "tests/unit/gateway/test_session_core.py",
    "tests/unit/client",
    "tests/contract/cache",
    "tests/contract/scheduler",
)
# Tests that run nearly all lines. They are not measured, and run when no other test notices a mistake.
SYSTEM_TESTS = (
    *(
        f"tests/simulation/test_world.py::test_every_stream_equals_its_undisturbed_run_although_services_die[{n}]"
        for n in (0, 50)
    ),
    "tests/simulation/test_hostile_policies.py",
    "tests/simulation/test_presets.py",
    "tests/simulation/test_trtllm.py",
    "tests/simulation/test_sharing.py",
    "tests/simulation/test_namespaces.py",
    "tests/simulation/test_deadline.py",
    "tests/simulation/test_pins.py",
    "tests/simulation/test_poison.py",
)


class Contexts:
    """A pytest plugin that records each line for the test that runs it."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured = measured
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.measured.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration


def modules(root: Path) -> list[Path]:
    found = {path for pattern in MODULES for path in root.glob(pattern)}
    return sorted(path for path in found if path.name not in LEFT_OUT)


class Covering:
    """Tests by module and line, and how long each takes in seconds."""

    def __init__(self, lines: dict[str, dict[str, list[str]]], seconds: dict[str, float]) -> None:
        self._lines, self._seconds = lines, seconds

    def tests(self, path: str, line: int) -> list[str]:
        """The quickest first. A line that runs only at import is recorded for no test. Then the result is all tests in
        the files that test the module."""
        by_line = self._lines.get(path, {})
        found = by_line.get(str(line)) or {test for tests in by_line.values() for test in tests}
        if str(line) not in by_line:
            files = {test.partition("::")[0] for test in found}
            found = [test for test in self._seconds if test.partition("::")[0] in files]
        return sorted(found, key=lambda test: (self._seconds.get(test, 0.0), test))

    @classmethod
    def measure(cls, root: Path, file: Path) -> Covering:
        """Runs TESTS once under coverage (some minutes), in a process of its own; `file` keeps what it found."""
        file.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.mutation.covering", str(file)]
        environment = {**os.environ, "COVERAGE_CORE": "ctrace"}
        subprocess.run(command, cwd=root, env=environment, check=True)
        return cls.read(file)

    @classmethod
    def read(cls, file: Path) -> Covering:
        data = json.loads(file.read_text(encoding="utf-8"))
        return cls(data["lines"], data["seconds"])


def main(file: str) -> int:
    root = Path.cwd()
    measured = coverage.Coverage(data_file=None, config_file=False, include=[str(path) for path in modules(root)])
    contexts = Contexts(measured)
    measured.start()
    status = pytest.main(["-q", "-p", "no:cacheprovider", *TESTS], plugins=[contexts])
    measured.stop()
    if status:
        return int(status)
    data = measured.get_data()
    lines: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for path in data.measured_files():
        for line, tests in data.contexts_by_lineno(path).items():
            if named := sorted(test for test in tests if test):
                lines[Path(path).relative_to(root).as_posix()][str(line)] = named
    Path(file).write_text(json.dumps({"lines": lines, "seconds": contexts.seconds}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
