"""Requests with grammars run where their grammar is prepared, and nowhere else."""

from __future__ import annotations

import random
from collections import deque

import pytest

from paceline.v1.common_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH, SamplingParams
from paceline.v1.worker_pb2 import GrammarPrepared
from scheduler_svc.core.cache.link import ProtocolError
from scheduler_svc.core.rejection import CODE_INVALID_ARGUMENT
from scheduler_svc.core.workers import grammars
from scheduler_svc.core.workers.grammars import WorkerGrammars
from simulator.system import LocalSystem, WorkerEnd
from simulator.toy_worker import ToyWorker, expected_output

PROMPT = [9] * 6


def params(grammar: str = "", max_tokens: int = 6, seed: int = 1) -> SamplingParams:
    return SamplingParams(top_p=1.0, max_tokens=max_tokens, seed=seed, ignore_eos=True, grammar=grammar)


def toy(prepares: bool = True, num_blocks: int = 200, max_num_seqs: int = 8) -> ToyWorker:
    worker = ToyWorker(block_size=4, num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_batched_tokens=64)
    worker.registration.prepares_grammars = prepares
    return worker


def run_all_but(system: LocalSystem, held: WorkerEnd | None) -> None:
    """Plays every move except those of this worker's compiler."""
    while moves := [move for move in system.moves() if move != ("grammar", held)]:
        system.move(*moves[0])


@pytest.fixture
def system() -> LocalSystem:
    return LocalSystem()


def test_others_run_while_a_grammar_is_prepared(system: LocalSystem) -> None:
    end = system.attach(toy())
    client = system.open("s")
    system.submit("s", 1, PROMPT, params("form"))
    system.submit("s", 2, PROMPT, params())
    run_all_but(system, end)
    assert client.tokens == {2: expected_output(PROMPT, params())}
    assert [grammar.grammar for grammar in end.grammars] == ["form"], "the scheduler asks for the grammar once"
    told = [(span.reason, span.detail) for span in system.scheduler.timeline.explain("s-1", system.now_s) or ()]
    assert told[1:] == [("grammar", "the worker prepares it")]
    system.run()
    assert client.tokens[1] == expected_output(PROMPT, params("form"))
    system.assert_at_rest()
    system.submit("s", 3, PROMPT, params("form"))
    assert not end.grammars, "the worker has the grammar"
    system.run()
    assert client.endings[3].reason == FINISH_REASON_LENGTH


def test_a_worker_that_prepares_no_grammars_gets_requests_at_once(system: LocalSystem) -> None:
    end = system.attach(toy(prepares=False))
    client = system.open("s")
    system.submit("s", 1, PROMPT, params("form"))
    system.run()
    assert client.endings[1].reason == FINISH_REASON_LENGTH
    assert not end.grammars


def test_a_refused_grammar_fails_its_requests_and_no_others(system: LocalSystem) -> None:
    end = system.attach(toy())
    client = system.open("s")
    for handle, grammar in enumerate(["refused: too many states", "form", "", "refused: too many states"], start=1):
        system.submit("s", handle, PROMPT, params(grammar))
    system.run()
    for handle in (1, 4):
        ending = client.endings[handle]
        assert (ending.reason, ending.code) == (FINISH_REASON_ERROR, CODE_INVALID_ARGUMENT)
        assert ending.message == "refused: too many states"
    assert {client.endings[handle].reason for handle in (2, 3)} == {FINISH_REASON_LENGTH}
    system.submit("s", 5, PROMPT, params("refused: too many states"))
    assert [grammar.grammar for grammar in end.grammars] == ["refused: too many states"], "it is sent again"
    system.run()
    system.assert_at_rest()


def test_each_worker_prepares_a_grammar_once(system: LocalSystem) -> None:
    ends = [system.attach(toy()) for _ in range(2)]
    client = system.open("s")
    for handle in range(12):
        system.submit("s", handle, PROMPT, params("form"))
    assert [len(end.grammars) for end in ends] == [1, 1]
    run_all_but(system, ends[1])
    assert len(client.endings) == 12, "one worker is ready, and takes all requests"
    system.submit("s", 12, PROMPT, params("form"))
    assert [len(end.grammars) for end in ends] == [0, 1]
    system.run()
    system.assert_at_rest()


def test_a_worker_that_joins_prepares_the_grammars_of_waiting_requests(system: LocalSystem) -> None:
    client = system.open("s")
    system.submit("s", 1, PROMPT, params("form"))
    first = system.attach(toy())
    run_all_but(system, first)
    assert [grammar.grammar for grammar in first.grammars] == ["form"]
    system.kill(first)
    second = system.attach(toy())
    run_all_but(system, second)
    assert not client.tokens
    assert [grammar.grammar for grammar in second.grammars] == ["form"]
    system.run()
    assert client.tokens[1] == expected_output(PROMPT, params("form"))
    system.assert_at_rest()


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_requeued_request_continues_on_a_worker_with_its_grammar(system: LocalSystem, is_ready: bool) -> None:
    ends = [system.attach(toy()) for _ in range(2)]
    client = system.open("s")
    system.submit("s", 1, PROMPT, params("form", max_tokens=30))
    while not client.tokens:
        system.move(*next(move for move in system.moves() if is_ready or move != ("grammar", ends[1])))
    runs, other = ends if system.scheduler.workers[ends[0].id].bound else reversed(ends)
    system.kill(runs)
    if not is_ready:
        run_all_but(system, other)
        assert 1 not in client.endings
    system.run()
    assert client.tokens[1] == expected_output(PROMPT, params("form", max_tokens=30))
    system.assert_at_rest()


