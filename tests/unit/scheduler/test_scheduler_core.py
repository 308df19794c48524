"""The scheduler's rules, one by one, against toy workers in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.v1.common_pb2 import POOLING_LAST, FinishReason, PromptLogprobs, RetentionRange, SamplingParams
from paceline.v1.inference_pb2 import SessionRequest, Submission
from paceline.v1.worker_pb2 import StepPlan, StepResult, WorkerRegistration
from scheduler_svc.core.admission.validation import MAX_WORKER_SIZES, OPTIONAL_SIZES
from scheduler_svc.core.cache.link import ProtocolError
from scheduler_svc.core.output.sessions import Session
from scheduler_svc.core.rejection import (
    CODE_FAILED_PRECONDITION,
    CODE_INVALID_ARGUMENT,
    CODE_RESOURCE_EXHAUSTED,
    Rejection,
)
from scheduler_svc.core.types import SchedulerConfig
from simulator.system import Client, LocalSystem
from simulator.toy_worker import EOS, VOCAB, ToyWorker, expected_output, toy_logprob


def toy(**changes: Any) -> ToyWorker:
    return ToyWorker(**{"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_batched_tokens": 64} | changes)


def params(max_tokens: int = 8, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"top_p": 1.0, "max_tokens": max_tokens, "seed": 1, "ignore_eos": True} | changes)


@pytest.fixture
def system() -> LocalSystem:
    return LocalSystem(SchedulerConfig(max_queued_requests=4))


@pytest.fixture
def client(system: LocalSystem) -> Client:
    return system.open("s")


def submit_raw(system: LocalSystem, handle: int, **fields: Any) -> None:
    submission = Submission(handle=handle, **fields)
    system.scheduler.session_message("s", SessionRequest(submissions=[submission]), system.now_s)
    system.poll()


def pack(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def test_requests_wait_for_a_worker_and_then_run(system: LocalSystem, client: Client) -> None:
    system.submit("s", 1, [9, 10], params())
    system.run()
    assert not client.tokens
    system.attach(toy())
    system.run()
    assert client.tokens[1] == expected_output([9, 10], params())
    assert client.endings[1].reason == FinishReason.FINISH_REASON_LENGTH
    system.assert_at_rest()


def test_requests_before_and_after_the_model_was_known_share_blocks(system: LocalSystem, client: Client) -> None:
    prompt = list(range(10, 30))
    system.submit("s", 1, prompt, params())
    system.run()
    system.attach(toy())
    system.run()
    system.submit("s", 2, prompt, params())
    system.run()
    assert client.endings[2].cached_tokens == 19


def test_window_is_filled_before_the_first_result(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy())
    system.submit("s", 1, [9], params())
    while len(end.plans) < 2:
        kind, moving = system.moves()[0]
        assert kind in ("exchange", "answer"), "the second plan must not wait for the first result"
        system.move(kind, moving)
    assert [plan.step for plan in end.plans] == [1, 2]


@pytest.mark.parametrize(
    ("setting", "asked", "step_ms", "in_flight"),
    [(0, 0, 2, 2), (0, 3, 2, 3), (0, 1, 2, 1), (1, 3, 2, 1), (4, 3, 2, 4), (2, 0, 2, 2), (0, 3, 5, 2), (4, 3, 5, 4)],
)
def test_more_than_two_steps_are_in_flight_if_they_are_set_or_asked_for_and_short(
    setting: int, asked: int, step_ms: int, in_flight: int
) -> None:
    system = LocalSystem(SchedulerConfig(window=setting))
    system.open("s")
    worker = toy()
    worker.registration.window = asked
    end = system.attach(worker)
    for _ in range(20):
        system.scheduler.workers[end.id].step_fit.add(0, 10, 1, step_ms * 1e-3)
    system.submit("s", 1, [9], params())
    while system.moves()[0][0] in ("exchange", "answer"):
        system.move(*system.moves()[0])
    assert [plan.step for plan in end.plans] == list(range(1, in_flight + 1))


@pytest.mark.parametrize(
    ("setting", "speculative_tokens", "verifies", "window"),
    [(0, 4, True, 2), (0, 0, True, 3), (0, 4, False, 3), (3, 4, True, 3)],
)
def test_a_worker_that_verifies_drafts_has_two_steps_in_flight(
    setting: int, speculative_tokens: int, verifies: bool, window: int
) -> None:
    system = LocalSystem(SchedulerConfig(window=setting, speculative_tokens=speculative_tokens))
    worker = toy()
    worker.registration.window, worker.registration.verifies_drafts = 3, verifies
    assert system.scheduler.workers[system.attach(worker).id].window == window


def test_no_third_step_is_in_flight_behind_a_long_prompt() -> None:
    system = LocalSystem()
    system.open("s")
    worker = toy(max_batched_tokens=16)
    worker.registration.window = 3
    state = system.scheduler.workers[system.attach(worker).id]
    for _ in range(20):
        state.step_fit.add(0, 10, 1, 1e-3)
        state.step_fit.add(10, 0, 1, 10e-3)
    system.submit("s", 1, list(range(10, 50)), params())
    seen = set()
    while moves := system.moves():
        system.move(*moves[0])
        seen.add(tuple(step.new_tokens for step in state.in_flight))
    assert {(16, 16), (16, 8), (8, 0, 0), (0, 0, 0)} <= seen
    assert all(tokens[1] == 0 for tokens in seen if len(tokens) > 2)


def test_a_steady_decode_step_is_a_small_message(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy(num_blocks=1000, block_size=64, max_num_seqs=128, max_batched_tokens=512))
    for handle in range(1, 129):
        submission = Submission(
            handle=handle, prompt_token_ids=pack(handle + 9), sampling=params(50), accepted_before=True
        )
        system.scheduler.session_message("s", SessionRequest(submissions=[submission]), 0.0)
    system.poll()
    sizes = []
    for _ in range(60):
        if end.plans:
            sizes.append(end.plans[0].ByteSize())
        system.move(*system.moves()[0])
    assert min(sizes) <= 8
    assert sorted(sizes)[len(sizes) // 2] <= 64  # docs/design.md, budgets: 64 bytes plus new blocks


def test_stop_tokens_and_min_tokens_are_honoured(system: LocalSystem, client: Client) -> None:
    right = expected_output([9], params(60))
    system.attach(toy())
    system.submit("s", 1, [9], params(60, stop_token_ids=[right[3]]))
    system.run()
    assert client.tokens[1] == right[: right.index(right[3]) + 1]
    assert client.endings[1].reason == FinishReason.FINISH_REASON_STOP


def test_end_of_sequence_stops_unless_ignored(system: LocalSystem, client: Client) -> None:
    prompt = next([9, n] for n in range(1000) if EOS in expected_output([9, n], params(30, ignore_eos=False)))
    system.attach(toy())
    system.submit("s", 1, prompt, params(30, ignore_eos=False))
    system.submit("s", 2, prompt, params(30))
    system.run()
    assert client.tokens[1][-1] == EOS
    assert client.endings[1].reason == FinishReason.FINISH_REASON_STOP
    assert len(client.tokens[2]) == 30
    system.assert_at_rest()


def test_a_prefix_is_reused_and_reported(system: LocalSystem, client: Client) -> None:
    system.attach(toy())
    prompt = list(range(10, 30))
    system.submit("s", 1, prompt, params(2))
    system.run()
    system.submit("s", 2, prompt, params(2))
    system.run()
    assert client.endings[1].cached_tokens == 0
    assert client.endings[2].cached_tokens == 19  # the last token is always computed
    assert client.tokens[1] == client.tokens[2]


def test_the_system_is_at_rest_after_its_last_move() -> None:
    def started() -> LocalSystem:
        system = LocalSystem()
        system.open("s")
        system.attach(toy())
        system.submit("s", 1, [9], params(3))
        return system

    system, num_moves = started(), 0
    while moves := system.moves():
        system.move(*moves[0])
        num_moves += 1
    assert started().run_for(num_moves)
    assert not started().run_for(num_moves - 1)


def test_long_prompts_are_chunked_and_decodes_go_on(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy(max_batched_tokens=8))
    system.submit("s", 1, [9], params(20))
    system.run_for(9)
    system.submit("s", 2, list(range(10, 60)), params(2))
    chunks: dict[int, list[int]] = {}
    while not system.run_for(1):
        for plan in end.plans:
            chunks[plan.step] = np.frombuffer(plan.prefill_tokens, np.int32).tolist()
    assert client.tokens[1] == expected_output([9], params(20))
    assert client.tokens[2] == expected_output(list(range(10, 60)), params(2))
    assert [sizes for sizes in chunks.values() if sizes][:-1] == [[7]] * 7  # the eighth token of the budget decodes


def test_a_full_pool_preempts_the_last_admitted_and_both_finish(system: LocalSystem, client: Client) -> None:
    system.attach(toy(num_blocks=8))
    for handle in (1, 2):
        system.submit("s", handle, [9, handle], params(20))
    system.run()
    for handle in (1, 2):
        assert client.tokens[handle] == expected_output([9, handle], params(20))
    assert system.scheduler.counters.preempted > 0
    system.assert_at_rest()


def test_two_workers_share_the_work(system: LocalSystem, client: Client) -> None:
    for _ in range(2):
        system.attach(toy())
    for handle in range(1, 5):
        system.submit("s", handle, [9, handle], params(30))
    system.run_for(30)
    rows = [len(worker.batch.running) for worker in system.scheduler.workers.values()]
    assert (sum(rows), min(rows) > 0) == (4, True)
    system.run()
    assert len(client.endings) == 4


def test_a_second_request_follows_its_prefix(system: LocalSystem, client: Client) -> None:
    workers = [toy(), toy()]
    for worker in workers:
        system.attach(worker)
    prompt = list(range(10, 50))
    system.submit("s", 1, prompt, params(2))
    system.run()
    [home] = [worker for worker in workers if worker.step]
    before = home.step
    system.submit("s", 2, [*prompt, 99], params(2))
    system.run()
    assert home.step > before
    assert client.endings[2].cached_tokens == 40


def test_cancel_frees_everything_wherever_the_request_is(system: LocalSystem, client: Client) -> None:
    system.attach(toy(max_num_seqs=1))
    for handle in (1, 2):
        system.submit("s", handle, [9, handle], params(100))
    system.run_for(20)
    system.cancel("s", 2)  # waits
    system.cancel("s", 1)  # runs
    system.run()
    assert {ending.reason for ending in client.endings.values()} == {FinishReason.FINISH_REASON_ABORT}
    system.assert_at_rest()


def test_a_closed_session_takes_its_requests_along(system: LocalSystem, client: Client) -> None:
    system.attach(toy())
    system.submit("s", 1, [9], params(100))
    system.run_for(10)
    system.scheduler.close_session("s")
    system.poll()
    system.run()
    system.assert_at_rest()


def test_a_draining_worker_finishes_takes_nothing_new_and_is_released(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy())
    system.submit("s", 1, [9], params(10))
    system.run_for(6)
    system.scheduler.worker_drain(end.id)
    system.submit("s", 2, [9, 9], params(10))
    system.run()
    assert client.tokens[1] == expected_output([9], params(10))
    assert 2 not in client.tokens
    assert end.released
    system.kill(end)
    system.attach(toy())
    system.run()
    assert client.tokens[2] == expected_output([9, 9], params(10))


def test_resubmission_goes_on_after_the_delivered_tokens(system: LocalSystem, client: Client) -> None:
    right = expected_output([9], params(10))
    system.attach(toy())
    submit_raw(
        system,
        1,
        prompt_token_ids=pack(9),
        output_token_ids=pack(*right[:4]),
        sampling=params(10),
        accepted_before=True,
    )
    system.run()
    assert client.tokens[1] == right[4:]


def test_a_failed_row_ends_its_request_alone(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy())
    for handle in (1, 2):
        system.submit("s", handle, [9, handle], params(10))
    while not end.plans:
        system.move(*system.moves()[0])
    result = end.worker.run(end.plans.popleft())
    tokens = np.frombuffer(result.token_ids, np.int32).copy()
    tokens[0] = -1
    result.token_ids = tokens.tobytes()
    result.errors.add(slot=0, message="logits are not finite")
    system.scheduler.worker_result(end.id, result)
    system.poll()
    system.run()
    failed = [ending for ending in client.endings.values() if ending.reason == FinishReason.FINISH_REASON_ERROR]
    assert [ending.message for ending in failed] == ["logits are not finite"]
    assert len(client.endings) == 2
    system.assert_at_rest()


def test_wrong_results_are_protocol_errors(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy())
    with pytest.raises(ProtocolError, match="no step is in flight"):
        system.scheduler.worker_result(end.id, StepResult(step=1))
    system.submit("s", 1, [9], params())
    while not end.plans:
        system.move(*system.moves()[0])
    with pytest.raises(ProtocolError, match="expected 1"):
        system.scheduler.worker_result(end.id, StepResult(step=9, token_ids=pack(1)))


def test_nothing_is_shared_between_salts(system: LocalSystem, client: Client) -> None:
    system.attach(toy())
    prompt = pack(*range(10, 30))
    for handle, salt in enumerate(["", "pepper", "pepper", "salt", ""]):
        submit_raw(system, handle, prompt_token_ids=prompt, sampling=params(2), cache_salt=salt)
        system.run()
    assert [client.endings[handle].cached_tokens for handle in range(5)] == [0, 0, 19, 0, 19]


def test_retained_blocks_outlive_all_others(system: LocalSystem, client: Client) -> None:
    system.attach(toy(num_blocks=16))
    kept = [RetentionRange(end=16, priority=90)]
    submit_raw(system, 1, prompt_token_ids=pack(*range(10, 30)), sampling=params(2), cache_retention=kept)
    system.run()
    for handle in range(2, 8):
        system.submit("s", handle, [handle] * 40, params(2))
        system.run()
    for handle, first in ((8, 10), (9, 2)):
        system.submit("s", handle, list(range(10, 30)) if first == 10 else [first] * 40, params(2))
        system.run()
    assert [client.endings[handle].cached_tokens for handle in (8, 9)] == [16, 0]


def test_ranges_of_generated_tokens_count_from_the_end_of_the_prompt(system: LocalSystem, client: Client) -> None:
    """As in TensorRT-LLM's decode retention: a client that sends text does not know how many tokens the prompt has."""
    system.attach(toy(num_blocks=16))
    kept = [RetentionRange(end=16, priority=0), RetentionRange(decode=True, start=4, end=8, priority=90)]
    submit_raw(system, 1, prompt_token_ids=pack(*range(10, 26)), sampling=params(9), cache_retention=kept)
    submit_raw(system, 2, prompt_token_ids=pack(*range(10, 26)), sampling=params(9), cache_retention=[kept[0], *kept])
    beyond = [RetentionRange(end=100, priority=1), RetentionRange(start=200, priority=2), RetentionRange(decode=True)]
    submit_raw(system, 3, prompt_token_ids=pack(*range(10, 26)), sampling=params(9), cache_retention=beyond)
    request, other = system.scheduler.queue
    assert list(request.metadata.cache_retention) == [
        RetentionRange(end=16),
        RetentionRange(start=20, end=24, priority=90),
    ]
    assert list(other.metadata.cache_retention) == [RetentionRange(end=16, priority=1), RetentionRange(start=16)]
    system.run()
    assert "start: 0 lies within another range" in client.endings[2].message


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"prompt_token_ids": b""}, "prompt_token_ids", "at least one token"),
        ({"prompt_token_ids": b"123"}, "prompt_token_ids", "packed int32"),
        ({"prompt_token_ids": pack(VOCAB)}, "prompt_token_ids", f"vocabulary of {VOCAB}"),
        ({"prompt_token_ids": pack(-1)}, "prompt_token_ids", "token id -1"),
        ({"sampling": params(0)}, "max_tokens", "at least 1"),
        ({"sampling": params(4, min_tokens=5)}, "min_tokens", "more than max_tokens"),
        ({"sampling": params(4, temperature=-1)}, "temperature", "finite"),
        ({"sampling": params(4, temperature=float("nan"))}, "temperature", "finite"),
        ({"sampling": params(4, top_p=0)}, "top_p", "(0, 1]"),
        ({"sampling": params(4, top_k=-2)}, "top_k", "negative"),
        ({"sampling": params(4, stop_token_ids=[VOCAB])}, "stop_token_ids", "vocabulary"),
        ({"sampling": params(4, min_p=1.1)}, "min_p", "[0, 1]"),
        ({"sampling": params(4, min_p=float("nan"))}, "min_p", "[0, 1]"),
        ({"sampling": params(4, typical_p=-0.1)}, "typical_p", "[0, 1]"),
        ({"sampling": params(4, repetition_penalty=0.001)}, "repetition_penalty", "[0.01, 100]"),
        ({"sampling": params(4, repetition_penalty=float("nan"))}, "repetition_penalty", "[0.01, 100]"),
        ({"sampling": params(4, presence_penalty=2.5)}, "presence_penalty", "[-2, 2]"),
        ({"sampling": params(4, frequency_penalty=float("-inf"))}, "frequency_penalty", "[-2, 2]"),
        ({"sampling": params(4, logit_bias={VOCAB: 1})}, "logit_bias", "vocabulary"),
        ({"sampling": params(4, logit_bias={5: 101})}, "logit_bias", "[-100, 100]"),
        ({"sampling": params(4, logit_bias=dict.fromkeys(range(1025), 1))}, "logit_bias", "1024 are possible"),
        ({"sampling": params(4, bad_words=[b"123"])}, "bad_words", "packed int32"),
        ({"sampling": params(4, bad_words=[b""])}, "bad_words", "1 to 64 are possible"),
        ({"sampling": params(4, bad_words=[pack(*range(65))])}, "bad_words", "1 to 64 are possible"),
        ({"sampling": params(4, bad_words=[pack(1)] * 1025)}, "bad_words", "1024 are possible"),
        ({"sampling": params(4, bad_words=[pack(1, VOCAB)])}, "bad_words", "vocabulary"),
        ({"sampling": params(4, bad_words=[pack(-1, 1)])}, "bad_words", "vocabulary"),
        (
            {"sampling": params(4, bad_words=[pack(*range(64))] * 65)},
            "bad_words",
            "4160 tokens in all; at most 4096 are possible",
        ),
        ({"sampling": params(4, allowed_token_ids=pack(*range(8193)))}, "allowed_token_ids", "8192 are possible"),
        ({"sampling": params(4, allowed_token_ids=b"123")}, "allowed_token_ids", "packed int32"),
        ({"sampling": params(4, allowed_token_ids=pack(1, VOCAB))}, "allowed_token_ids", "vocabulary"),
        ({"sampling": params(4, logprobs=True, num_top_logprobs=21)}, "num_top_logprobs", "20 are possible"),
        (
            {"sampling": params(4, prompt_logprobs=True, num_top_prompt_logprobs=21)},
            "num_top_prompt_logprobs",
            "20 are possible",
        ),
        (
            {
                "prompt_token_ids": pack(*[9] * 90_000),
                "sampling": params(4, prompt_logprobs=True, num_top_prompt_logprobs=2),
            },
            "prompt_logprobs",
            "270000 for a prompt of 90000 tokens; at most 262144 are possible",
        ),
        ({"sampling": params(4, grammar="x" * 65537)}, "grammar", "has 65537 characters; at most 65536 are possible"),
        ({"sampling": params(1 << 20)}, "max_tokens", "exceed the model's length"),
        ({"sampling": params(1000)}, "max_tokens", "can never fit a pool of 256 tokens"),
        ({"priority": float("nan")}, "priority", "nan is not a finite number"),
        ({"priority": float("inf")}, "priority", "inf is not a finite number"),
        ({"deadline_s": float("nan")}, "deadline_s", "nan is not a finite number"),
        ({"cache_salt": "x" * 257}, "cache_salt", "has 257 characters; at most 256 are possible"),
        (
            {"cache_retention": [RetentionRange(priority=1)] * 65},
            "cache_retention",
            "has 65 ranges; at most 64 are possible",
        ),
        (
            {"sampling": params(4, stop_token_ids=[5] * 257)},
            "stop_token_ids",
            "has 257 tokens; at most 256 are possible",
        ),
        ({"cache_retention": [RetentionRange(priority=101)]}, "cache_retention", "101 is not within 0..100"),
        ({"cache_retention": [RetentionRange(start=4, end=4)]}, "cache_retention", "end: 4 is not after start, 4"),
        ({"cache_retention": [RetentionRange(), RetentionRange(start=4)]}, "cache_retention", "start: 4 lies within"),
    ],
)
def test_bad_submissions_are_refused_by_name(
    system: LocalSystem, client: Client, fields: dict[str, object], field: str, said: str
) -> None:
    system.attach(toy())
    submit_raw(system, 1, **{"prompt_token_ids": pack(9), "sampling": params()} | fields)
    ending = client.endings[1]
    assert (ending.code, ending.field) == (CODE_INVALID_ARGUMENT, field)
    assert said in ending.message
    system.run()
    system.assert_at_rest()


