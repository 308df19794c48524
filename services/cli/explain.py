"""`paceline explain`: shows why a request waited, from the scheduler's request timeline."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import grpc
from rich.table import Table

from paceline.v1.admin_pb2 import ExplainRequest, Explanation, PrefixReuse
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from services.cli.arguments import Parser, console, plain, usage_error
from services.cli.calls import call
from services.cli.servers import add_flags

PROG = "paceline explain"
TIMEOUT_S = 10.0


def parser() -> Parser:
    parser = Parser(prog=PROG, description=__doc__)
    parser.add_argument("request_id", help="an X-Request-ID, or the id of an answer (cmpl-…, chatcmpl-…)")
    parser.add_argument("--tenant", help="of the request, if several tenants have requests of this id")
    parser.add_argument("--key", help="name of its API key, if several keys have requests of this id")
    add_flags(parser, "scheduler")
    return parser


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    request = ExplainRequest()
    for name, given in (("request_id", arguments.request_id), ("tenant", arguments.tenant), ("key", arguments.key)):
        try:
            if given is not None:
                setattr(request, name, given)
        except ValueError:
            return usage_error(PROG, f"{name}: {given!r} is not UTF-8")
    return call(PROG, arguments, "scheduler", lambda channel: _show(channel, request))


def _show(channel: grpc.Channel, request: ExplainRequest) -> None:
    answer = AdminServiceStub(channel).Explain(request, timeout=TIMEOUT_S)
    several = answer.num_sequences > 1
    prefixes = {one.request_id: one for one in answer.prefixes}
    for request_id, explanations in itertools.groupby(answer.explanations, key=lambda one: one.request_id):
        if several:
            console().print(f"{plain(request_id)}:")
        console().print(_table(explanations))
        if (prefix := prefixes.get(request_id)) is not None:
            console().print(_reuse(prefix), soft_wrap=True)
    explained = len({one.request_id for one in answer.explanations})
    if several and explained < answer.num_sequences:
        console().print(f"{answer.num_sequences - explained} more sequences of this request are not shown")


def _reuse(prefix: PrefixReuse) -> str:
    missed = "; ".join(f"{one.num_tokens} {one.reason} ({plain(one.detail)})" for one in prefix.missed)
    cached = f"{prefix.num_cached_tokens} of {prefix.num_tokens} prompt tokens were cached"
    return f"{cached}, not cached: {missed}" if missed else cached


def _table(explanations: Iterable[Explanation]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("seconds", "decisions", "worker", "reason", "detail"):
        table.add_column(title, justify="left" if title in ("reason", "detail") else "right", overflow="fold")
    for span in explanations:
        seconds = f"{span.from_s:.3f}" if span.to_s == span.from_s else f"{span.from_s:.3f}-{span.to_s:.3f}"
        first, last = span.first_decision, span.last_decision
        decisions = f"{first}" if first == last else f"{first}-{last}"
        table.add_row(seconds, decisions, f"{span.worker or '-'}", plain(span.reason), plain(span.detail))
    return table
