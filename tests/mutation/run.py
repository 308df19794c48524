"""Plants mistakes in the cores, one at a time, and names those that no test notices: `make mutants`.

A mutation is noticed when a test fails with it. First comes the test that noticed it before, then those that run its
line, the quickest first; if they all pass, a part of the simulation. Each mutation runs in a process of its own, forked
from one that has imported only slow third-party modules. An import hook plants the mistake, so no file changes.

Survivors are listed with the reason that tests/mutation/survivors.yaml gives; one without a reason fails the run.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

import pytest
import yaml

from tests.mutation.covering import SYSTEM_TESTS, Covering, modules
from tests.mutation.rules import Mutation, mutations, plant

ROOT = Path(__file__).parents[2]
SURVIVORS = Path(__file__).with_name("survivors.yaml")
NOTICED = Path(__file__).with_name("noticed.json")  # which tests noticed which mistakes; they are tried first
MIN_SCORE = 0.95
# This time limit also notices a mutation that makes a loop endless.
TIMEOUT_S = 400.0
# Beginning of an answer that says nothing about the mutation, because the process itself failed.
BROKEN = "the process failed"


@dataclass(frozen=True, slots=True)
class Verdict:
    mutation: Mutation
    noticed_by: str  # a test; "timeout"; "" if it survived


class Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that imports one module with its mutation."""

    def __init__(self, module: str, file: Path, code: CodeType) -> None:
        self.module, self.file, self.code = module, file, code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self.file, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)  # noqa: S102 - our own source, with one change


class FirstFailure:
    """A pytest plugin that keeps the first test that fails."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.name = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.name = report.nodeid


def judge(mutation: Mutation, batches: Sequence[Sequence[str]]) -> str:
    """In a process of its own: plant the mistake, run the tests until one fails. What noticed it, or ""."""
    planted = plant(mutation, ROOT)
    assert planted is not None, f"no such place: {mutation.name}"
    return first_failure(mutation.path, planted, batches)


def first_failure(path: str, tree: ast.Module, batches: Sequence[Sequence[str]]) -> str:
    """The first test that fails with this module as the tree has it; "" if all pass."""
    file, module = ROOT / path, path.removesuffix(".py").replace("/", ".")
    assert module not in sys.modules, f"{module} was imported before its mistake was planted"
    sys.meta_path.insert(0, Planted(module, file, compile(tree, str(file), "exec")))
    for tests in batches:
        failure = FirstFailure()
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", f"--rootdir={ROOT}"]
        status = pytest.main([*options, *tests], plugins=[failure]) if tests else 0
        if status == pytest.ExitCode.USAGE_ERROR and not failure.name:
            continue  # a recorded test does not exist any more
        if status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            return failure.name or f"pytest ended with status {int(status)}"
    return ""


def in_child(job: Callable[[], str]) -> tuple[int, int]:
    """Starts a process for the job; returns its pid, and the read end of the pipe for its answer."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    answer = ""
    try:
        os.setsid()  # tests start processes: all of them are ended together
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
        answer = job()
    except BaseException as error:
        answer = f"{BROKEN}: {error!r}"
    finally:
        os.write(writer, answer.encode())
        os._exit(0)


def verdicts(
    chosen: Sequence[Mutation], batches: Callable[[Mutation], Sequence[Sequence[str]]], processes: int
) -> Iterator[Verdict]:
    """Yields verdicts in the order in which they arrive."""
    running: dict[int, tuple[Mutation, int, float]] = {}  # by pid: read end of its pipe, end time
    try:
        yield from _as_they_come(list(reversed(chosen)), running, batches, processes)
    finally:
        for pid in running:  # each leads its own process group, and gets no signal that our group gets
            os.killpg(pid, signal.SIGKILL)