def test_a_prompt_that_is_scored_is_computed_even_if_it_is_cached(system: LocalSystem, client: Client) -> None:
    """In chunks, twice: the second time its KV is cached. The KV of a scored prompt is shared like any other KV."""
    system.attach(toy(max_batched_tokens=7))
    prompt = list(range(10, 30))
    right = {i: toy_logprob(prompt[: i + 1]) for i in range(1, 20)}
    for handle in (1, 2):
        system.submit("s", handle, prompt, params(2, prompt_logprobs=True))
        system.run()
        assert client.prompt_scores[handle] == right
        assert client.endings[handle].cached_tokens == 0
    system.submit("s", 3, prompt, params(2))
    system.run()
    assert client.endings[3].cached_tokens == 19


def test_a_scored_prompt_is_computed_even_if_the_same_step_computes_it_for_another_request(
    system: LocalSystem, client: Client
) -> None:
    prompt = list(range(10, 30))
    system.submit("s", 1, prompt, params(2))
    system.submit("s", 2, prompt, params(2, prompt_logprobs=True))
    worker = system.attach(toy(max_batched_tokens=64))
    while not worker.plans:
        system.move(*system.moves()[0])
    assert np.frombuffer(worker.plans[0].prefill_tokens, np.int32).tolist() == [20, 20]
    system.run()
    assert client.prompt_scores[2] == {i: toy_logprob(prompt[: i + 1]) for i in range(1, 20)}
    assert 3 not in client.prompt_scores
    system.assert_at_rest()


