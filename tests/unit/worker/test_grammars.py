"""Grammars: a runner's tokens against transformers' generate() with a processor of its own, and what fails alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.numpy import fill_next_token_bitmask
from transformers import LogitsProcessorList

from demo import CHECKPOINT
from gpu_worker.build import BuiltWorker
from gpu_worker.device import DeviceEvent
from gpu_worker.sampling import compiled, grammars
from gpu_worker.sampling.compiled import NO_TOKENIZER, PreparedGrammars
from gpu_worker.sampling.grammars import MISFIT, NOT_PREPARED, Grammars
from gpu_worker.sampling.processors import allow_bits
from gpu_worker.steps.results import INVALID_ARGUMENT, NO_TOKEN
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import NewSequence, StepPlan, StepResult
from tests.support import reference
from tests.support.grammars import GRAMMARS, JSON, SCHEMA, Follows
from tests.unit.worker.driver import Driver, Sequence, pack
from tests.unit.worker.families import Reference

NUM_TOKENS = 60


@pytest.fixture(scope="module")
def demo_ids() -> list[int]:
    return list(reference.tokenizer(str(CHECKPOINT))("Once upon a time")["input_ids"])


def text(ids: list[int]) -> str:
    return str(reference.tokenizer(str(CHECKPOINT)).decode(ids, skip_special_tokens=True))


def add(driver: Driver, prompt: list[int], grammar: str, output: list[int] = [], **sampling: float) -> Sequence:  # noqa: B006
    asked = SamplingParams(top_p=1, max_tokens=NUM_TOKENS, grammar=grammar, **sampling)  # type: ignore[arg-type]
    return driver.add(prompt, NUM_TOKENS, asked, output=output)


@pytest.mark.parametrize("chunk_tokens", [64, 3])
def test_a_mixed_batch_equals_transformers(build: Callable[..., BuiltWorker], chunk_tokens: int) -> None:
    """A story of the demo model: its free text differs from the text that each grammar allows."""
    story = list(reference.tokenizer(str(CHECKPOINT))("Once there was a fox")["input_ids"])
    driver = Driver(build(CHECKPOINT).runner, chunk_tokens=chunk_tokens)
    plain = driver.add(story, NUM_TOKENS)
    constrained = {name: add(driver, story, grammar) for name, grammar in GRAMMARS.items()}
    driver.run()
    assert plain.output == reference.greedy(CHECKPOINT, story, NUM_TOKENS)
    for name, sequence in constrained.items():
        processor = LogitsProcessorList([Follows(GRAMMARS[name], len(story))])
        expected = reference.processed(CHECKPOINT, story, NUM_TOKENS, logits_processor=processor)
        assert sequence.output == expected != plain.output, name


def test_a_row_knows_its_last_token_in_a_pipelined_step(
    build: Callable[..., BuiltWorker], demo_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has not finished a step when the next one is launched, as is usual on a GPU."""
    monkeypatch.setattr(DeviceEvent, "is_passed", lambda fence: False)
    driver = Driver(build(CHECKPOINT).runner)
    plain, constrained = driver.add(demo_ids, NUM_TOKENS), add(driver, demo_ids, JSON)
    driver.run()
    assert plain.output == reference.greedy(CHECKPOINT, demo_ids, NUM_TOKENS)
    processor = LogitsProcessorList([Follows(JSON, len(demo_ids))])
    expected = reference.processed(CHECKPOINT, demo_ids, NUM_TOKENS, logits_processor=processor)
    assert constrained.output == expected


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_resumed_sequence_continues_with_the_same_tokens(
    build: Callable[..., BuiltWorker], demo_ids: list[int], name: str
) -> None:
    driver = Driver(build(CHECKPOINT).runner)
    whole = add(driver, demo_ids, GRAMMARS[name], temperature=1.0, seed=3)
    driver.run()
    for cut in (1, 2, 7, NUM_TOKENS - 1):
        again = add(driver, demo_ids, GRAMMARS[name], output=whole.output[:cut], temperature=1.0, seed=3)
        driver.run()
        assert again.output == whole.output, cut


