"""The grammars that a worker has prepared, and those that it is asked to prepare.

A worker compiles grammars beside its steps. The scheduler binds a request only to a worker that has prepared its
grammar, so no step waits for a compilation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from paceline.v1.worker_pb2 import GrammarOrders

MAX_IDLE = 32  # unused grammars that a worker keeps; each may take megabytes of its memory
# Most unanswered orders. With few of them, the grammar of the request that has waited longest is ordered before those
# of later requests.
MAX_ASKED = 8


class WorkerGrammars:
    """The grammars of one link to a worker. A worker that does not prepare grammars takes any."""

    def __init__(self, prepares: bool) -> None:
        self._prepares = prepares
        self._next_id = 1
        self._ids: OrderedDict[str, int] = OrderedDict()  # prepared and ordered grammars; the last used at the end
        self._asked: dict[int, str] = {}
        self.wanted: dict[str, None] = {}  # to be ordered

    def has(self, grammar: str) -> bool:
        """Whether a plan may carry a sequence with this grammar (empty: without one)."""
        if not (grammar and self._prepares):
            return True
        if (number := self._ids.get(grammar)) is None or number in self._asked:
            return False
        self._ids.move_to_end(grammar)
        return True

    def want(self, grammar: str, *, early: bool = False) -> None:
        """Order the grammar if `has` says that the worker lacks it. At most MAX_ASKED orders are open; a grammar that
        is still needed is wanted again later. `early`: its request has only just arrived. Early orders take at most
        half of the open orders, so that a flood of arrivals does not delay the request that is next."""
        most = MAX_ASKED // 2 if early else MAX_ASKED
        if not self.has(grammar) and grammar not in self._ids and len(self._asked) + len(self.wanted) < most:
            self.wanted[grammar] = None

    def answered(self, number: int, is_ready: bool) -> str | None:
        """Apply the worker's answer. Returns the grammar, or None if the worker was not asked."""
        grammar = self._asked.pop(number, None)
        if grammar is not None and not is_ready:
            del self._ids[grammar]
        return grammar

    def take_orders(self, in_use: Collection[str]) -> GrammarOrders:
        """Take the open orders. Do not call it while a step is being scheduled: `in_use` (the grammars of the sequences
        bound to the worker) lacks those of that step."""
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