def test_a_fork_that_the_cache_refuses_is_computed_instead(system: LocalSystem, client: Client) -> None:
    """The scheduler asks for the fork only once."""
    system.attach(toy())
    for handle in (1, 2):
        system.submit(
            "s", handle, list(range(9, 20)), params(64 if handle == 1 else 4, seed=handle), fork_of=handle - 1
        )
    num_forks = 0
    for _ in range(1000):
        for op in system.to_cache[0].ops if system.to_cache else ():
            if op.admit.fork_of:
                num_forks += 1
                op.admit.fork_of = 2**40  # which the cache does not know
        if not (moves := system.moves()):
            break
        system.move(*moves[0])
    assert num_forks == 1
    assert len(client.tokens[2]) == 4
    system.assert_at_rest()


def test_samples_fork_from_a_request_with_a_scored_prompt(system: LocalSystem, client: Client) -> None:
    system.attach(toy())
    prompt = list(range(10, 30))
    system.submit("s", 1, prompt, params(4, prompt_logprobs=True))
    for handle in (2, 3):
        system.submit("s", handle, prompt, params(4, seed=handle), fork_of=1)
    system.run()
    assert system.cache.counters.forked_sequences == 2
    assert client.prompt_scores.keys() == {1}
    assert client.tokens[2] == expected_output(prompt, params(4, seed=2))