def test_every_seed_gives_output_that_the_schema_allows(build: Callable[..., BuiltWorker], demo_ids: list[int]) -> None:
    driver = Driver(build(CHECKPOINT).runner)
    made = [add(driver, demo_ids, JSON, temperature=1.5, seed=seed) for seed in range(30)]
    driver.run()
    texts = [text(sequence.output) for sequence in made]
    for one in texts:
        jsonschema.validate(json.loads(one), SCHEMA)
    assert len(set(texts)) > 20


def test_other_parameters_choose_among_the_allowed_tokens(
    build: Callable[..., BuiltWorker], demo_ids: list[int]
) -> None:
    driver = Driver(build(CHECKPOINT).runner)
    grammar = grammar_from("choice", '["aaaa", "zzzz"]')
    first = add(driver, demo_ids, grammar)
    driver.run()
    favoured = add(driver, demo_ids, grammar, repetition_penalty=1.3)
    asked = SamplingParams(top_p=1, max_tokens=NUM_TOKENS, grammar=grammar, bad_words=[pack(first.output[:1])])
    banned = driver.add(demo_ids, NUM_TOKENS, asked)
    driver.run()
    assert {text(first.output), text(banned.output)} == {"aaaa", "zzzz"}
    assert text(favoured.output) in ("aaaa", "zzzz")


def failures(result: StepResult) -> dict[int, tuple[int, str]]:
    return {error.slot: (error.code, error.message) for error in result.errors}


def test_a_row_without_an_allowed_token_fails_alone(build: Callable[..., BuiltWorker], demo_ids: list[int]) -> None:
    driver = Driver(build(CHECKPOINT).runner)
    plain = driver.add(demo_ids, NUM_TOKENS)
    good = add(driver, demo_ids, JSON)
    assert driver.prepare("start: nope") == 'grammar: at 1(8): unknown name: "nope" 1 | start: nope ^'
    broken = add(driver, demo_ids, "start: nope")
    other = add(driver, demo_ids, JSON, output=demo_ids[:3])
    ambiguous = 'start: a\na: a a | "x" | ""'
    crowded = add(driver, demo_ids, 'start: /[a-z]/ "?"', min_tokens=9)
    failed = failures(driver.run_step())
    assert failed.keys() == {broken.slot, other.slot}
    assert failed[broken.slot] == (INVALID_ARGUMENT, NOT_PREPARED)
    code, message = failed[other.slot]
    assert (code, message.startswith(MISFIT)) == (INVALID_ARGUMENT, True)
    for sequence in (broken, other):
        driver.free(sequence)
    assert not driver.run_step().errors
    assert failures(driver.run_step()) == {crowded.slot: (INVALID_ARGUMENT, NO_TOKEN)}
    driver.free(crowded)
    late = add(driver, demo_ids, ambiguous)
    driver.run()
    assert plain.output == reference.greedy(CHECKPOINT, demo_ids, NUM_TOKENS)
    jsonschema.validate(json.loads(text(good.output)), SCHEMA)
    assert set(text(late.output)) <= {"x"}


