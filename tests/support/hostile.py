"""Policies that misbehave. `hostile` makes a correct policy with one hook that does a wrong thing at random calls."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from scheduler_svc.core.policy.views import Paused
from scheduler_svc.core.workers.steps import OutOfBlocks
from scheduler_svc.policies.api import (
    CapacityPolicy,
    FleetView,
    PolicyError,
    RequestView,
    Running,
    Step,
    Verdict,
    WorkerView,
)
from scheduler_svc.policies.batch.decode_first import DecodeFirst
from scheduler_svc.policies.capacity.watermark import Watermark
from scheduler_svc.policies.order.fcfs import FirstComeFirstServed
from scheduler_svc.policies.placement.prefix_first import PrefixFirst
from scheduler_svc.policies.preemption.last_in import LastIn

GOOD: dict[str, type] = {
    "order": FirstComeFirstServed,
    "capacity": Watermark,
    "batch": DecodeFirst,
    "preemption": LastIn,
    "placement": PrefixFirst,
}
HOOKS = {
    "order": ("add", "remove", "rematched", "started", "stopped", "ordered", "hopeless"),
    "capacity": ("begin", "admit", "planned"),
    "batch": ("schedule", "planned"),
    "preemption": ("victims",),
    "placement": ("begin", "place", "bound"),
}
# (policy, the correct hook, the arguments of the call) -> the return value
Deed = Callable[[Any, Callable[..., Any], tuple[Any, ...]], Any]


class Raises(CapacityPolicy):
    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        raise ZeroDivisionError("division by zero")


def hostile(kind: str, hook: str, deed: Deed, rng: random.Random, rate: float) -> Any:
    """A policy of this kind. At a share `rate` of its calls, the hook does the deed."""
    base = GOOD[kind]

    def bad(self: Any, *arguments: Any) -> Any:
        def good(*instead: Any) -> Any:
            return getattr(base, hook)(self, *instead)

        if rng.random() < rate:
            self.deeds += 1
            return deed(self, good, arguments)
        return good(*arguments)

    return type(f"Hostile{base.__name__}", (base,), {hook: bad, "deeds": 0, "kept": None})()


# ── at every hook ────────────────────────────────────────────────────────────────────────────────────────────────────


def raises(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    raise [ValueError("no"), KeyError(1), StopIteration(), RecursionError(), AssertionError(), PolicyError("x")][
        self.deeds % 6
    ]


def raises_after(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    good(*arguments)
    raise ValueError("too late")


def writes(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Tries to change the views in the arguments, and the views that a step or a fleet lists. All must be read-only."""
    for given in arguments:
        write_to(given)
        if isinstance(given, Step):
            for sequence in given.running:
                write_to(sequence)
                write_to(sequence.request)
            for request in given.waiting():
                write_to(request)
            for request, _, _ in given.rejected:
                write_to(request)
        for worker in given.workers if isinstance(given, FleetView) else ():
            write_to(worker)
        for worker in given if isinstance(given, list) else ():
            write_to(worker)
    return good(*arguments)


def write_to(given: object) -> None:
    if not isinstance(given, Step | Running | RequestView | FleetView | WorkerView):
        return
    for name in dir(given):
        if name.startswith("_"):
            continue
        for attempt in (lambda: setattr(given, name, 10**9), lambda: delattr(given, name)):  # noqa: B023
            try:
                attempt()
            except AttributeError:
                continue
            raise AssertionError(f"{type(given).__name__}.{name} can be changed")