def test_scores_of_long_prompts_go_in_several_messages_before_the_tokens() -> None:
    session = Session("s", 1, window=3)
    part = PromptLogprobs(start=1, logprobs=bytes(3 * 2**20))
    for handle in (1, 2, 3, 4):
        session.add_prompt_scores(handle, part)
    session.add_tokens(np.array([1]), np.array([5], np.int32))
    messages = []
    while (message := session.next_message()) is not None:
        messages.append(message)
    assert [[score.handle for score in message.prompt_scores] for message in messages] == [[1], [2], [3]], "no credit"
    session.read = 3
    final = session.next_message()
    assert final is not None
    assert [score.handle for score in final.prompt_scores] == [4]
    last = session.next_message()
    assert last is not None
    assert (list(last.handles), session.next_message()) == ([1], None)


def test_a_sequence_may_fill_the_pool_to_the_last_block(system: LocalSystem, client: Client) -> None:
    """The last token is never computed and needs no room. If the prompt alone is too long, the error says so."""
    system.attach(toy(num_blocks=3))
    for handle, (length, max_tokens) in enumerate([(12, 1), (11, 2), (12, 2), (13, 1)]):
        system.submit("s", handle, [9] * length, params(max_tokens))
    system.run()
    assert [client.endings[handle].field for handle in range(4)] == ["", "", "max_tokens", "prompt_token_ids"]
    assert client.tokens[0] == expected_output([9] * 12, params(1))


