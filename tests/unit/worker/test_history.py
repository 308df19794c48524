"""When a link has ended, a worker reports exactly the tokens that its blocks contain."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gpu_worker.build import BuiltWorker
from gpu_worker.steps.history import TokenHistory
from paceline.v1.worker_pb2 import KeptSequence
from tests.unit.worker.driver import Driver, Sequence
from tests.unit.worker.families import VOCAB, Reference

References = Callable[[str], Reference]
Build = Callable[..., BuiltWorker]
ENOUGH = 2**20
_rng = np.random.default_rng(7)
PROMPTS = [_rng.integers(0, VOCAB, size=n).tolist() for n in (3, 20, 70)]


def tokens_of(kept: KeptSequence) -> list[int]:
    return np.frombuffer(kept.token_ids, "<i4").tolist()


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_worker_knows_all_tokens_and_blocks_of_running_sequences(reference: References, build: Build) -> None:
    runner = build(reference("llama-tied").folder, block_size=8).runner
    driver = Driver(runner, chunk_tokens=16)
    sequences = [driver.add(prompt, 40) for prompt in PROMPTS]
    for _ in range(3):  # the longest one is still being prefilled
        driver.run_step()
    gone = driver.running[0]
    driver.free(gone)
    again = driver.add([5, 6, 7], 9)  # in the same slot
    driver.run_step()
    kept = {tuple(tokens_of(one)): one for one in runner.kept(ENOUGH)}
    assert kept.keys() == {tuple(s.tokens) for s in [*sequences[1:], again]}
    for sequence in [*sequences[1:], again]:
        one = kept[tuple(sequence.tokens)]
        assert one.num_computed_tokens == sequence.num_computed
        assert np.frombuffer(one.block_table, "<i4").tolist() == sequence.blocks
    assert runner.kept(ENOUGH) == runner.kept(ENOUGH), "asking changes nothing"
    runner.reset()
    assert runner.kept(ENOUGH) == []


def test_kept_sequences_can_be_reused(reference: References, build: Build) -> None:
    """Another link reuses the reported blocks, computes the last token, and continues with the same tokens."""
    checkpoint = reference("llama-tied")
    runner = build(checkpoint.folder, block_size=8).runner
    before = Driver(runner, chunk_tokens=64)
    first = before.add(PROMPTS[1], 12)
    for _ in range(6):
        before.run_step()
    (kept,) = runner.kept(ENOUGH)
    runner.reset()
    after = Driver(runner, chunk_tokens=64)
    blocks, tokens = np.frombuffer(kept.block_table, "<i4").tolist(), tokens_of(kept)
    after.free_blocks = [block for block in after.free_blocks if block not in blocks]
    num_cached = kept.num_computed_tokens // 8 * 8
    again = Sequence(0, tokens, len(PROMPTS[1]), num_cached, len(PROMPTS[1]) + 12, blocks, first.sampling)
    after.running[0] = again
    after.arrivals.append(again)
    after.run()
    assert again.output == checkpoint.greedy(PROMPTS[1], 12)


def test_a_report_of_kept_sequences_is_limited_in_bytes(reference: References, build: Build) -> None:
    runner = build(reference("llama-tied").folder, block_size=8).runner
    driver = Driver(runner)
    for prompt in PROMPTS:
        driver.add(prompt, 5)
    driver.run_step()
    everything = runner.kept(ENOUGH)
    assert runner.kept(sum(one.ByteSize() for one in everything[:2])) == everything[:2]
    assert runner.kept(0) == []


def test_nothing_is_kept_after_a_step_that_raised(
    reference: References, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build(reference("llama-tied").folder).runner
    driver = Driver(runner)
    driver.add(PROMPTS[0], 5)
    driver.run_step()

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(runner, "_forward", fail)
    with pytest.raises(RuntimeError):
        driver.run_step()
    assert runner.kept(ENOUGH) == []


def test_late_tokens_of_a_slots_old_sequence_are_dropped() -> None:
    history = TokenHistory(4, 8)
    history.begin(1, int32(10, 11))
    history.begin(2, int32(20))
    step = history.sampling(int32(1, 2), int32(2, 1))
    history.free(int32(1))
    history.begin(1, int32(30, 31))
    history.note(step, np.array([12, 21]))
    assert history.of(1).tolist() == [30, 31]
    assert history.of(2).tolist() == [20, 21]


def test_a_failed_row_leaves_no_known_tokens() -> None:
    history = TokenHistory(4, 8)
    history.begin(1, int32(10))
    history.begin(2, int32(20))
    history.note(history.sampling(int32(1, 2), int32(1, 1)), np.array([-1, 21]))
    history.note(history.sampling(int32(1, 2), int32(2, 2)), np.array([12, 22]))
    assert history.of(1).tolist() == []
    assert history.of(2).tolist() == [20, 21, 22]


def test_several_tokens_of_a_slot_become_known_at_once() -> None:
    history = TokenHistory(2, 5)
    history.begin(1, int32(10, 11))
    history.extend(1, int32(12, 13, 14, 15))
    assert history.of(1).tolist() == [10, 11, 12, 13, 14, 15]
    history.extend(1, int32())
    assert history.of(1).tolist() == []


def test_the_longest_sequence_has_room_for_a_token_more() -> None:
    history = TokenHistory(2, 5)
    history.begin(1, np.arange(5, dtype=np.int32))
    history.note(history.sampling(int32(1), int32(5)), np.array([9]))
    assert history.of(1).tolist() == [0, 1, 2, 3, 4, 9]
    assert history.of(0).tolist() == []
