"""Trials of grammars: limits, the queue by tenant, clients that leave, and a trial process that dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from llguidance import LLMatcher, LLTokenizer

from demo import CHECKPOINT
from services.gateway.errors import ApiError, Gone
from services.gateway.grammars import checks as grammar_checks
from services.gateway.grammars.checks import GrammarChecks
from services.gateway.grammars.structure import Structure
from services.gateway.grammars.trial import Refused, TrialLimits, _any_token, follow, grammar_of
from services.runtime.model.grammars import LIMITS

TOKENIZER = LLTokenizer(str(CHECKPOINT / "tokenizer.json"), eos_token=[0])
RULES = "\n".join(f'r{i}: "a{i}" | ""' for i in range(2000))
PROPERTIES = {f"property_{i}": {"type": "string", "maxLength": 20} for i in range(400)}


@pytest.fixture
async def checks() -> AsyncIterator[GrammarChecks]:
    made = GrammarChecks(CHECKPOINT / "tokenizer.json", 1024, frozenset({0}))
    yield made
    await made.close()
    assert not made._idle


def regex(text: str) -> Structure:
    return Structure("regex", "regex", text)


def schema(value: Any) -> Structure:
    return Structure("schema", "json_schema", json.dumps(value))


async def stopped(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> int:
    """Starts the only trial process and stops it with SIGSTOP. Returns its pid."""
    monkeypatch.setattr(grammar_checks, "NUM_PROCESSES", 1)
    await checks.grammar(regex("first"), "")
    [process] = checks._idle
    os.kill(process.pid, signal.SIGSTOP)
    return process.pid


def children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def wait_for_end(pid: int) -> None:
    """Waits until a child process ends. The event loop does not run meanwhile."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def queued(checks: GrammarChecks, count: int) -> None:
    """Waits until `count` trials run or wait."""
    while len(checks._trials) != count:  # noqa: ASYNC110 - the other side is the code under test
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("structure", "limit"),
    [
        (
            schema({"type": "integer", "multipleOf": 5000011}),
            "multipleOf 5000011 has 5000011 remainders; at most 10000",
        ),
        (schema({"items": [{"multipleOf": 1.00001}]}), "multipleOf 1.00001 has 100001 remainders; at most 10000"),
        (
            schema({"properties": {"const": {"multipleOf": 5000011}}}),
            "multipleOf 5000011 has 5000011 remainders; at most 10000",
        ),
        (schema({"allOf": [{"multipleOf": prime} for prime in (2, 3, 5, 7, 11, 13, 17, 19)]}), "250 ms of CPU time"),
        (schema({"properties": {f"p{i}": {"multipleOf": 9973 - i} for i in range(100)}}), "250 ms of CPU time"),
        (regex("x*" * 15000), "limit for this grammar: 50000"),
        (regex("(((a{1,100}){1,100}){1,100}){1,100}"), "too many expressions"),
        (Structure("grammar", "grammar", f"start: {' '.join(f'r{i}' for i in range(2000))}\n{RULES}"), "max is 2000"),
        (Structure("grammar", "grammar", 'start: %json {"multipleOf": 5000011}'), "250 ms of CPU time"),
        (Structure("schema", "json_schema", "[" * 20000 + "]" * 20000), "recursion"),
        (regex("x" * 65537), "65537 characters; at most 65536"),
        (schema({"$ref": "#"}), "no text can match it: a rule or a $ref leads only to itself"),
    ],
)
async def test_a_limit_refuses_and_is_named(checks: GrammarChecks, structure: Structure, limit: str) -> None:
    checks.limits = TrialLimits(memory_bytes=2**32)  # otherwise the machine's speed decides which limit comes first
    with pytest.raises(ApiError) as refused:
        await checks.grammar(structure, "")
    assert (refused.value.status, refused.value.param) == (400, structure.field)
    assert refused.value.message.startswith(structure.field)
    assert limit in refused.value.message
    assert await checks.grammar(regex("a"), ""), "the process can run the next trial"


async def test_the_memory_of_a_trial_is_limited(checks: GrammarChecks) -> None:
    checks.limits = TrialLimits(cpu_s=30, memory_bytes=16 * 2**20)
    with pytest.raises(ApiError, match="more than 16 MiB of memory"):
        await checks.grammar(Structure("grammar", "grammar", 'start: %json {"multipleOf": 5000011}'), "")
    assert await checks.grammar(regex("a"), "")


async def test_a_schema_with_400_properties_is_within_the_limits(checks: GrammarChecks) -> None:
    grammar = await checks.grammar(schema({"type": "object", "properties": PROPERTIES}), "")
    assert not LLMatcher(TOKENIZER, grammar, limits=LIMITS).is_error()


