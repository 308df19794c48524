"""`paceline scenario`: runs a small workload through the real cores, and shows what every step decided."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from scheduler_svc.core.policy.order import PolicyError
from services.cli.arguments import Parser, console, usage_error
from simulator.scenario import PolicyFailed, ScenarioOutcome, ScenarioStep, play
from simulator.scenario_file import Scenario

PROG = "paceline scenario"


def parser() -> Parser:
    parser = Parser(prog=PROG, description=__doc__)
    parser.add_argument("file", help="a scenario as JSON; - reads standard input")
    parser.add_argument("--preset", help="this preset instead of the file's")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        values = _read(arguments.file)
        if arguments.preset is not None and isinstance(values, dict):
            values["preset"] = arguments.preset or "none"
        outcome = play(Scenario.model_validate(values))
    except ValidationError as error:
        return usage_error(PROG, _first(error))
    except (_NoScenario, PolicyError) as error:
        return usage_error(PROG, str(error))
    except PolicyFailed as failure:
        at = traceback.extract_tb(failure.error.__traceback__)[-1]
        where = f"{Path(at.filename).name}:{at.lineno}"
        return usage_error(PROG, f"a policy failed: {type(failure.error).__name__}: {failure.error} ({where})")
    if arguments.json:
        print(json.dumps(outcome.as_json()))
    else:
        show(outcome, console())
    return 0


class _NoScenario(Exception):
    """The file is missing or not JSON."""


def _read(name: str) -> Any:
    try:
        return json.loads(sys.stdin.read() if name == "-" else Path(name).read_text())
    except OSError as error:
        raise _NoScenario(f"{name}: {error.strerror}") from error
    except ValueError as error:
        raise _NoScenario(f"{name}: no JSON: {error}") from error
    except RecursionError as error:
        raise _NoScenario(f"{name}: nested too deeply") from error


def _first(error: ValidationError) -> str:
    """The first mistake, with the path of its field."""
    first = error.errors(include_url=False)[0]
    parts = [str(part) for part in first["loc"]]
    if parts[:1] == ["preset"]:
        del parts[1:2]  # the name of the alternative that pydantic tried
    if parts[-1:] == ["[key]"]:
        parts.pop()
    message = first["msg"].removeprefix("Value error, ")
    # A rule over several fields names the fields itself.
    return f"{'.'.join(parts)}: {message}" if parts else message


def show(outcome: ScenarioOutcome, out: Console) -> None:
    """One row per step. Consecutive steps with the same decisions share a row."""
    table = Table(box=None, pad_edge=False)
    for title in ("step", "prefill", "decode", "preempted", "finished", "free", "cached", "waiting", "running"):
        justify: Literal["left", "right"] = "right" if title in ("free", "cached", "waiting", "running") else "left"
        table.add_column(title, justify=justify, overflow="fold")
    steps = outcome.steps
    i = 0
    while i < len(steps):
        last = i
        while last + 1 < len(steps) and _decides(steps[last + 1]) == _decides(steps[i]) and _is_plain(steps[last]):
            last += 1
        step = steps[last]
        prefill, decode, preempted, finished = _decides(steps[i])
        if last > i:
            finished = _decides(step)[3]
        number = str(i) if i == last else f"{i}-{last}"
        counts = (step.free_blocks, step.cached_blocks, step.waiting, step.running)
        table.add_row(number, prefill, decode, preempted, finished, *map(str, counts))
        i = last + 1
    out.print(table)
    if outcome.stuck:
        out.print("no further progress: the waiting requests can never run under these policies")
    out.print(f"{outcome.num_steps} steps, {sum(outcome.generated_tokens.values())} tokens")


def _decides(step: ScenarioStep) -> tuple[str, str, str, str]:
    prefill = " ".join(
        f"{s.id}:{s.tokens}" + (f"+{s.cached_tokens} cached" if s.cached_tokens else "")
        for s in step.scheduled
        if s.phase == "prefill"
    )
    decode = ",".join(s.id for s in step.scheduled if s.phase == "decode")
    preempted = " ".join(f"{p['id']}({p['mode']})" for p in step.preempted)
    rejected = " ".join(f"{r['id']}: {r['reason']}" for r in step.rejected)
    return prefill, f"{{{decode}}}" if decode else "", preempted, " ".join([*step.finished, rejected]).strip()


def _is_plain(step: ScenarioStep) -> bool:
    return not (step.preempted or step.finished or step.rejected)
