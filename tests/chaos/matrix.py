"""The kill matrix: every service × fault × workload on real processes, token for token.

python -m tests.chaos.matrix [--cells worker,decode] [--rounds 3] [--seed 1] [--out FILE]

`--cells`: plays only the cells that have these words, such as worker,SIGKILL,decode. Another seed gives other prompts
and random seeds. Results go to FILE.json, a table of pauses to FILE.md. docs/reliability-measurements.md sums them up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.chaos.moments import FAULTS, SERVICES, Cell, Moment, judge
from tests.chaos.workloads import GATEWAY_FLAGS, GATEWAYS, SCHEDULER_FLAGS, WORKER_FLAGS, WORKERS, WORKLOADS, varied
from tests.support.asking import Answer, Gateway, Question, ask, asker
from tests.support.stack import Stack

# For each kind of service, the process that gets the fault.
VICTIMS = {"worker": "worker-1", "cache": "cache", "scheduler": "scheduler", "gateway": "gateway"}
# By the service that is cut off: the connections to break, each by the name of the service that dials.
LINKS = {
    "worker": ["worker-1"],
    "cache": ["scheduler"],
    "scheduler": [*WORKERS, *GATEWAYS, "scheduler"],
    "gateway": ["gateway"],
}
# A freeze is long enough to be noticed: a service gives up a peer after 1.5 s without a heartbeat, or after at most 2.5
# s without an answer to a ping. Then the process goes on as a zombie.
FREEZE_S, CUT_S = 6.0, 0.5
# Seconds of silence after which a client takes its gateway for dead and goes to the other one.
PATIENCE_S = 3.0
TIMEOUT_S = 90.0
# A cell that leaves its stack broken has failed; the cells after it get another stack.
MOST_STACKS = 5


@dataclass
class Outcome:
    """The results of a cell: the longest pause of each stream that the fault met, and the errors."""

    cell: Cell
    pauses_s: list[float] = field(default_factory=list)
    num_breaks: int = 0
    problems: list[str] = field(default_factory=list)


def new_stack(folder: Path) -> Stack:
    flags = [*GATEWAY_FLAGS, "--response-store", f"sqlite:///{folder}/responses.db"]  # shared, as gateways must
    return Stack(folder, worker_flags=WORKER_FLAGS, scheduler_flags=SCHEDULER_FLAGS, gateway_flags=flags, proxied=True)


class Matrix:
    """A running stack on which cells are played, one after the other. Each leaves it as it was."""

    def __init__(self, stack: Stack, seed: int = 0) -> None:
        self.stack = stack
        self._seed = seed
        self._right: dict[str, list[Answer]] = {}
        self._salts = itertools.count()

    async def play(self, cell: Cell) -> Outcome:
        """Raises AssertionError if the stack does not come to rest again."""
        outcome = Outcome(cell)
        right = await self._undisturbed(cell.workload)
        loop = asyncio.get_running_loop()
        is_left = cell.service == "gateway" and cell.fault in ("SIGKILL", "SIGSTOP", "silent")
        gateways, patience_s = (self.stack.gateways, PATIENCE_S) if is_left else (self.stack.gateways[:1], TIMEOUT_S)
        async with self._asked(cell.workload, gateways, patience_s) as (answers, serving):
            await self._until(lambda: WORKLOADS[cell.workload].is_reached(self.stack, answers), serving)
            moment = Moment([cell], self.stack.gateways[0], loop.time())
            caught = [answer for answer in answers if not answer.is_done]
            await fault(self.stack, cell)
            await asyncio.wait([serving], timeout=TIMEOUT_S)
        streams = [answer for answer in caught if answer.question.body["stream"]]
        outcome.pauses_s = sorted(round(answer.longest_pause_s(moment.begin_s), 3) for answer in streams)
        if not caught:
            outcome.problems.append("all requests had ended before the fault")
        for number, (answer, whole) in enumerate(zip(answers, right, strict=True)):
            outcome.num_breaks += len(answer.breaks)
            if difference := answer.differs(whole):
                outcome.problems.append(f"request {number}: {difference}"[:600])
            verdicts = [judge(broken, [moment]) for broken in answer.breaks]
            problems = [verdict.problem for verdict in verdicts if verdict.problem]
            if problems or (answer.breaks and not is_left):
                outcome.problems.append(f"request {number}: {problems or answer.breaks}"[:600])
        await asyncio.to_thread(wait_rest, self.stack)
        return outcome

    async def _undisturbed(self, workload: str) -> list[Answer]:
        if workload not in self._right:
            async with self._asked(workload, self.stack.gateways[1:], TIMEOUT_S) as (answers, serving):
                await serving
            self._right[workload] = answers
            await asyncio.to_thread(wait_rest, self.stack)
        return self._right[workload]

    @contextlib.asynccontextmanager
    async def _asked(
        self, workload: str, gateways: list[Gateway], patience_s: float
    ) -> AsyncIterator[tuple[list[Answer], asyncio.Future[list[None]]]]:
        """Ask all questions at once, with a new salt, so that no prompt is in the prefix cache."""
        salt = f"matrix-{next(self._salts)}"
        questions = [varied(question, self._seed) for question in WORKLOADS[workload].questions]
        answers = [Answer(salted(question, salt)) for question in questions]
        async with asker(patience_s) as http:
            serving = asyncio.gather(*(ask(http, gateways, f"{salt}-{i}", answer) for i, answer in enumerate(answers)))
            try:
                yield answers, serving
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

    async def _until(self, condition: Callable[[], bool], serving: asyncio.Future[list[None]]) -> None:
        while not serving.done() and not await asyncio.to_thread(condition):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def salted(question: Question, salt: str) -> Question:
    return replace(question, body=question.body | {"cache_salt": salt})


async def fault(stack: Stack, cell: Cell) -> None:
    """Cause the fault, and undo it as an operator would. Raises AssertionError if a drained service fails."""
    victim, links = VICTIMS[cell.service], [stack.links[name] for name in LINKS[cell.service]]
    match cell.fault:
        case "SIGKILL":
            await asyncio.to_thread(stack.kill, victim)
            stack.start(victim)
        case "SIGTERM":
            process = stack.processes[victim]
            await asyncio.to_thread(stack.kill, victim, signal.SIGTERM)
            assert process.returncode == 0, f"{victim} ended with {process.returncode}"
            stack.start(victim)
        case "SIGSTOP":
            stack.processes[victim].send_signal(signal.SIGSTOP)
            await asyncio.sleep(FREEZE_S)
            stack.processes[victim].send_signal(signal.SIGCONT)
        case _:
            for link in links:
                link.cut() if cell.fault == "cut" else link.silence()
            await asyncio.sleep(CUT_S if cell.fault == "cut" else FREEZE_S)
            for link in links:
                link.heal()


def wait_services(stack: Stack) -> None:
    for name in GATEWAYS:
        stack.wait_ready(f"http://127.0.0.1:{stack.gateway_ports[name][0]}")
    stack.wait_metric("paceline_scheduler_num_workers", len(WORKERS))


def wait_rest(stack: Stack) -> None:
    """All services are attached, no request runs or waits, and no block is used."""
    wait_services(stack)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio"):
        stack.wait_metric(f"paceline_scheduler_{name}", 0)
    for name in ("paceline_cache_blocks", "paceline_cache_host_blocks"):
        stack.wait_total(name, 'state="used"', 0, of="cache")


async def play_all(stack: Stack, cells: Iterable[Cell], tell: Callable[[Outcome], None], seed: int = 0) -> None:
    """Stops when the stack is broken: the results of later cells would mean nothing."""
    matrix = Matrix(stack, seed)
    for cell in cells:
        try:
            tell(await matrix.play(cell))
        except AssertionError as error:
            tell(Outcome(cell, problems=[f"{error}"]))
            return
        if any(process.poll() is not None for process in stack.processes.values()):
            return


def up(stack: Stack) -> Stack:
    stack.up(len(WORKERS))
    stack.start_gateway(GATEWAYS[1])
    return stack


def cells_named(words: Iterable[str]) -> list[Cell]:
    """The cells that match the words. A column (service, fault, workload) without a word matches every cell."""
    wanted = set(words)
    if unknown := wanted - {*SERVICES, *FAULTS, *WORKLOADS}:
        raise SystemExit(f"matrix: no such service, fault or workload: {', '.join(sorted(unknown))}")
    places = [[name for name in names if name in wanted] or list(names) for names in (SERVICES, FAULTS, WORKLOADS)]
    pairs, workloads = list(itertools.product(*places[:2])), places[2]
    # In this order, a run that ends early has seen each fault and each workload.
    turns = itertools.product(range(len(workloads)), enumerate(pairs))
    return [Cell(service, fault, workloads[(turn + i) % len(workloads)]) for turn, (i, (service, fault)) in turns]


def table(outcomes: list[Outcome]) -> str:
    """Markdown: the median and the longest pause in seconds."""
    names = [name for name in WORKLOADS if any(outcome.cell.workload == name for outcome in outcomes)]
    lines = [f"| service | fault | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for service, what in itertools.product(SERVICES, FAULTS):
        texts = []
        for name in names:
            mine = [outcome for outcome in outcomes if outcome.cell == (service, what, name)]
            pauses = [pause for outcome in mine for pause in outcome.pauses_s]
            text = f"{statistics.median(pauses):.1f} / {max(pauses):.1f}" if pauses else ""
            texts.append(f"{text} **wrong**" if any(outcome.problems for outcome in mine) else text)
        if any(texts):
            lines.append(f"| {service} | {what} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="", help="words with commas between them (default: all cells)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each cell is played")
    parser.add_argument("--seed", type=int, default=0, help="changes prompts and random seeds")
    parser.add_argument("--out", type=Path, help="where the table goes, without suffix")
    arguments = parser.parse_args()
    cells = cells_named(word for word in arguments.cells.split(",") if word) * arguments.rounds
    folder = Path(tempfile.mkdtemp(prefix="paceline-chaos-"))
    print(f"{len(cells)} cells; logs in {folder}")
    began_s = time.monotonic()

    outcomes: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        worst = f"{outcome.pauses_s[-1]:5.1f} s" if outcome.pauses_s else "      -"
        line = (
            f"{time.monotonic() - began_s:6.0f} s  {' '.join(outcome.cell):28} {worst}  breaks {outcome.num_breaks:3}"
        )
        print(line, *outcome.problems, sep="\n         ", flush=True)
        if arguments.out is not None:
            arguments.out.with_suffix(".md").write_text(table(outcomes))
            told = ",\n".join(json.dumps(asdict(outcome)) for outcome in outcomes)
            arguments.out.with_suffix(".json").write_text(f"[\n{told}\n]\n")

    for _ in range(MOST_STACKS):
        stack = new_stack(folder)
        try:
            asyncio.run(play_all(up(stack), cells[len(outcomes) :], tell, arguments.seed))
        finally:
            stack.down()
        if len(outcomes) == len(cells):
            break
    print(table(outcomes))
    return int(any(outcome.problems for outcome in outcomes) or len(outcomes) < len(cells))


if __name__ == "__main__":
    sys.exit(main())
