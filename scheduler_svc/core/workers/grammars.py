"""Which grammars a worker has prepared, and which it is asked to prepare.

A worker compiles grammars beside its steps. A request is bound to a worker that has prepared its grammar, and to no
other: so no step waits for a compilation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from paceline.v1.worker_pb2 import GrammarOrders

MAX_IDLE = 32  # grammars that a worker keeps for requests to come; each may take megabytes of its memory
MAX_ASKED = 8  # that it has yet to answer: what waits longest is asked for first, whatever came meanwhile


class WorkerGrammars:
    """Of one link to a worker. One that does not prepare grammars takes any."""

    def __init__(self, prepares: bool) -> None:
        self._prepares = prepares
        self._next_id = 1
        self._ids: OrderedDict[str, int] = OrderedDict()  # prepared ones and those asked for; the last used at the end
        self._asked: dict[int, str] = {}
        self.wanted: dict[str, None] = {}  # to be asked for

    def has(self, grammar: str) -> bool:
        """Whether a sequence with the grammar (empty: with none) may go into a plan."""
        if not (grammar and self._prepares):
            return True
        if (number := self._ids.get(grammar)) is None or number in self._asked:
            return False
        self._ids.move_to_end(grammar)
        return True

    def want(self, grammar: str, *, early: bool = False) -> None:
        """Have the worker prepare the grammar, if `has` says that it lacks it. Not all of many at once: what is still
        needed is to be wanted again. `early`: the request has only arrived. These take half of the places, so that a
        flood of arrivals keeps no request waiting that is next."""
        most = MAX_ASKED // 2 if early else MAX_ASKED
        if not self.has(grammar) and grammar not in self._ids and len(self._asked) + len(self.wanted) < most:
            self.wanted[grammar] = None

    def answered(self, number: int, is_ready: bool) -> str | None:
        """Take in the worker's answer; returns the grammar, or None if the worker was not asked."""
        grammar = self._asked.pop(number, None)
        if grammar is not None and not is_ready:
            del self._ids[grammar]
        return grammar

    def take_orders(self, in_use: Collection[str]) -> GrammarOrders:
        """What is wanted of the worker. To be asked for when no step is being composed, since what it would bind
        is not among those `in_use`: the grammars of the sequences that are bound to the worker."""
        orders = GrammarOrders()
        idle = [one for one, number in self._ids.items() if number not in self._asked and one not in in_use]
        for oldest in idle[: max(0, len(idle) + len(self._asked) + len(self.wanted) - MAX_IDLE)]:
            orders.forget.append(self._ids.pop(oldest))
        for grammar in self.wanted:
            self._ids[grammar], self._asked[self._next_id] = self._next_id, grammar
            orders.prepare.add(id=self._next_id, grammar=grammar)
            self._next_id += 1
        self.wanted.clear()
        return orders