async def test_many_sequences_of_a_slow_grammar_are_refused_together(checks: GrammarChecks) -> None:
    """On a machine of any speed: the trial's result says that a mask takes 3 ms."""
    slow = regex("[a-c]{3}")
    grammar = await checks.grammar(slow, "", num_sequences=64)
    checks._results[slow.kind, slow.text, slow.any_whitespace, slow.prefix]["mask_us"] = "3000"
    assert await checks.grammar(slow, "", num_sequences=6) == grammar
    with pytest.raises(ApiError) as refused:
        await checks.grammar(slow, "", num_sequences=7)
    assert refused.value.status == 400
    assert "takes 3 ms of CPU time for each token, and there are 7 sequences; a step has 20 ms" in refused.value.message


@pytest.mark.parametrize("keyword", ["const", "enum"])
async def test_values_are_not_taken_for_keywords(checks: GrammarChecks, keyword: str) -> None:
    value = {"multipleOf": 5_000_011}
    await checks.grammar(schema({keyword: value if keyword == "const" else [value]}), "")
    await checks.grammar(schema({"properties": {"multipleOf": {"type": "integer"}}}), "")


async def test_a_choice_of_4096_texts_allows_each_of_them_and_nothing_else(checks: GrammarChecks) -> None:
    texts = [f"{i}.+" for i in range(4090)] + ['"', "/\n", "\\d", "é", "(a|b)", "[^x]", "a&~b"]
    grammar = await checks.grammar(Structure("choice", "choice", json.dumps(texts)), "")
    for text, fits in [*((text, True) for text in texts[-20:]), ("4", False), ("17x+", False), ("5", False)]:
        matcher = LLMatcher(TOKENIZER, grammar, limits=LIMITS)
        consumed = matcher.consume_tokens(TOKENIZER.tokenize_str(text))
        assert (consumed and matcher.is_accepting()) == fits, text


