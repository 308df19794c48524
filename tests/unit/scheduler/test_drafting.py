"""Speculative decoding: when a sequence begins to draft, which drafts a step has room for, and when it stops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.v1.common_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH, FINISH_REASON_STOP, SamplingParams
from paceline.v1.worker_pb2 import RowError, StepPlan, StepResult
from scheduler_svc.core.arrays import packed, unpacked
from scheduler_svc.core.cache.link import ProtocolError
from scheduler_svc.core.drafts.drafter import MAX_INDEXED_TOKENS, MAX_LOST_TOKENS, PROBE_TOKENS, Drafter, may_draft
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.core.workers.batch import Batch
from scheduler_svc.core.workers.state import WorkerState
from simulator import toy_worker
from simulator.system import Client, LocalSystem
from simulator.toy_worker import EOS, ToyWorker, expected_output

PROMPT = [10, 11, 12, 13]


class Recording(ToyWorker):
    """Keeps its plans."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"block_size": 4, "num_blocks": 100, "max_num_seqs": 8, "max_batched_tokens": 64, **sizes})
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return super().run(plan)

    @property
    def draft_counts(self) -> list[int]:
        return [count for plan in self.plans for count in unpacked(plan.draft_counts)]


def sampling(max_tokens: int = 60, period: int = 3, **fields: Any) -> SamplingParams:
    """`period` is passed as `top_k`: the toy's next token is then mostly the token `period` places before. With 0, the
    text does not repeat itself."""
    return SamplingParams(**{"top_p": 1, "max_tokens": max_tokens, "top_k": period, "ignore_eos": True, **fields})


def system_with(worker: ToyWorker, **config: Any) -> tuple[LocalSystem, Client]:
    system = LocalSystem(SchedulerConfig(**{"speculative_tokens": 4, **config}))
    system.attach(worker)
    return system, system.open("s")


def state_of(system: LocalSystem) -> WorkerState:
    [worker] = system.scheduler.workers.values()
    return worker


def run_until_drafting(system: LocalSystem) -> int:
    """Returns the slot of the first sequence that drafts."""
    while not state_of(system).batch.drafting:
        system.move(*system.moves()[0])
    return next(iter(state_of(system).batch.drafting))


def ask_and_check(worker: Recording, params: SamplingParams, prompt: list[int] = PROMPT, **config: Any) -> LocalSystem:
    system, client = system_with(worker, **config)
    system.submit("s", 1, prompt, params)
    system.run()
    assert client.tokens[1] == expected_output(prompt, params)
    system.assert_at_rest()
    return system


# ── the drafter ──────────────────────────────────────────────────────────────────────────────────────────────────────


def see_one_by_one(drafter: Drafter, tokens: list[int]) -> None:
    for token in tokens:
        drafter.see(packed([token]))


def test_drafts_pay_when_the_latest_tokens_would_have_been_proposed() -> None:
    drafter = Drafter(4, 2)
    drafter.see(packed([1, 2, 3, 4, 5, 6, 7]))
    see_one_by_one(drafter, [1, 2])  # the lookup now proposes token 3, then 4, 5, ...
    for token in [3, 4, 5][:PROBE_TOKENS]:
        assert not drafter.pays
        see_one_by_one(drafter, [token])
    assert drafter.pays
    see_one_by_one(drafter, [9])
    assert not drafter.pays


def test_tokens_of_one_call_do_not_show_that_drafts_pay() -> None:
    drafter = Drafter(4, 2)
    drafter.see(packed([1, 2] * 10))
    assert drafter.num_tokens == 20
    assert not drafter.pays
    drafter.see(packed([1, 2] * 10))
    assert not drafter.pays


def test_wrong_drafts_end_the_proposals_until_the_probe_succeeds_again() -> None:
    drafter = Drafter(4, 2)
    drafter.see(packed([1, 2] * 10))
    drafter.verified(5)
    for num_accepted in [0, 3, *[0, 1, 2] * 4, 0, 1]:
        drafter.verified(num_accepted)
        assert drafter.propose(3) == [1, 2, 1]
    drafter.verified(0)
    assert MAX_LOST_TOKENS == 2
    assert drafter.propose(3) == []
    drafter.stop()
    assert not drafter.pays
    assert drafter.propose(3) == [1, 2, 1]


