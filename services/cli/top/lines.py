"""The lines that show a snapshot. Each section is a list of lines, with its title first.

Text of clients (tenants) and of other machines (names of workers) never controls the terminal. Colours only repeat what
the characters say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from services.cli.top.bars import bar, count, duration, fixed, percent, seconds, sparkline, stacked

TITLE, DIM, CHOSEN, BAD = "bold cyan", "dim", "reverse", "bold red"
QUEUE, LINK, COMPUTE = "▒", "░", "█"
# Cells of a block map, in the order of the legend: what the cache sends, what is shown, and its meaning.
CELLS = {".": ("·", "free"), "c": ("░", "cached"), "u": ("▓", "in use"), "s": ("█", "shared"), "p": ("▀", "pinned")}
_TO_SHOWN = str.maketrans({sent: shown for sent, (shown, _) in CELLS.items()})
STATES = {"ready": "green", "starting": "yellow", "draining": "yellow", "down": BAD}
MAX_BAR = 24
# Lines of a block map, and its cells from the least to the most used.
MAP_LINES = 4
BY_USE = ".cpus"


@dataclass(frozen=True, slots=True)
class Choice:
    """A worker (by its number) or a tenant (by its name)."""

    kind: str
    name: int | str


@dataclass(frozen=True, slots=True)
class Lines:
    """Makes the lines of one snapshot for a terminal of `width` cells."""

    snapshot: dict[str, Any]
    width: int
    choice: Choice | None = None
    rates: Sequence[float] = ()

    @property
    def _scheduler(self) -> dict[str, Any]:
        """Not to be used without a scheduler."""
        view: dict[str, Any] = self.snapshot["scheduler"]
        return view

    def choices(self) -> list[Choice]:
        """What can be chosen, in the order in which it is shown."""
        if self.snapshot["scheduler"] is None:
            return []
        workers = [Choice("worker", one["worker"]) for one in self._scheduler["workers"]]
        return workers + [Choice("tenant", one["tenant"]) for one in self._scheduler["tenants"]]

    def overview(self) -> list[Text]:
        gateway = self.snapshot["gateway"]
        rate = Text.assemble((f"{gateway['tokens_per_s']:,.1f} tokens/s", "bold"))
        if self.rates:
            rate.append(" " + sparkline(self.rates, max(min(30, self.width - 50), 8)), "green")
        if self.snapshot["scheduler"] is None:
            return [rate, Text("no scheduler: the gateway has no connection to it", BAD)]
        view = self._scheduler
        load = view["load"]
        waits = f", {seconds(load['waiting_s'])} to serve" if load["num_waiting"] else ""
        queue = Text.assemble(
            (f"{count(load['num_waiting'])} waiting", "bold"),
            f" ({count(load['num_waiting_tokens'])} tokens{waits})  ",
            (f"{count(load['num_running'])} running", "bold"),
            f" of {count(load['num_slots'])}  ",
        )
        if view["num_offline_running"] or view["num_offline_waiting"]:
            queue.append(f"offline {view['num_offline_running']} running, {view['num_offline_waiting']} waiting")
        reused = percent(load["prefix_hit_tokens"], load["prefix_query_tokens"])
        totals = Text.assemble(
            f"preemptions {count(load['num_preemptions'])}  finished {count(view['num_finished'])}  rejected "
            f"{count(view['num_rejected'])}  ",
            (f"failures {count(view['num_failures'])}", BAD if view["num_failures"] else ""),
            f"  reused {reused}  steps {count(view['num_steps'])}",
        )
        found = [rate, queue, totals]
        if not view["cache_connected"]:
            found.append(Text("no cache: no step is planned until it is back", BAD))
        return found

    def latencies(self) -> list[Text]:
        gateway = self.snapshot["gateway"]
        title = f"{'last ' + duration(gateway['window_s']):<12}{'p50':>9}{'p90':>9}{'p99':>9}"
        found = [Text(title, TITLE)]
        for name, label in (("ttft_s", "TTFT"), ("itl_s", "ITL"), ("e2e_s", "end to end")):
            values = (seconds(gateway[name][part]) for part in ("p50", "p90", "p99"))
            found.append(Text(f"{label:<12}" + "".join(f"{value:>9}" for value in values)))
        return found

    def policies(self) -> list[Text]:
        chosen, failed = self._scheduler["policies"], self._scheduler["failed_policies"]
        lines = [Text.assemble(("policies ", TITLE), (chosen["preset"] or "(no preset)", "bold"))]
        for kind in ("order", "capacity", "batch", "preemption", "placement"):
            policy = f"{chosen[kind]}{' FAILED' if kind in failed else ''}"
            if lines[-1].cell_len + len(kind) + len(policy) + 3 > self.width and len(lines) == 1:
                lines.append(Text(" " * 7))
            lines[-1].append(f"  {kind} ", DIM)
            lines[-1].append(policy, BAD if kind in failed else "")
        return lines

    def workers(self) -> list[Text]:
        """The title and a line for each worker."""
        name = 16 if self.width >= 100 else 10
        size = max(min((self.width - name - 52) // 2, MAX_BAR), 4)
        head = f"  {'worker':<{name}} {'slots':<{size + 8}} {'blocks':<{size + 12}} plans  step"
        found = [Text(head, TITLE)]
        for one in self._scheduler["workers"]:
            chosen = self.choice == Choice("worker", one["worker"])
            used = one["num_blocks"] - one["num_available_blocks"]
            slots = f"{bar(one['num_running'], one['num_slots'], size)} {one['num_running']}/{one['num_slots']}"
            blocks = f"{bar(used, one['num_blocks'], size)} {used}/{one['num_blocks']}"
            line = Text.assemble((f"{'>' if chosen else ' '} {fixed(one['name'], name)} ", CHOSEN if chosen else ""))
            line.append(f"{slots:<{size + 8}} {blocks:<{size + 12}} {one['in_flight']}/{one['window']}    ")
            line.append(f"{seconds(step_s(one))}{'  drains' if one['draining'] else ''}")
            found.append(line)
        if not self._scheduler["workers"]:
            found.append(Text("  no worker is attached", BAD))
        return found

    def chosen(self) -> list[Text]:
        """More about the chosen worker or tenant."""
        if self.choice is None or self.snapshot["scheduler"] is None:
            return []
        if self.choice.kind == "worker":
            for one in self._scheduler["workers"]:
                if one["worker"] == self.choice.name:
                    return self._worker(one)
        for one in self._scheduler["tenants"]:
            if self.choice == Choice("tenant", one["tenant"]):
                running, waiting = (
                    sum(other[name] for other in self._scheduler["tenants"])
                    for name in ("running_tokens", "waiting_tokens")
                )
                shares = percent(one["running_tokens"], running), percent(one["waiting_tokens"], waiting)
                said = f"has {shares[0]} of the running tokens and {shares[1]} of the waiting ones"
                return [Text(f"  {_tenant(one)}: {said}", DIM)]
        return []

    def _worker(self, one: dict[str, Any]) -> list[Text]:
        per_token, per_row = seconds(one["token_s"]), seconds(one["row_s"])
        fitted = f"step {seconds(one['base_s'])} + {per_token}/prompt token + {per_row}/row"
        fitted += f" + {seconds(1000 * one['context_s'])}/1,000 attended tokens"
        more = f"{one['num_prefilling']} prefilling, {one['num_offline']} offline, {one['num_swapped_out']} swapped out"
        found = [Text(f"  {fitted}", DIM), Text(f"  {more}, {one['num_free_host_blocks']} host blocks free", DIM)]
        cache = self.snapshot.get("cache")
        for shown in (cache or {}).get("maps", ()):
            if shown["worker"] == one["worker"]:
                size = max(self.width - 4, 8)
                cells, each = condensed(shown["cells"], MAP_LINES * size)
                legend = "  ".join(f"{cell} {meaning}" for cell, meaning in CELLS.values())
                found.append(Text(f"  blocks, {each * shown['blocks_per_cell']} in a cell:  {legend}", DIM))
                cells = cells.translate(_TO_SHOWN)
                found += [Text("  " + cells[i : i + size]) for i in range(0, len(cells), size)]
        return found

    def tenants(self) -> list[Text]:
        """The title and a line for each tenant. Empty if no request runs or waits."""
        tenants = self._scheduler["tenants"]
        if not tenants:
            return []
        name = 16 if self.width >= 100 else 10
        size = max(min((self.width - name - 40) // 2, MAX_BAR), 4)
        found = [Text(f"  {'tenant':<{name}} {'tokens running':<{size + 12}} {'tokens waiting':<{size + 12}}", TITLE)]
        most = {part: max(one[part] for one in tenants) for part in ("running_tokens", "waiting_tokens")}
        for one in tenants:
            chosen = self.choice == Choice("tenant", one["tenant"])
            line = Text.assemble((f"{'>' if chosen else ' '} {fixed(_tenant(one), name)} ", CHOSEN if chosen else ""))
            for part, largest in most.items():
                line.append(f"{f'{bar(one[part], largest, size)} {count(one[part])}':<{size + 12}} ")
            found.append(line)
        if (hidden := self._scheduler["num_tenants"] - len(tenants)) > 0:
            found.append(Text(f"  {hidden} smaller tenants", DIM))
        return found

    def steps(self, limit: int) -> list[Text]:
        """The last steps: of the chosen worker, if one is chosen."""
        steps = self._scheduler["steps"]
        if self.choice is not None and self.choice.kind == "worker":
            steps = [one for one in steps if one["worker"] == self.choice.name]
        legend = f"{QUEUE} cache  {LINK} link and queue  {COMPUTE} compute"
        found = [Text.assemble((f"{len(steps)} steps since the last snapshot", TITLE), (f"   {legend}", DIM))]
        shown = steps[-limit:]
        longest = max((one["ended_s"] - one["planned_s"] for one in shown), default=0.0)
        width = max(min(self.width - 52, 60), 6)
        for one in shown:
            computed = min(one["computed_s"], one["ended_s"] - one["sent_s"])
            parts = [
                (one["sent_s"] - one["planned_s"], QUEUE),
                (one["ended_s"] - one["sent_s"] - computed, LINK),
                (computed, COMPUTE),
            ]
            row = f"  {one['worker']:>3} {one['step']:>8} {stacked(parts, longest, width)} "
            row += f"{seconds(one['ended_s'] - one['planned_s']):>8}  {one['num_decodes']:>4} decodes"
            if one["num_prefills"]:
                row += f" {one['new_tokens']} prompt tokens"
            found.append(Text(row))
        return found

    def services(self) -> list[Text]:
        """One line, if the gateway knows the services. Workers that are ready and were never restarted are only
        counted, because the workers' table shows them."""
        services = self.snapshot.get("services")
        if not services:
            return []
        line = Text.assemble(("services", TITLE))
        num_fine = 0
        for one in services:
            if one["kind"] == "worker" and one["state"] == "ready" and not one["num_restarts"]:
                num_fine += 1
                continue
            own = one["name"] not in ("", one["kind"])
            line.append(f"  {one['kind']} {fixed(one['name'], 12).strip()} " if own else f"  {one['kind']} ")
            line.append(one["state"], STATES.get(one["state"], ""))
            if one["up_s"] is not None:
                line.append(f" {duration(one['up_s'])}", DIM)
            if restarts := one["num_restarts"]:
                line.append(f" ({restarts} {'restart' if restarts == 1 else 'restarts'})", "yellow")
        if num_fine:
            line.append(f"  {num_fine} {'worker' if num_fine == 1 else 'workers'} ")
            line.append("ready", STATES["ready"])
        return [line]


def condensed(cells: str, limit: int) -> tuple[str, int]:
    """At most `limit` cells, and how many of the given cells each stands for. A cell shows the most used of them."""
    each = -(-len(cells) // max(limit, 1)) or 1
    groups = (cells[i : i + each] for i in range(0, len(cells), each))
    return "".join(max(group, key=BY_USE.find) for group in groups), each


def step_s(worker: dict[str, Any]) -> float | None:
    """The fitted time of a step in which all running sequences of the worker decode, without attention. None: not known
    yet."""
    fitted: float = worker["base_s"] + worker["row_s"] * worker["num_running"]
    return fitted or None


def _tenant(one: dict[str, Any]) -> str:
    return one["tenant"] or "(no tenant)"