def uses_an_old_step(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    step = next((given for given in arguments if isinstance(given, Step)), None)
    old, self.kept = self.kept, step
    if old is not None:
        old.run_decodes()
    return good(*arguments)


EVERYWHERE: list[Deed] = [raises, raises_after, writes]


# ── order ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def answer(value: Any) -> Deed:
    def answers(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return value

    return answers


def twice(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Any]:
    for item in good(*arguments):
        yield item
        yield item


def for_ever(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Any]:
    return itertools.cycle(list(good(*arguments)))


def leaves_out(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Any]:
    return itertools.islice(good(*arguments), 1, None)


def breaks_off(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Any]:
    yield from itertools.islice(good(*arguments), 1)
    raise ValueError("in the middle")


def names_the_gone(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Any]:
    """Returns the waiting requests, and those that it returned earlier and that wait no longer."""
    self.kept = self.kept or []
    self.kept += [view for view in good(*arguments) if view not in self.kept]
    return iter(self.kept)


# The correct order policy gives up no request, so these deeds take requests from its `ordered`.


def gives_up_twice(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Any]:
    for view in self.ordered(*arguments):
        yield view
        yield view


def gives_up_for_ever(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Any]:
    return itertools.cycle(list(self.ordered(*arguments)))


def gives_up_and_breaks_off(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Any]:
    yield from self.ordered(*arguments)
    raise ValueError("after all")


def gives_up_the_gone(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Any]:
    waiting, known = set(self.ordered(*arguments)), self.kept or set()
    self.kept = known | waiting
    return iter(known - waiting)


def gives_up_by_name(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Any]:
    """Objects that look like views."""
    return iter([SimpleNamespace(arrival_index=view.arrival_index) for view in self.ordered(*arguments)])


# ── capacity ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def pauses_twice(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    step = arguments[0]
    step.pause([*step.running[-1:], *step.running[-1:]])
    return good(*arguments)


def pauses_all(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Pauses all running sequences at the start of the schedule."""
    arguments[0].pause(arguments[0].running)
    return good(*arguments)


def pauses_nonsense(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    arguments[0].pause([None])


def raises_paused(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    raise Paused([5])  # type: ignore[list-item]


def raises_lack(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    raise OutOfBlocks("many")  # type: ignore[arg-type]


def decides_in_admit(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    step, request, _ = arguments
    step.consider(request, 1)
    return Verdict.ADMIT


def admits_all(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """This is allowed, but there may be no room."""
    return Verdict.ADMIT


# ── batch ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def runs(tokens: Any) -> Deed:
    def runs_so_many(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        [step] = arguments
        for sequence in step.running:
            step.run(sequence, tokens)
        good(step)

    return runs_so_many


def runs_twice(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    good(*arguments)
    for sequence in arguments[0].running:
        arguments[0].run(sequence, 1)


def decodes_twice(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    arguments[0].run_decodes()
    arguments[0].run_decodes()


def runs_the_gone(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    [step] = arguments
    old, self.kept = self.kept, step.running
    for sequence in old or ():
        step.run(sequence, 1)


class Liar(Running):
    """Claims that it decodes, and that a million tokens of its prompt remain."""

    __slots__ = ()
    is_decoding = True
    remaining_tokens = 10**6


def runs_a_lie(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    [step] = arguments
    for sequence in step.running:
        step.run(Liar(step._worker, sequence.slot, sequence._request), 10)


def admits(tokens: Any) -> Deed:
    def admits_with_so_many(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        [step] = arguments
        for request in step.waiting():
            step.admit(request, tokens)
        good(step)

    return admits_with_so_many


def admits_twice(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    [step] = arguments
    for request in step.waiting():
        if step.admit(request, 1) is Verdict.ADMIT:
            step.place(request, 1)


def admits_the_gone(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    [step] = arguments
    old, self.kept = self.kept, [sequence.request for sequence in step.running]
    for request in [*(old or ()), *self.kept]:
        step.admit(request, 1)


def places_unasked(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    for request in arguments[0].waiting():
        arguments[0].place(request, 1)


def does_nothing(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pass


def swallows(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Ignores every error that the step raises."""
    [step] = arguments
    for call in (step.run_decodes, lambda: good(step), step.run_decodes):
        with contextlib.suppress(Exception):
            call()


def rejects_nonsense(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    arguments[0].reject(None, "no", 5)


def decides_when_planned(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    arguments[0].run_decodes()


# ── preemption ───────────────────────────────────────────────────────────────────────────────────────────────────────


def old_victims(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    old, self.kept = self.kept, list(arguments[0].running)
    return old


# ── placement ────────────────────────────────────────────────────────────────────────────────────────────────────────


def waits_for_a_full_worker(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    _, workers, full = arguments
    return full[0] if full else workers[-1]


def places_on_an_old_view(self: Any, good: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    old, self.kept = self.kept, good(*arguments)
    return old


DEEDS: dict[tuple[str, str], list[Deed]] = {
    ("order", "ordered"): [
        *map(answer, (None, 5, [None], ["x"], [])), twice, for_ever, leaves_out, breaks_off, names_the_gone
    ],
    ("order", "hopeless"): [
        *map(answer, (None, 5, [None], ["x"])),
        gives_up_twice, gives_up_for_ever, gives_up_and_breaks_off, gives_up_the_gone, gives_up_by_name,
    ],
    ("capacity", "begin"): [pauses_twice, pauses_all, pauses_nonsense, raises_paused, raises_lack, uses_an_old_step],
    ("capacity", "admit"): [*map(answer, (None, True, "admit", 1)), decides_in_admit, admits_all, raises_lack],
    ("capacity", "planned"): [decides_when_planned],
    ("batch", "schedule"): [
        *map(runs, (0, -1, 2.5, "3", None, 10**6)), *map(admits, (0, -1, 0.5, "3", None, 10**6)),
        runs_twice, decodes_twice, runs_the_gone, runs_a_lie, admits_twice, admits_the_gone, places_unasked,
        does_nothing, swallows, rejects_nonsense, raises_paused, raises_lack, uses_an_old_step,
    ],
    ("batch", "planned"): [decides_when_planned],
    ("preemption", "victims"): [*map(answer, (None, 5, [None], [])), twice, for_ever, old_victims],
    ("placement", "place"): [*map(answer, (None, 5, "worker 1")), waits_for_a_full_worker, places_on_an_old_view],
    ("placement", "bound"): [*map(answer, (None, 5, "x" * 10**6))],
}  # fmt: skip


def everything_wrong() -> list[tuple[str, str, Deed]]:
    """Every kind, every hook, every deed."""
    return [
        (kind, hook, deed)
        for kind, hooks in HOOKS.items()
        for hook in hooks
        for deed in [*EVERYWHERE, *DEEDS.get((kind, hook), [])]
    ]