async def test_the_result_of_a_trial_is_kept(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_RESULTS", 3)
    with pytest.raises(ApiError) as first:
        await checks.grammar(regex("("), "")
    await stopped(checks, monkeypatch)
    with pytest.raises(ApiError) as again:
        await checks.grammar(Structure("other", "regex", "("), "")
    assert again.value.message == first.value.message.replace("regex:", "other:", 1)
    assert await checks.grammar(regex("first"), "") == grammar_of("regex", "first")
    os.kill(checks._idle[0].pid, signal.SIGCONT)
    for text in "abcd":
        await checks.grammar(regex(text), "")
    assert len(checks._results) == 3


async def test_tenants_take_turns(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    process, order = await stopped(checks, monkeypatch), []
    ask = grammar_checks._ask

    async def noted(process: Any, key: grammar_checks.Key) -> dict[str, str]:
        order.append(key[1])
        return await ask(process, key)

    monkeypatch.setattr(grammar_checks, "_ask", noted)
    flood = [asyncio.create_task(checks.grammar(regex(f"a{i}"), "flood")) for i in range(9)]
    await queued(checks, 9)
    other = asyncio.create_task(checks.grammar(regex("b"), "other"))
    await queued(checks, 10)
    os.kill(process, signal.SIGCONT)
    await asyncio.gather(other, *flood)
    assert order[:3] == ["a0", "a1", "b"]
    assert sorted(order) == sorted([*(f"a{i}" for i in range(9)), "b"])


async def test_a_full_queue_refuses(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 2)
    process = await stopped(checks, monkeypatch)
    tasks = []
    for i in range(3):  # one runs, two wait
        tasks.append(asyncio.create_task(checks.grammar(regex(f"a{i}"), "")))
        await queued(checks, i + 1)
        await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await checks.grammar(regex("b"), "")
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    os.kill(process, signal.SIGCONT)
    await asyncio.gather(*tasks)


async def test_a_full_queue_of_one_tenant_lets_another_in(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 3)
    process, flood = await stopped(checks, monkeypatch), []
    for i in range(4):  # one runs, three wait
        flood.append(asyncio.create_task(checks.grammar(regex(f"a{i}"), "flood")))
        await queued(checks, i + 1)
        await asyncio.sleep(0)
    other = asyncio.create_task(checks.grammar(regex("b"), "other"))
    with pytest.raises(ApiError) as refused:
        await flood[3]
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    with pytest.raises(ApiError, match="3 structured outputs wait"):
        await checks.grammar(regex("c"), "flood")
    os.kill(process, signal.SIGCONT)
    await asyncio.gather(other, *flood[:3])
    assert not checks._trials
    assert not checks._queues


async def test_a_trial_that_the_kernel_kills_is_no_verdict_on_its_grammar(checks: GrammarChecks) -> None:
    """Such a kill means that the machine had no memory left, or no free core within WALL_S."""
    checks.limits = TrialLimits(cpu_s=100, memory_bytes=2**33)
    endless = Structure("grammar", "grammar", 'start: %json {"multipleOf": 50000017}')
    asking = asyncio.create_task(checks.grammar(endless, ""))
    await queued(checks, 1)
    [trial] = checks._trials.values()
    while trial.process is None or not children(trial.process.pid):  # noqa: ASYNC110 - the other side is a process
        await asyncio.sleep(0.001)
    os.kill(int(children(trial.process.pid)), signal.SIGKILL)
    with pytest.raises(ApiError) as failed:
        await asking
    assert (failed.value.status, failed.value.retry_after_s) == (503, 1)
    assert not checks._results, "the next request tries the grammar again"


async def test_the_trial_of_a_client_that_leaves_ends(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    process = await stopped(checks, monkeypatch)
    left = asyncio.Event()
    running = asyncio.create_task(checks.grammar(regex("runs"), "", left.is_set))
    await queued(checks, 1)
    waiting = asyncio.create_task(checks.grammar(regex("waits"), "", left.is_set))
    shared = [asyncio.create_task(checks.grammar(regex("shared"), "", gone)) for gone in (left.is_set, lambda: False)]
    cancelled = asyncio.create_task(checks.grammar(regex("cancelled"), ""))
    await queued(checks, 4)
    cancelled.cancel()
    left.set()
    for task in (running, waiting, shared[0]):
        with pytest.raises(Gone):
            await task
    assert [key[1] for key in checks._trials] == ["shared"]
    os.kill(process, signal.SIGCONT)
    assert await shared[1] == grammar_of("regex", "shared")
    assert [key[1] for key in checks._results] == ["first", "shared"]


async def test_a_running_trial_can_be_ended(checks: GrammarChecks) -> None:
    """The trial process ends the trial, answers at once, and can run the next trial."""
    checks.limits = TrialLimits(cpu_s=100, memory_bytes=2**33)
    process = await checks._start()
    endless = ("grammar", 'start: %json {"multipleOf": 50000017}', True, "")
    asking = asyncio.create_task(grammar_checks._ask(process, endless))
    while not children(process.pid):  # noqa: ASYNC110 - the other side is another process
        await asyncio.sleep(0.001)
    process.send_signal(signal.SIGUSR1)
    assert "unfinished" in await asking
    assert not children(process.pid)
    assert "grammar" in await grammar_checks._ask(process, ("regex", "a", True, ""))
    await grammar_checks._end(process)


async def test_a_trial_process_that_dies_is_replaced(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    process = await stopped(checks, monkeypatch)
    asking = asyncio.create_task(checks.grammar(regex("a"), ""))
    await queued(checks, 1)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(ApiError) as failed:
        await asking
    assert failed.value.status == 503
    assert await checks.grammar(regex("a"), "") == grammar_of("regex", "a")


def test_a_mask_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = grammar_of("regex", "[a-z]+")
    follow(TOKENIZER, grammar)
    monkeypatch.setattr("services.gateway.grammars.trial.MASK_S", -1.0)
    with pytest.raises(Refused, match="ms of CPU time for one token"):
        follow(TOKENIZER, grammar)


def test_trials_run_under_uvloop() -> None:
    """The gateway runs under uvloop, which has its own code for subprocesses."""

    async def main() -> str:
        checks = GrammarChecks(CHECKPOINT / "tokenizer.json", 1024, frozenset({0}))
        try:
            return await checks.grammar(regex("a"), "")
        finally:
            await checks.close()

    assert uvloop.run(main()) == grammar_of("regex", "a")


@pytest.mark.parametrize("is_known", [False, True])
def test_dead_idle_processes_fail_at_most_one_request_each(is_known: bool) -> None:
    """With uvloop a write to such a process raises RuntimeError, not ConnectionError."""

    async def main() -> None:
        checks = GrammarChecks(CHECKPOINT / "tokenizer.json", 1024, frozenset({0}))
        await asyncio.gather(*(checks.grammar(regex(f"a{i}"), "") for i in range(2)))
        processes = list(checks._idle)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        if is_known:
            await asyncio.gather(*(process.wait() for process in processes))
        else:
            for process in processes:
                wait_for_end(process.pid)
        asked = [asyncio.wait_for(checks.grammar(regex(f"b{i}"), ""), 60) for i in range(4)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        assert all(isinstance(error, ApiError) and error.status == 503 for error in refused)
        assert len(refused) <= (0 if is_known else 2)
        await checks.close()

    uvloop.run(main())


async def test_a_process_that_cannot_start_fails_its_trial(checks: GrammarChecks) -> None:
    checks.tokenizer_path = Path("/nowhere/tokenizer.json")
    with pytest.raises(ApiError) as failed:
        await checks.grammar(regex("a"), "")
    assert failed.value.status == 503


def test_a_token_is_found_in_a_mask_of_any_length() -> None:
    mask = bytes([0b1, 0, 0b100, 0b11000]) + bytes(20_000)
    assert _any_token(mask, 0, frozenset()) == 0
    assert _any_token(mask, 0, frozenset({0})) == 18
    assert _any_token(mask, 3, frozenset({27})) == 28
    assert _any_token(mask, 9_000, frozenset()) == 0
    assert _any_token(mask, 9_000, frozenset({0, 18, 27, 28})) is None