def test_sessions_learn_at_once_that_the_queue_is_full_or_has_room(system: LocalSystem, client: Client) -> None:
    other = system.open("t")
    for handle in range(1, 5):
        assert client.status is not None
        assert not client.status.full
        system.submit("s", handle, [9], params())
    for told in (client, other, system.open("u")):
        assert told.status is not None
        assert (told.status.full, told.status.ready) == (True, False)
    submit_raw(system, 5, prompt_token_ids=pack(9), sampling=params())
    assert client.endings[5].code == CODE_RESOURCE_EXHAUSTED
    system.scheduler.session_message("s", SessionRequest(cancels=[2]), system.now_s)
    system.poll()
    for told in (client, other):
        assert told.status is not None
        assert not told.status.full


def test_a_full_queue_refuses_no_resubmitted_request(system: LocalSystem, client: Client) -> None:
    for handle in range(1, 6):
        system.submit("s", handle, [9], params())
    assert client.endings[5].code == CODE_RESOURCE_EXHAUSTED
    assert client.endings[5].retry_after_s > 0
    submit_raw(system, 6, prompt_token_ids=pack(9), sampling=params(), accepted_before=True)
    system.attach(toy())
    system.run()
    assert client.tokens[6] == expected_output([9], params())


def test_queued_requests_are_checked_when_the_model_becomes_known(system: LocalSystem, client: Client) -> None:
    system.submit("s", 1, [VOCAB + 1], params())
    assert not client.endings
    system.attach(toy())
    assert client.endings[1].code == CODE_INVALID_ARGUMENT


