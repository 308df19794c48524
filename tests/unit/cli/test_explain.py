"""`paceline explain` and `paceline policy` print every text literally, with control characters escaped."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from paceline.v1.admin_pb2 import (
    ExplainResponse,
    Explanation,
    GetPolicyRequest,
    GetPolicyResponse,
    PolicyChoice,
    PolicyFailure,
)
from paceline.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from services.cli.main import main

WORDS = "140 tokens of tenant 'acme [/b] [red]:100:' run\x1b[31m"


class Server(AdminServiceServicer):
    def Explain(self, request: Any, context: Any) -> ExplainResponse:
        if request.request_id == "unknown":
            context.abort(grpc.StatusCode.NOT_FOUND, f"nothing is known of {WORDS}")
        if request.request_id == "cmpl-a":
            ids = ["x", "x", "x.1"]
            several = [Explanation(reason=f"reason-{i}", request_id=name) for i, name in enumerate(ids)]
            return ExplainResponse(explanations=several, num_sequences=3)
        spans = [Explanation(reason="tenant", detail=WORDS, first_decision=1, last_decision=7, worker=3)]
        return ExplainResponse(explanations=spans)

    def GetPolicy(self, request: GetPolicyRequest, context: Any) -> GetPolicyResponse:
        choice = PolicyChoice(order="fcfs", options={"note": '"[red]x[/b] :100:"'})
        fallback = PolicyChoice(preset="paceline", order="fcfs", capacity="watermark")
        failure = PolicyFailure(
            kind="capacity", policy="mine:Mine", count=12, last_error=f"ValueError: {WORDS} (m.py:9)"
        )
        return GetPolicyResponse(
            choice=choice, failed_order="mine:[/]Order", failures=[failure], num_steps=3000, fallback=fallback
        )


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_AdminServiceServicer_to_server(Server(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_explain(scheduler: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "r1", "--scheduler", scheduler]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split(maxsplit=4) == ["0.000", "1-7", "3", "tenant", WORDS.replace("\x1b", "\\x1b")]


def test_explain_of_several_sequences(scheduler: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "cmpl-a", "--scheduler", scheduler]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    words = [line.split()[-1] for line in lines if not line.startswith("seconds")]
    assert words == ["x:", "reason-0", "reason-1", "x.1:", "reason-2", "shown"]
    assert lines[-1] == "1 more sequences of this request are not shown"


def test_control_characters_of_a_server_do_not_reach_the_terminal(
    scheduler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "unknown", "--scheduler", scheduler]) == 1
    assert capsys.readouterr().err.endswith(":100:' run\\x1b[31m\n")


def test_policy_get(scheduler: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "get", "--scheduler", scheduler]) == 0
    out = capsys.readouterr().out
    assert 'note="[red]x[/b] :100:"' in out
    assert "failed      order mine:[/]Order: the default one, fcfs, replaces it" in out
    words = WORDS.replace("\x1b", "\\x1b")
    assert f"failed      capacity mine:Mine: 12 times in 3000 steps, last with ValueError: {words} (m.py:9)\n" in out
    assert "instead     paceline: order fcfs, capacity watermark," in out


def test_an_id_that_is_not_utf_8_is_refused(scheduler: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "\udcff", "--scheduler", scheduler]) == 2
    assert "request_id: '\\udcff' is not UTF-8" in capsys.readouterr().err