def test_a_wrong_answer_is_a_protocol_error(system: LocalSystem) -> None:
    end = system.attach(toy())
    with pytest.raises(ProtocolError, match="grammar 1"):
        system.scheduler.worker_grammar(end.id, GrammarPrepared(id=1))
    system.open("s")
    system.submit("s", 1, PROMPT, params("form"))
    system.scheduler.worker_grammar(end.id, GrammarPrepared(id=1))
    with pytest.raises(ProtocolError, match="grammar 1"):
        system.scheduler.worker_grammar(end.id, GrammarPrepared(id=1))


@pytest.mark.parametrize("seed", range(6))
def test_many_grammars_and_lost_workers_change_no_output(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With low limits. Toy workers check that each grammar is prepared when its sequence comes."""
    monkeypatch.setattr(grammars, "MAX_IDLE", 3)
    monkeypatch.setattr(grammars, "MAX_ASKED", 2)
    rng, system = random.Random(seed), LocalSystem()
    ends = [system.attach(toy(num_blocks=rng.choice([12, 60]), max_num_seqs=4)) for _ in range(2)]
    client, asked = system.open("s"), {}
    for handle in range(1, 41):
        grammar = rng.choice(["", "often", f"form {handle % 7}", f"form {handle}"])
        asked[handle] = params(grammar, max_tokens=rng.randrange(1, 12), seed=handle)
        system.submit("s", handle, PROMPT, asked[handle])
    cancelled = {handle for handle in asked if rng.random() < 0.2}
    for handle in sorted(cancelled):
        for _ in range(rng.randrange(12)):
            if moves := system.moves():
                system.move(*rng.choice(moves))
        system.cancel("s", handle)
        if rng.random() < 0.3:
            end = rng.choice(ends)
            ends.remove(end)
            system.kill(end)
            ends.append(system.attach(toy(num_blocks=rng.choice([12, 60]), max_num_seqs=4)))
    system.run()
    for handle, sampling in asked.items():
        right = expected_output(PROMPT, sampling)
        assert client.tokens.get(handle, []) == right or (handle in cancelled)
    system.assert_at_rest()
    for end in ends:
        assert len(end.worker.grammars) <= 3 + 4, "idle ones, and those that ran at the end"  # type: ignore[attr-defined]


def test_the_least_recently_used_idle_grammar_is_forgotten() -> None:
    known = WorkerGrammars(prepares=True)
    for number in range(grammars.MAX_IDLE):
        known.want(f"{number}")
        assert known.wanted
        known.take_orders({"0"})
        known.answered(number + 1, is_ready=True)
    assert known.has("1")
    for name in ("new", "newer"):
        known.want(name)
    orders = known.take_orders({"0"})
    assert orders is not None
    assert ([order.grammar for order in orders.prepare], list(orders.forget)) == (["new", "newer"], [3])
    assert known.has("0"), "a sequence uses the grammar"
    assert known.has("1"), "the grammar was just asked for"
    assert not known.has("2")
    assert not known.wanted


def test_a_worker_is_asked_for_a_limited_number_of_grammars_at_once() -> None:
    known = WorkerGrammars(prepares=True)
    for number in range(grammars.MAX_ASKED + 5):
        known.want(f"{number}")
    orders = known.take_orders(set())
    assert orders is not None
    assert len(orders.prepare) == grammars.MAX_ASKED
    assert known.answered(1, is_ready=False) == "0"
    known.want("0")
    orders = known.take_orders(set())
    assert orders is not None
    assert [order.id for order in orders.prepare] == [grammars.MAX_ASKED + 1]


def test_a_flood_of_arrivals_does_not_delay_the_grammar_of_the_next_request() -> None:
    prepared, asked = WorkerGrammars(True), deque[int]()

    def send() -> None:
        if prepared.wanted:
            orders = prepared.take_orders(set())
            asked.extend(one.id for one in orders.prepare)

    for i in range(2 * grammars.MAX_ASKED):
        prepared.want(f"arrival {i}", early=True)
        send()
    assert len(asked) == grammars.MAX_ASKED // 2
    prepared.want("next")
    send()
    for i in range(grammars.MAX_ASKED):
        prepared.answered(asked.popleft(), True)
        prepared.want(f"later arrival {i}", early=True)
        send()
    assert prepared.has("next")