@pytest.mark.parametrize("early", [True, False])
def test_a_resubmitted_request_waits_for_a_pool_that_can_hold_it(
    system: LocalSystem, client: Client, early: bool
) -> None:
    if not early:
        system.attach(toy(num_blocks=4))
    submit_raw(system, 1, prompt_token_ids=pack(*range(9, 39)), sampling=params(10), accepted_before=True)
    if early:  # the scheduler has restarted, and the smallest worker registers first
        system.attach(toy(num_blocks=4))
    system.run()
    assert not client.endings
    system.attach(toy())
    system.run()
    assert client.tokens[1] == expected_output([*range(9, 39)], params(10))


def test_a_worker_that_does_not_fit_is_refused(system: LocalSystem) -> None:
    system.attach(toy())
    other = toy()
    other.registration.model.fingerprint = "another"
    with pytest.raises(Rejection) as refused:
        system.scheduler.register_worker(other.registration)
    assert (refused.value.code, refused.value.field) == (CODE_FAILED_PRECONDITION, "model")
    other.registration.model.embedding.pooling = POOLING_LAST  # the same checkpoint with --pooling
    with pytest.raises(Rejection, match=r"serves toy \(.*\), not toy \(another, pooling last\)"):
        system.scheduler.register_worker(other.registration)
    with pytest.raises(Rejection, match="block_size"):
        system.scheduler.register_worker(toy(block_size=8).registration)


