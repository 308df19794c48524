"""`paceline scenario`: run a small workload through the real cores and show what every step decided."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from scheduler_svc.core.policy import PolicyError
from simulator.scenario import Outcome, Scenario, Step, play

USAGE_ERROR = 2


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="paceline scenario", description=__doc__)
    parser.add_argument("file", help="a scenario as JSON; - reads standard input")
    parser.add_argument("--preset", help="this preset instead of the file's")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    try:
        text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text()
        values = json.loads(text)
        if arguments.preset and isinstance(values, dict):
            values["preset"] = arguments.preset
        outcome = play(Scenario.model_validate(values))
    except OSError as error:
        return _fail(f"{arguments.file}: {error.strerror}")
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        return _fail(f"{field + ': ' if field else ''}{first['msg']}")
    except ValueError as error:
        return _fail(f"{arguments.file}: no JSON: {error}")
    except PolicyError as error:
        return _fail(str(error))
    if arguments.json:
        print(json.dumps(outcome.as_json()))
    else:
        show(outcome, Console())
    return 0


def _fail(message: str) -> int:
    print(f"paceline scenario: {message}", file=sys.stderr)
    return USAGE_ERROR


def show(outcome: Outcome, console: Console) -> None:
    """A row a step; steps that decide the same are one row."""
    table = Table(box=None, pad_edge=False)
    for title in ("step", "prefill", "decode", "preempted", "finished", "free", "cached", "waiting", "running"):
        table.add_column(title, justify="right" if title in ("free", "cached", "waiting", "running") else "left")
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
    console.print(table)
    if outcome.stuck:
        console.print("no further progress: what waits can never run under these policies")
    console.print(f"{outcome.num_steps} steps, {sum(outcome.generated_tokens.values())} tokens", highlight=False)


def _decides(step: Step) -> tuple[str, str, str, str]:
    prefill = " ".join(
        f"{s.id}:{s.tokens}" + (f"+{s.cached_tokens} cached" if s.cached_tokens else "")
        for s in step.scheduled
        if s.phase == "prefill"
    )
    decode = ",".join(s.id for s in step.scheduled if s.phase == "decode")
    preempted = " ".join(f"{p['id']}({p['mode']})" for p in step.preempted)
    rejected = " ".join(f"{r['id']}: {r['reason']}" for r in step.rejected)
    return prefill, f"{{{decode}}}" if decode else "", preempted, " ".join([*step.finished, rejected]).strip()


def _is_plain(step: Step) -> bool:
    return not (step.preempted or step.finished or step.rejected)