def _as_they_come(
    waiting: list[Mutation],
    running: dict[int, tuple[Mutation, int, float]],
    batches: Callable[[Mutation], Sequence[Sequence[str]]],
    processes: int,
) -> Iterator[Verdict]:
    while waiting or running:
        while waiting and len(running) < processes:
            mutation = waiting.pop()
            tests = batches(mutation)
            pid, reader = in_child(lambda mutation=mutation, tests=tests: judge(mutation, tests))  # type: ignore[misc]
            running[pid] = mutation, reader, time.monotonic() + TIMEOUT_S
        for pid, (mutation, reader, end_s) in list(running.items()):
            late = time.monotonic() > end_s
            if late:
                os.killpg(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if ended:
                del running[pid]
                with os.fdopen(reader, encoding="utf-8") as answer:
                    said = answer.read()
                if status and not said:
                    said = f"the process ended with status {os.waitstatus_to_exitcode(status)}"
                if said.startswith(BROKEN):
                    raise RuntimeError(f"{mutation.name}: {said}")
                yield Verdict(mutation, "timeout" if late else said)
        time.sleep(0.02)


def sample(count: int) -> list[Mutation]:
    """Chooses `count` of all mutations by digest, so that a change of other code does not change the choice."""
    everything = [mutation for path in modules(ROOT) for mutation in mutations(path, ROOT)]
    return sorted(everything, key=lambda mutation: mutation.digest)[:count]


def check_control(mutation: Mutation, batches: Callable[[Mutation], Sequence[Sequence[str]]]) -> None:
    """Raises RuntimeError if the tests fail with the unchanged module: then every mutation would seem noticed."""
    tree = ast.parse((ROOT / mutation.path).read_text(encoding="utf-8"))
    tests = batches(mutation)
    pid, reader = in_child(lambda: first_failure(mutation.path, tree, tests))
    os.waitpid(pid, 0)
    with os.fdopen(reader, encoding="utf-8") as answer:
        if said := answer.read():
            raise RuntimeError(f"the tests fail without a mistake, too: {said}")


def import_what_is_slow() -> None:
    """Imports slow third-party modules, and no module that is mutated."""
    import services.cli  # noqa: F401, I001 - sets gRPC up before it is imported, as tests/conftest.py does
    import grpc.aio  # noqa: F401
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import sortedcontainers  # noqa: F401
    import torch  # noqa: F401


def run_sample(count: int, processes: int, record: bool, reuse_lines: bool, quick: bool) -> int:
    """Tries all chosen mutations. Status 1 if the score is too low, or a survivor has no reason."""
    file = ROOT / ".run" / "mutation-lines.json"
    covering = Covering.read(file) if reuse_lines else Covering.measure(ROOT, file)
    reasons: dict[str, str] = yaml.safe_load(SURVIVORS.read_text(encoding="utf-8")) or {}
    recorded = read_recorded()

    def batches(mutation: Mutation) -> Sequence[Sequence[str]]:
        known = [recorded[mutation.name]] if mutation.name in recorded else []
        return known, covering.tests(mutation.path, mutation.line), () if quick else SYSTEM_TESTS

    chosen = sample(count)
    check_control(chosen[0], batches)
    survived: list[Mutation] = []
    noticed: dict[str, str] = {}
    for verdict in verdicts(chosen, batches, processes):
        if verdict.noticed_by:
            noticed[verdict.mutation.name] = verdict.noticed_by
            if record:
                write_recorded(noticed)
        else:
            survived.append(verdict.mutation)
            print(f"survived  line {verdict.mutation.line} of {verdict.mutation.name}", flush=True)
    score = len(noticed) / len(chosen)
    print(f"\n{len(noticed)} of {len(chosen)} noticed: {score:.1%}")
    for mutation in survived:
        print(f"- {mutation.name}\n  {reasons.get(mutation.name, 'NO REASON GIVEN')}")
    return int(score < MIN_SCORE or any(mutation.name not in reasons for mutation in survived))


def read_recorded() -> dict[str, str]:
    """The test that noticed a mutation, by the mutation's name."""
    recorded: dict[str, str] = json.loads(NOTICED.read_text(encoding="utf-8")) if NOTICED.exists() else {}
    return recorded


def write_recorded(noticed: dict[str, str]) -> None:
    """Called with each verdict, so that an interrupted run keeps its results."""
    kept = {name: test for name, test in sorted((read_recorded() | noticed).items()) if "::" in test}
    NOTICED.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def run_recorded(count: int, first: int, processes: int) -> int:
    """Plants some mutations again that a test noticed in a recorded run, and runs that test. If that test passes now,
    the tests in its folder run. Status 1 if there is a mutation with which none of its tests fails, or if fewer than
    half of the recorded mutations still exist.

    A property test may draw other examples with another version of hypothesis or of the code.
    """
    recorded = read_recorded()
    there = {mutation.name: mutation for path in modules(ROOT) for mutation in mutations(path, ROOT)}
    known = [name for name in recorded if name in there]
    print(f"{len(known)} of {len(recorded)} recorded places still exist")

    def again(mutation: Mutation) -> Sequence[Sequence[str]]:
        test = recorded[mutation.name]
        return [test], [str(Path(test.partition("::")[0]).parent)]

    chosen = [there[known[(first + i) % len(known)]] for i in range(min(count, len(known)))]
    blind = [verdict.mutation for verdict in verdicts(chosen, again, processes) if not verdict.noticed_by]
    for mutation in blind:
        print(f"{recorded[mutation.name]} does not notice {mutation.name} any more, nor does a test beside it")
    return int(bool(blind) or len(known) < len(recorded) / 2)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, default=300, help="mutations to plant (default: 300)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--record", action="store_true", help=f"write {NOTICED.name}, of which CI plants some again")
    parser.add_argument(
        "--reuse-lines", action="store_true", help="do not measure coverage again (only if no line moved)"
    )
    parser.add_argument("--quick", action="store_true", help="do not run the simulation, which is slow")
    parser.add_argument("--recorded", action="store_true", help="plant only what was noticed in a run with --record")
    parser.add_argument("--first", type=int, default=0, help="with --recorded: index of the first mutation")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    import_what_is_slow()
    os.chdir(ROOT)
    if options.recorded:
        return run_recorded(options.sample, options.first, options.processes)
    return run_sample(options.sample, options.processes, options.record, options.reuse_lines, options.quick)


if __name__ == "__main__":
    sys.exit(main())