def in_type(dtype: str) -> ToyWorker:
    worker = toy()
    worker.registration.model.dtype = dtype
    return worker


def test_a_worker_of_another_data_type_is_refused(system: LocalSystem) -> None:
    system.attach(in_type("float32"))
    with pytest.raises(Rejection) as refused:
        system.scheduler.register_worker(in_type("bfloat16").registration)
    assert (refused.value.code, refused.value.field) == (CODE_FAILED_PRECONDITION, "dtype")
    assert "float32" in refused.value.message
    assert "bfloat16" in refused.value.message
    assert "--allow-mixed-dtypes" in refused.value.message
    system.attach(in_type("float32"))


def test_quantized_and_other_workers_do_not_mix(system: LocalSystem) -> None:
    """The tokens of quantized weights differ."""
    system.attach(in_type("bfloat16+int8"))
    with pytest.raises(Rejection, match=r"in bfloat16\+int8, not in bfloat16 "):
        system.scheduler.register_worker(in_type("bfloat16").registration)
    system.attach(in_type("bfloat16+int8"))


def test_live_requests_are_not_continued_in_another_data_type(system: LocalSystem, client: Client) -> None:
    system.kill(system.attach(in_type("float32")))
    system.submit("s", 1, [9], params())
    with pytest.raises(Rejection, match="dtype"):
        system.scheduler.register_worker(in_type("bfloat16").registration)
    system.cancel("s", 1)
    system.attach(in_type("bfloat16"))