def test_a_long_text_is_indexed_in_pieces() -> None:
    text = [1, 2] * MAX_INDEXED_TOKENS
    drafter, calls = Drafter(4, 2), 0
    while drafter.num_tokens < len(text):
        drafter.see(packed(text[drafter.num_tokens :]))
        calls += 1
        assert not drafter.pays
    assert calls == 2
    see_one_by_one(drafter, [1, 2, 1])
    assert drafter.pays


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.5},
        {"bad_words": [packed([5])]},
        {"min_tokens": 1},
        {"grammar": "g"},
        {"logprobs": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_some_parameters_allow_no_drafts(fields: dict[str, Any]) -> None:
    def request(params: SamplingParams) -> Request:
        return Request(1, "s", 1, "r", packed(PROMPT), bytearray(), params, 0.0)

    assert not may_draft(request(sampling(**fields)))
    independent: dict[str, Any] = {
        "temperature": 0.5,
        "min_p": 0.1,
        "typical_p": 0.5,
        "logit_bias": {3: 1.0},
        "stop_token_ids": [3],
    }
    assert may_draft(request(sampling(**independent, allowed_token_ids=packed([3]))))


# ── start and stop ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_text_that_repeats_itself_takes_fewer_steps(window: int, block_size: int) -> None:
    worker = Recording(block_size=block_size, num_blocks=200 // block_size)
    system = ask_and_check(worker, sampling(), window=window)
    counters = system.scheduler.counters
    assert counters.num_drafts == len(worker.draft_counts) > 3
    assert counters.num_draft_tokens == sum(worker.draft_counts)
    assert 0.5 * counters.num_draft_tokens < counters.num_accepted_tokens <= counters.num_draft_tokens
    assert counters.tokens == 60
    assert counters.steps < 45 < 60
    assert system.scheduler.load(0.0).num_accepted_tokens == counters.num_accepted_tokens


def test_a_text_that_does_not_repeat_itself_never_drafts() -> None:
    worker = Recording()
    ask_and_check(worker, sampling(period=0))
    assert not worker.draft_counts
    assert not any(plan.hold_slots for plan in worker.plans)


@pytest.mark.parametrize("off", ["scheduler", "worker", "request"])
def test_without_speculation_plans_are_as_before(off: str) -> None:
    plans = []
    for tokens in (0, 4):
        worker = Recording()
        worker.registration.verifies_drafts = off != "worker"
        params = sampling(logprobs=off == "request")
        system = ask_and_check(worker, params, speculative_tokens=0 if off == "scheduler" else tokens)
        assert not system.scheduler.counters.num_drafts
        plans.append([plan.SerializeToString(deterministic=True) for plan in worker.plans])
    assert plans[0] == plans[1]


def test_only_one_draft_row_of_a_sequence_is_in_flight_and_others_stay_pipelined() -> None:
    worker = Recording()
    system, client = system_with(worker, window=2)
    system.submit("s", 1, PROMPT, sampling(80))
    system.submit("s", 2, PROMPT, sampling(80, period=0))
    most = 0
    while moves := system.moves():
        in_flight = [row.slot for step in state_of(system).in_flight for row in step.drafts]
        assert len(in_flight) == len({*in_flight})
        most = max(most, len(state_of(system).in_flight) if in_flight else 0)
        system.move(*moves[0])
    assert most == 2
    assert [client.tokens[i] for i in (1, 2)] == [expected_output(PROMPT, sampling(80, period)) for period in (3, 0)]


def test_more_rows_than_the_limit_end_the_drafts() -> None:
    worker = Recording()
    system, client = system_with(worker, speculative_max_rows=2)
    system.submit("s", 1, PROMPT, sampling(100))
    run_until_drafting(system)
    for handle in (2, 3):
        system.submit("s", handle, PROMPT, sampling(30))
    while len(state_of(system).batch.running) < 3:
        system.move(*system.moves()[0])
    for _ in range(20):
        system.move(*system.moves()[0])
    assert not state_of(system).batch.drafting
    before = len(worker.draft_counts)
    while 2 not in client.endings:
        system.move(*system.moves()[0])
    assert len(worker.draft_counts) == before
    system.run()
    assert len(worker.draft_counts) > before, "the first one drafts again when it is nearly alone"
    assert client.tokens[1] == expected_output(PROMPT, sampling(100))
    system.assert_at_rest()


def test_wrong_drafts_end_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text repeats itself for a while, and then never again."""
    monkeypatch.setattr(
        toy_worker,
        "next_token",
        lambda tokens, params: tokens[-3] if len(tokens) < 30 else 8 + (len(tokens) * 7919 + tokens[-3]) % 9000,
    )
    worker = Recording()
    ask_and_check(worker, sampling(100, period=0))
    last = max(i for i, plan in enumerate(worker.plans) if plan.draft_slots)
    assert len(worker.plans) - last > 50
    assert any(plan.resume_slots for plan in worker.plans)


# ── room ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("max_tokens", range(1, 25))
def test_drafts_never_go_beyond_the_last_token(max_tokens: int) -> None:
    worker = Recording(block_size=1, num_blocks=len(PROMPT) + max_tokens - 1)
    system = ask_and_check(worker, sampling(max_tokens, period=1), speculative_ngram_min=1)
    assert system.clients["s"].endings[1].reason == FINISH_REASON_LENGTH


def test_drafts_get_the_tokens_that_the_step_leaves() -> None:
    worker = Recording(max_batched_tokens=6)
    system, client = system_with(worker, speculative_tokens=8)
    for handle in (1, 2):
        system.submit("s", handle, PROMPT, sampling(60))
    system.run()
    for plan in worker.plans:
        assert sum(unpacked(plan.draft_counts)) <= 6 - 2
    assert sum(worker.draft_counts)
    assert [client.tokens[i] for i in (1, 2)] == [expected_output(PROMPT, sampling(60))] * 2


def test_a_request_may_opt_out() -> None:
    worker = Recording()
    system, client = system_with(worker)
    system.submit("s", 1, PROMPT, params := sampling(), disable_speculation=True)
    system.run()
    assert client.tokens[1] == expected_output(PROMPT, params)
    assert not worker.draft_counts


def test_a_request_that_asks_for_prompt_scores_may_draft() -> None:
    worker = Recording()
    ask_and_check(worker, sampling(prompt_logprobs=True))
    assert worker.draft_counts


def test_offline_requests_draft_only_by_themselves() -> None:
    worker = Recording(num_blocks=400)
    system, client = system_with(worker, max_offline_tokens=1, speculative_tokens=8)
    system.submit("s", 1, PROMPT, offline := sampling(160), offline=True)
    run_until_drafting(system)
    system.submit("s", 2, [50, 51, 52], online := sampling(40, period=0))
    num_beside = 0
    while system.moves():
        system.move(*system.moves()[0])
        batch = state_of(system).batch
        for step in state_of(system).in_flight:
            if {slot for slot, _ in step.slots_and_generations()} - batch.offline:
                num_beside += 1
                assert not any(row.slot in batch.offline for row in step.drafts)
    assert num_beside
    assert worker.draft_counts
    assert client.tokens == {1: expected_output(PROMPT, offline), 2: expected_output([50, 51, 52], online)}


def test_draft_tokens_are_rows_and_no_prompt_tokens() -> None:
    """The step-time fit forgets the cost of a prompt token if steps without prompts count as prefills."""
    worker = Recording()
    system, _ = system_with(worker)
    system.submit("s", 1, PROMPT, sampling())
    run_until_drafting(system)
    while not (drafting := [step for step in state_of(system).in_flight if step.drafts]):
        system.move(*system.moves()[0])
    [step] = drafting
    assert (step.new_tokens, step.num_rows) == (0, 1 + step.num_draft_tokens)
    system.run()


def test_drafts_take_no_block_that_another_sequence_may_need() -> None:
    """Together the two sequences fill the pool. No draft preempts either of them."""
    worker = Recording(block_size=1, num_blocks=2 * (len(PROMPT) + 30 - 1))
    system, client = system_with(worker, prefix_caching=False, speculative_ngram_min=1)
    for handle in (1, 2):
        system.submit("s", handle, PROMPT, sampling(30, period=1, seed=handle))
    system.run()
    assert system.scheduler.counters.num_accepted_tokens
    assert not system.scheduler.counters.preempted
    assert len(client.tokens[1]) == len(client.tokens[2]) == 30


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("num_moves", range(2, 8))
def test_a_block_is_not_lost_with_a_step_that_runs_nothing(window: int, num_moves: int) -> None:
    """Another request arrives after 0 to 49 moves and is cancelled 2 to 7 moves later, in some cases before the cache
    has answered its admission. The step may then contain only the drafting sequence. The last sampled tokens of this
    sequence are still in flight, so the step has no row."""
    params = sampling(40, period=1)
    for moment in range(50):
        worker = Recording(block_size=1)
        system, client = system_with(worker, window=window, speculative_ngram_min=1)
        system.submit("s", 1, PROMPT, params)
        system.run_for(moment)
        system.submit("s", 2, [50, 51], params)
        system.run_for(num_moves)
        system.cancel("s", 2)
        system.run()
        assert client.tokens[1] == expected_output(PROMPT, params)
        system.assert_at_rest()


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def accepted_run(system: LocalSystem) -> StepResult:
    """The next result with a draft row, before the scheduler gets it."""
    [end] = system.workers
    while not (end.results and isinstance(end.results[0], StepResult) and end.results[0].draft_num_tokens):
        system.move(*system.moves()[0])
    result = end.results[0]
    assert isinstance(result, StepResult)
    return result


def test_stop_tokens_within_a_run_of_accepted_drafts() -> None:
    for ignore_eos in (True, False):
        system, client = system_with(Recording())
        params = sampling(60, ignore_eos=ignore_eos)
        system.submit("s", 1, PROMPT, params)
        run_until_drafting(system)
        result = accepted_run(system)
        before = list(client.tokens[1])
        result.draft_num_tokens = packed([4])
        result.draft_token_ids = packed([30, EOS, 31, 32])
        system.move("result", system.workers[0])
        got = client.tokens[1][len(before) :]
        assert got == ([30, EOS, 31, 32] if ignore_eos else [30, EOS])
        if not ignore_eos:
            assert client.endings[1].reason == FINISH_REASON_STOP


def test_a_failed_draft_row_fails_its_request() -> None:
    system, client = system_with(Recording())
    for handle in (1, 2):
        system.submit("s", handle, PROMPT, sampling(60, period=3 * (handle == 1)))
    slot = run_until_drafting(system)
    result = accepted_run(system)
    result.draft_num_tokens, result.draft_token_ids = packed([0]), b""
    result.errors.append(RowError(slot=slot, message="not finite"))
    system.run()
    assert client.endings[1].reason == FINISH_REASON_ERROR
    assert client.endings[1].message == "not finite"
    assert client.tokens[2] == expected_output(PROMPT, sampling(60, period=0))
    system.assert_at_rest()


@pytest.mark.parametrize(
    ("counts", "num_tokens"),
    [([], 0), ([0], 0), ([6], 6), ([1], 2), ([2], 1), ([1, 1], 2), ([-1], 0)],
    ids=["none", "no-error", "too-many", "left-over", "missing", "another-row", "negative"],
)
def test_a_result_with_wrong_counts_breaks_the_protocol(counts: list[int], num_tokens: int) -> None:
    system, client = system_with(Recording())
    system.submit("s", 1, PROMPT, sampling())
    run_until_drafting(system)
    result = accepted_run(system)
    result.draft_num_tokens, result.draft_token_ids = packed(counts), packed([9] * num_tokens)
    before = list(client.tokens[1])
    with pytest.raises(ProtocolError, match="draft rows"):
        system.move("result", system.workers[0])
    system.kill(system.workers[0])
    system.attach(Recording())
    system.run()
    assert client.tokens[1] == expected_output(PROMPT, sampling())
    assert client.tokens[1][: len(before)] == before


def test_draft_tokens_without_a_draft_row_break_the_protocol() -> None:
    system, _ = system_with(Recording(), speculative_tokens=0)
    system.submit("s", 1, PROMPT, sampling())
    [end] = system.workers
    while not end.results:
        system.move(*system.moves()[0])
    assert isinstance(end.results[0], StepResult)
    end.results[0].draft_num_tokens, end.results[0].draft_token_ids = packed([1]), packed([9])
    with pytest.raises(ProtocolError, match="draft rows"):
        system.move("result", end)


def test_a_draft_row_is_blamed_for_a_failed_step() -> None:
    system, _ = system_with(Recording())
    system.submit("s", 1, PROMPT, sampling())
    run_until_drafting(system)
    worker = state_of(system)
    while not any(step.drafts for step in worker.in_flight):
        system.move(*system.moves()[0])
    [request] = worker.batch.running.values()
    first, last = worker.in_flight[0].step, worker.in_flight[-1].step
    assert worker.in_steps(first, last) == ([request], 1, last - first + 1)


def test_the_timeline_tells_once_that_a_request_drafts() -> None:
    system, _ = system_with(Recording())
    system.submit("s", 1, PROMPT, sampling(200))
    run_until_drafting(system)
    [record] = system.scheduler.timeline._live.values()
    system.run()
    assert [reason for reason, *_ in record.events].count("drafts") == 1


# ── invariants ───────────────────────────────────────────────────────────────────────────────────────────────────────


def check_batch(batch: Batch) -> None:
    """Each running sequence is in exactly one part of the batch. A slot in `held_drafting` is drafting, a drafting slot
    has an entry in `drafters`, and a slot with such an entry runs."""
    decoding = {*np.flatnonzero(batch.slots.decoding).tolist()}
    parts = [batch.prefills.keys(), batch.paused.keys(), batch.drafting.keys(), batch.finishing, decoding]
    assert sum(map(len, parts)) == len(batch.running) == len({*batch.running}.union(*parts))
    assert batch.held_drafting <= batch.drafting.keys() <= batch.drafters.keys() <= batch.running.keys()
    assert batch.num_decoding == len(batch.paused) + len(batch.drafting) + len(decoding)
    for slot in batch.drafting:
        known = batch.running[slot].num_prompt_tokens + batch.running[slot].num_generated_tokens
        assert known <= batch.drafting[slot] < batch.slots.max_total[slot]
        assert batch.num_computed_tokens(slot) < batch.num_tokens(slot)
    for slot, left in zip(batch.running, batch.remaining_new_tokens().tolist(), strict=True):
        ends = slot in batch.finishing
        assert left == (0 if ends else batch.slots.max_total[slot] - batch.num_tokens(slot))


@given(
    seed=st.integers(0, 1 << 30),
    window=st.integers(1, 3),
    block_size=st.sampled_from([1, 2, 4]),
    asks=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans()), min_size=1, max_size=5),
    max_rows=st.integers(1, 5),
    count=st.integers(1, 9),
    num_tokens=st.integers(36, 100),
)
def test_every_text_is_the_same_as_without_drafts(
    seed: int,
    window: int,
    block_size: int,
    asks: list[tuple[int, int, bool]],
    max_rows: int,
    count: int,
    num_tokens: int,
) -> None:
    worker = Recording(block_size=block_size, num_blocks=-(-num_tokens // block_size), max_batched_tokens=16)
    system, client = system_with(
        worker, window=window, speculative_tokens=count, speculative_max_rows=max_rows, speculative_ngram_min=1
    )
    rng = np.random.default_rng(seed)
    params = [
        sampling(max_tokens, period, ignore_eos=ignores, seed=i) for i, (period, max_tokens, ignores) in enumerate(asks)
    ]
    for handle, one in enumerate(params):
        system.submit("s", handle, PROMPT, one)
    while moves := system.moves():
        system.move(*moves[rng.integers(len(moves))])
        check_batch(state_of(system).batch)
    assert [client.tokens[i] for i in range(len(params))] == [expected_output(PROMPT, one) for one in params]
    system.assert_at_rest()