def test_a_grammar_is_refused_without_a_tokenizer(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    driver = Driver(build(reference("qwen2").folder).runner)
    plain, constrained = driver.add([5, 6, 7], 9), add(driver, [5, 6, 7], JSON)
    assert failures(driver.run_step()) == {constrained.slot: (INVALID_ARGUMENT, NO_TOKENIZER)}
    assert len(plain.output) == 1


def test_slots_have_the_grammars_of_their_sequences() -> None:
    tokenizer = LLTokenizer(str(CHECKPOINT / "tokenizer.json"), eos_token=[0])
    held, prepared = Grammars(tokenizer, 1024, torch.device("cpu")), PreparedGrammars()
    held.reset(prepared)
    for slot in range(9):
        asked = SamplingParams(grammar=grammar_from("regex", "a" * (slot % 5 + 1)))
        assert not prepared.prepare(tokenizer, slot, asked.grammar)
        held.apply(StepPlan(new_sequences=[NewSequence(slot=slot, num_prompt_tokens=1, sampling=asked)]))
    assert len(held.of(np.arange(12, dtype=np.int32))) == 9
    held.apply(StepPlan(free_slots=pack([0, 3])))
    assert [slot for _, slot in held.of(np.array([3, 2, 0], np.int32))] == [2]
    held.reset(PreparedGrammars())
    assert not held.of(np.arange(12, dtype=np.int32))


def test_a_grammar_is_forgotten_by_its_number() -> None:
    tokenizer = LLTokenizer(str(CHECKPOINT / "tokenizer.json"), eos_token=[0])
    prepared, grammar = PreparedGrammars(), grammar_from("regex", "a")
    prepared.prepare(tokenizer, 1, grammar)
    prepared.prepare(tokenizer, 2, grammar)
    prepared.forget(1)
    assert prepared.get(grammar) is not None, "it was prepared anew since"
    prepared.forget(2)
    assert prepared.get(grammar) is None


@pytest.mark.parametrize("few_rows", [0, 9])
def test_a_grammar_with_slow_masks_fails_alone(
    build: Callable[..., BuiltWorker], demo_ids: list[int], monkeypatch: pytest.MonkeyPatch, few_rows: int
) -> None:
    """The worker measures each mask by itself if a step has few rows, or if it has many rows and the step was slow.
    Both cases run on the test's clock."""
    slow_rows, clock = [JSON], [0.0]
    fill = fill_next_token_bitmask

    def timed(matcher: LLMatcher, bits: np.ndarray, row: int) -> None:
        fill(matcher, bits, row)
        clock[0] += 0.5 if row == 0 else 0.001

    monkeypatch.setattr(grammars, "FEW_ROWS", few_rows)
    monkeypatch.setattr(grammars, "SLOW_STEP_S", -1.0)
    monkeypatch.setattr(grammars, "fill_next_token_bitmask", timed)
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    driver = Driver(build(CHECKPOINT).runner)
    plain, slow = driver.add(demo_ids, NUM_TOKENS), add(driver, demo_ids, slow_rows[0])
    good = add(driver, demo_ids, GRAMMARS["regex"])
    while not (failed := failures(driver.run_step())):
        assert len(slow.output) < 20
    assert failed == {
        slow.slot: (
            INVALID_ARGUMENT,
            "grammar: takes 500 ms of CPU time for a token for the 3rd time; the limit is 10 ms",
        )
    }
    driver.free(slow)
    monkeypatch.undo()
    driver.run()
    assert plain.output == reference.greedy(CHECKPOINT, demo_ids, NUM_TOKENS)
    processor = LogitsProcessorList([Follows(GRAMMARS["regex"], len(demo_ids))])
    assert good.output == reference.processed(CHECKPOINT, demo_ids, NUM_TOKENS, logits_processor=processor)


def test_many_grammars_with_moderate_masks_leave_20_ms_of_a_step(
    build: Callable[..., BuiltWorker], demo_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mask takes 3 ms, on a clock of the test's: six of them fit, and cheap masks always do."""
    clock, cheap_row = [0.0], 7
    fill = fill_next_token_bitmask

    def timed(matcher: LLMatcher, bits: np.ndarray, row: int) -> None:
        fill(matcher, bits, row)
        clock[0] += 0.0005 if row == cheap_row else 0.003

    monkeypatch.setattr(grammars, "FEW_ROWS", 100)
    monkeypatch.setattr(grammars, "fill_next_token_bitmask", timed)
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    driver = Driver(build(CHECKPOINT).runner)
    plain = driver.add(demo_ids, NUM_TOKENS)
    constrained = [add(driver, demo_ids, GRAMMARS["regex"]) for _ in range(12)]
    failed = {slot: error for _ in range(8) for slot, error in failures(driver.run_step()).items()}
    limit = "the limit for all structured outputs of a step is 20 ms"
    assert set(failed.values()) == {
        (INVALID_ARGUMENT, f"grammar: takes 3 ms of CPU time for a token for the 3rd time; {limit}")
    }
    assert len(failed) == 5  # 0.5 ms and 6 of 11 times 3 ms are within 20 ms
    assert constrained[cheap_row].slot not in failed
    assert not plain.ended


def test_a_full_lexer_that_takes_long_to_begin_anew_fails_alone(
    build: Callable[..., BuiltWorker], demo_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_RENEWAL_S", -1.0)
    monkeypatch.setattr(compiled, "LIMITS", LLParserLimits(max_lexer_states=250, verbose_errors=False))
    driver = Driver(build(CHECKPOINT).runner)
    plain = driver.add(demo_ids, NUM_TOKENS)
    grammar = grammar_from("regex", "(.|\\n)*q(.|\\n){200}")
    constrained = [add(driver, demo_ids, grammar, temperature=2.0, seed=seed) for seed in range(6)]
    while not (failed := failures(driver.run_step())):
        assert not plain.ended
    for sequence in constrained:
        if sequence.slot in failed:
            assert failed[sequence.slot][0] == INVALID_ARGUMENT
            assert "too many states" in failed[sequence.slot][1]
        driver.free(sequence)
    driver.run()
    assert plain.output == reference.greedy(CHECKPOINT, demo_ids, NUM_TOKENS)


def test_a_full_lexer_begins_anew_and_no_output_changes(
    build: Callable[..., BuiltWorker], demo_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sequences with a grammar share its lexer states. The states may run out at any position of a text."""
    grammar = grammar_from("regex", "(.|\\n)*q(.|\\n){200}")

    def outputs() -> list[list[int]]:
        driver = Driver(build(CHECKPOINT).runner)
        made = [add(driver, demo_ids, grammar, temperature=2.0, seed=seed) for seed in range(6)]
        driver.run()
        late = add(driver, demo_ids, grammar, temperature=2.0, seed=9)
        driver.run()
        return [sequence.output for sequence in (*made, late)]

    expected = outputs()
    renewed = []
    compile_one = Grammars._compile

    def counted(held: Grammars, asked: str) -> compiled.Compiled:
        renewed.append(asked)
        return compile_one(held, asked)

    monkeypatch.setattr(Grammars, "_compile", counted)
    monkeypatch.setattr(grammars, "MAX_RENEWAL_S", 10.0)
    monkeypatch.setattr(compiled, "LIMITS", LLParserLimits(max_lexer_states=250, verbose_errors=False))
    assert outputs() == expected
    assert len(renewed) > 2, "it was full, more than once"
    monkeypatch.setattr(compiled, "LIMITS", LLParserLimits(max_lexer_states=12, verbose_errors=False))
    driver = Driver(build(CHECKPOINT).runner)
    assert "too many states" in driver.prepare(grammar)


@given(vocab=st.integers(1, 70), count=st.integers(1, 4), data=st.data())
@settings(max_examples=60, deadline=None)
def test_bits_are_read_from_the_lowest_on(vocab: int, count: int, data: st.DataObject) -> None:
    rows = data.draw(st.permutations(range(5)))[:count]
    words = -(-vocab // 32)
    packed = data.draw(st.binary(min_size=4 * words * count, max_size=4 * words * count))
    bits = np.frombuffer(packed, np.uint8).reshape(count, -1).copy()
    logits = torch.arange(5.0 * vocab).reshape(5, vocab)
    expected = logits.clone()
    for row, own in zip(rows, bits.tolist(), strict=True):
        for token in range(vocab):
            if not own[token // 8] >> token % 8 & 1:
                expected[row, token] = -torch.inf
    allow_bits(logits, torch.tensor(rows), torch.from_numpy(bits))
    assert torch.equal(logits, expected)
