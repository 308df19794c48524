"""`paceline explain`: why a request waited, from the scheduler's own notes."""

from __future__ import annotations

import sys

import grpc
from rich.table import Table

from paceline.v1.admin_pb2 import ExplainRequest
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from services.cli.arguments import Parser, console

TIMEOUT_S = 10.0


def main(argv: list[str]) -> int:
    parser = Parser(prog="paceline explain", description=__doc__)
    parser.add_argument("request_id", help="the id of the request (its X-Request-ID)")
    parser.add_argument("--scheduler", default="127.0.0.1:50051", metavar="HOST:PORT")
    arguments = parser.parse_args(argv)
    with grpc.insecure_channel(arguments.scheduler) as channel:
        try:
            answer = AdminServiceStub(channel).Explain(
                ExplainRequest(request_id=arguments.request_id), timeout=TIMEOUT_S
            )
        except grpc.RpcError as error:
            print(f"paceline explain: {arguments.scheduler}: {error.details()}", file=sys.stderr)
            return 1
    table = Table(box=None, pad_edge=False)
    for title in ("seconds", "decisions", "reason", "detail"):
        table.add_column(title, justify="left" if title in ("reason", "detail") else "right", overflow="fold")
    for span in answer.explanations:
        seconds = f"{span.from_s:.3f}" if span.to_s == span.from_s else f"{span.from_s:.3f}-{span.to_s:.3f}"
        first, last = span.first_decision, span.last_decision
        table.add_row(seconds, f"{first}" if first == last else f"{first}-{last}", span.reason, span.detail)
    console().print(table)
    return 0