def test_data_types_are_mixed_where_that_is_allowed() -> None:
    system = LocalSystem(SchedulerConfig(allow_mixed_dtypes=True))
    for dtype in ("float32", "bfloat16"):
        system.attach(in_type(dtype))
    assert len(system.scheduler.workers) == 2


@pytest.mark.parametrize("name", MAX_WORKER_SIZES)
def test_a_worker_of_impossible_size_is_refused(system: LocalSystem, name: str) -> None:
    for size in (0, MAX_WORKER_SIZES[name] + 1):
        registration = WorkerRegistration()
        registration.CopyFrom(toy().registration)
        setattr(registration, name, size)
        if size or name not in OPTIONAL_SIZES:
            with pytest.raises(Rejection, match=f"{name}: must be between . and ") as refused:
                system.scheduler.register_worker(registration)
            assert refused.value.field == name


def test_kv_of_a_failed_row_is_not_reused(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy())
    prompt = list(range(10, 30))
    run, failed = end.worker.run, list[Any]()

    def fail_first(plan: StepPlan) -> StepResult:
        result = run(plan)
        if not failed:
            failed.append(result.errors.add(slot=0, message="no numbers"))
        return result

    end.worker.run = fail_first  # type: ignore[method-assign]
    system.submit("s", 1, prompt, params())
    system.run()
    assert client.endings[1].reason == FinishReason.FINISH_REASON_ERROR
    system.submit("s", 2, [*prompt, 31], params())
    system.run()
    assert client.endings[2].cached_tokens == 0
    assert client.tokens[2] == expected_output([*prompt, 31], params())
    system.assert_at_rest()


def test_sessions_learn_the_free_queue_positions_and_the_number_of_counted_submissions(
    system: LocalSystem, client: Client
) -> None:
    def told(client: Client) -> tuple[int, int]:
        assert client.room is not None
        return client.room.places, client.room.num_submissions

    assert told(client) == (4, 0)
    other = system.open("t")
    for handle in range(1, 5):
        system.submit("s", handle, [9], params())
    assert (told(client), told(other)) == ((0, 4), (0, 0)), "the message that the queue is full has the count"
    submit_raw(system, 5, prompt_token_ids=pack(9), sampling=params())
    assert told(client) == (0, 5), "a refused submission counts"
    system.attach(toy())
    system.run()
    assert told(client) == (4, 5)
