"""Plans that break the contract fail definitely, and before anything is computed from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu_worker.errors import ProtocolViolation
from gpu_worker.steps.slots import SlotBuffers, SlotLimits
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import NewSequence, StepPlan
from tests.unit.worker.driver import pack

LIMITS = SlotLimits(
    max_num_seqs=4,
    max_batched_tokens=20,
    max_model_len=64,
    block_size=4,
    num_blocks=10,
    vocab_size=100,
    eos_token_ids=(0,),
    num_host_blocks=5,
)


def new(slot: int = 0, tokens: int = 6, blocks: tuple[int, ...] = (1, 2), **changes: Any) -> NewSequence:
    values: dict[str, Any] = {
        "slot": slot,
        "token_ids": pack(range(1, tokens + 1)),
        "num_prompt_tokens": tokens,
        "block_table": pack(blocks),
        "sampling": SamplingParams(top_p=1, max_tokens=5),
        "request_id": "r",
    }
    return NewSequence(**{**values, **changes})


def prefill(step: int, slot: int, tokens: int, **changes: Any) -> StepPlan:
    return StepPlan(step=step, prefill_slots=pack([slot]), prefill_tokens=pack([tokens]), **changes)


@pytest.fixture
def table() -> SlotBuffers:
    """Slot 0 decodes its seventh token (two blocks of four); slot 1 has computed 3 of 9."""
    table = SlotBuffers(LIMITS)
    plan = StepPlan(
        step=1, new_sequences=[new(), new(1, 9, (3, 4, 5))], prefill_slots=pack([0, 1]), prefill_tokens=pack([6, 3])
    )
    rows = table.apply(plan)
    sampled = table.sampling(rows)
    table.commit(rows)
    table.history.note(sampled, np.array([7]))
    return table


def draft(step: int, slot: int, *tokens: int, **changes: Any) -> StepPlan:
    fields = {"draft_slots": pack([slot]), "draft_counts": pack([len(tokens)]), "draft_tokens": pack(tokens)}
    return StepPlan(step=step, **{**fields, **changes})


def test_an_empty_plan_decodes_the_running_sequences(table: SlotBuffers) -> None:
    rows = table.apply(StepPlan(step=2))
    assert (rows.slots.tolist(), rows.starts.tolist(), rows.counts.tolist()) == ([0], [6], [1])
    assert rows.samples.tolist() == [True]


def test_decodes_come_first_in_slot_order_then_prefills_in_plan_order(table: SlotBuffers) -> None:
    plan = StepPlan(
        step=2,
        new_sequences=[new(3, 2, (6,)), new(2, 2, (7,))],
        prefill_slots=pack([3, 1, 2]),
        prefill_tokens=pack([2, 4, 1]),
    )
    rows = table.apply(plan)
    assert rows.slots.tolist() == [0, 3, 1, 2]
    assert rows.samples.tolist() == [True, True, False, False]
    assert table.prefill_tokens(rows).tolist() == [1, 2, 4, 5, 6, 7, 1]


def test_a_slot_is_freed_taken_and_grown_in_one_plan(table: SlotBuffers) -> None:
    plan = prefill(
        2,
        0,
        9,
        free_slots=pack([0]),
        new_sequences=[new(0, 9, (6,))],
        grow_slots=pack([0, 0]),
        grow_blocks=pack([7, 8]),
    )
    rows = table.apply(plan)
    assert rows.slots.tolist() == [0]
    assert table.block_table[0, :3].tolist() == [6, 7, 8]


def test_growth_of_several_slots_at_once(table: SlotBuffers) -> None:
    table.apply(StepPlan(step=2, grow_slots=pack([1, 0, 1]), grow_blocks=pack([8, 9, 10])))
    assert table.block_table[0, :3].tolist() == [1, 2, 9]
    assert table.block_table[1, :5].tolist() == [3, 4, 5, 8, 10]
    assert table.num_blocks.tolist() == [3, 5, 0, 0]


def test_entries_of_the_block_tables_are_counted_through_growth_and_the_end_of_a_sequence(table: SlotBuffers) -> None:
    assert table.table_blocks == 2 + 3
    table.apply(StepPlan(step=2, grow_slots=pack([0, 1, 0]), grow_blocks=pack([6, 7, 8])))
    assert table.table_blocks == 4 + 4
    table.apply(StepPlan(step=3, free_slots=pack([0]), new_sequences=[new(0, 2, (9,))], skip_decodes=True))
    assert table.table_blocks == 1 + 4
    table.reset()
    assert table.table_blocks == 0


def test_rows_that_report_log_probabilities_are_those_that_ask_for_them(table: SlotBuffers) -> None:
    asking = SamplingParams(top_p=1, max_tokens=5, logprobs=True, num_top_logprobs=3)
    rows = table.apply(prefill(2, 2, 2, new_sequences=[new(2, 2, (6,), sampling=asking)]))
    parameters = table.sampling_rows(rows)
    assert (parameters.scored.tolist(), parameters.num_top.tolist()) == ([1], [3])
    table.commit(rows)
    rows = table.apply(prefill(3, 2, 2, free_slots=pack([2]), new_sequences=[new(2, 2, (6,))]))
    assert table.sampling_rows(rows).scored.tolist() == []


def test_a_new_sequence_with_all_but_its_last_token_cached_waits_for_its_prefill(table: SlotBuffers) -> None:
    rows = table.apply(StepPlan(step=2, new_sequences=[new(2, 5, (1, 2), num_cached_tokens=4)]))
    assert rows.slots.tolist() == [0]
    table.commit(rows)
    rows = table.apply(prefill(3, 2, 1))
    assert (rows.slots.tolist(), rows.starts.tolist()) == ([0, 2], [7, 4])


def test_a_decode_past_the_last_block_is_refused(table: SlotBuffers) -> None:
    for step in (2, 3):
        table.commit(table.apply(StepPlan(step=step)))
    with pytest.raises(ProtocolViolation, match="too few for 9 tokens"):
        table.apply(StepPlan(step=4))


def test_a_paused_slot_waits_and_a_step_may_skip_all_decodes(table: SlotBuffers) -> None:
    """Slot 0 decodes. A paused or skipped sequence keeps its position."""
    table.commit(table.apply(prefill(2, 1, 3, hold_slots=pack([0]))))
    rows = table.apply(prefill(3, 1, 2))
    assert rows.slots.tolist() == [1]
    table.commit(rows)
    rows = table.apply(prefill(4, 1, 1, resume_slots=pack([0]), skip_decodes=True))
    assert (rows.slots.tolist(), rows.samples.tolist()) == ([1], [True])
    table.commit(rows)
    rows = table.apply(StepPlan(step=5))
    assert (rows.slots.tolist(), rows.starts.tolist()) == ([0, 1], [6, 9])


def test_draft_rows_come_last_and_count_when_their_tokens_are_known(table: SlotBuffers) -> None:
    """Slot 0 has its seventh token, and two drafts. Only the first one is right."""
    plan = draft(2, 0, 50, 51, hold_slots=pack([0]), prefill_slots=pack([1]), prefill_tokens=pack([2]))
    plan.MergeFrom(StepPlan(grow_slots=pack([0]), grow_blocks=pack([6])))
    rows = table.apply(plan)
    assert (rows.slots.tolist(), rows.starts.tolist(), rows.counts.tolist()) == ([1, 0], [3, 6], [2, 3])
    assert (rows.samples.tolist(), rows.num_drafted, rows.num_draft_rows) == ([False, False], 1, 3)
    assert table.prefill_tokens(rows).tolist() == [4, 5, 7, 50, 51]
    table.commit(rows)
    assert (table.num_tokens[:2].tolist(), table.num_computed[:2].tolist()) == ([7, 9], [6, 5])
    table.advance(0, np.array([50, 60], np.int32))
    assert (table.num_tokens[0], table.num_computed[0]) == (9, 8)
    assert table.history.of(0).tolist() == [1, 2, 3, 4, 5, 6, 7, 50, 60]
    rows = table.apply(StepPlan(step=3, resume_slots=pack([0])))
    assert (rows.slots.tolist(), rows.starts.tolist(), rows.samples.tolist()) == ([0], [8], [True])


def test_a_draft_row_without_a_draft_is_no_decode_row(table: SlotBuffers) -> None:
    rows = table.apply(draft(2, 0, hold_slots=pack([0])))
    assert (rows.num_decodes, rows.counts.tolist(), rows.samples.tolist()) == (0, [1], [False])
    assert table.prefill_tokens(rows).tolist() == [7]


def test_blocks_of_a_prefill_may_come_with_its_chunks(table: SlotBuffers) -> None:
    plan = prefill(2, 2, 4, new_sequences=[new(2, 9, (6,))])
    table.commit(table.apply(plan))
    plan = prefill(3, 2, 5, grow_slots=pack([2, 2]), grow_blocks=pack([7, 8]))
    rows = table.apply(plan)
    assert (rows.starts[-1], rows.counts[-1], bool(rows.samples[-1])) == (4, 5, True)
    assert table.block_table[2, :3].tolist() == [6, 7, 8]


def test_a_sequence_may_come_with_only_the_blocks_of_its_cached_tokens(table: SlotBuffers) -> None:
    table.commit(table.apply(StepPlan(step=2, new_sequences=[new(2, 9, (6,), num_cached_tokens=4)])))
    rows = table.apply(prefill(3, 2, 5, grow_slots=pack([2, 2]), grow_blocks=pack([7, 8])))
    assert (rows.starts[-1], rows.counts[-1]) == (4, 5)
    assert table.block_table[2, :3].tolist() == [6, 7, 8]


def test_swaps_come_first_and_a_sequence_resumes_as_a_new_one(table: SlotBuffers) -> None:
    """The sequence of slot 0 leaves, and the same plan gives its blocks to another. It resumes in another slot."""
    plan = prefill(2, 2, 8, free_slots=pack([0]), new_sequences=[new(2, 8, (1, 2, 8))])
    plan.swap_out_from, plan.swap_out_to = pack([1, 2]), pack([4, 5])
    rows = table.apply(plan)
    assert [blocks.tolist() for blocks in rows.swaps_out] == [[1, 2], [4, 5]]
    assert rows.granted_blocks.tolist() == [1, 2, 8]
    table.commit(rows)
    plan = prefill(3, 3, 1, new_sequences=[new(3, 7, (6, 7), num_cached_tokens=6)])
    plan.swap_in_from, plan.swap_in_to = pack([4, 5]), pack([6, 7])
    rows = table.apply(plan)
    assert [blocks.tolist() for blocks in rows.swaps_in] == [[4, 5], [6, 7]]
    assert rows.granted_blocks.tolist() == []  # their content comes with them
    assert (rows.slots.tolist(), rows.starts.tolist(), rows.samples.tolist()) == ([2, 3], [8, 6], [True, True])


def test_a_slot_keeps_nothing_of_the_sequence_before(table: SlotBuffers) -> None:
    """With an old cache salt, the next sequence's KV would enter a namespace that its tenant cannot see."""
    sampling = SamplingParams(
        top_p=0.5, top_k=3, min_p=0.1, typical_p=0.9, temperature=0.7, seed=9, max_tokens=5, min_tokens=4,
        logprobs=True, num_top_logprobs=2, prompt_logprobs=True, num_top_prompt_logprobs=1,
    )  # fmt: skip
    rows = table.apply(prefill(2, 2, 2, new_sequences=[new(2, 6, (6, 7), cache_salt="secret", sampling=sampling)]))
    assert table.prompt_rows(rows) is not None
    table.commit(rows)
    assert [kept.cache_salt for kept in table.kept(10_000)] == ["", "", "secret"]
    rows = table.apply(prefill(3, 2, 6, free_slots=pack([2]), new_sequences=[new(2, 6, (6, 7))]))
    fresh = SlotBuffers(LIMITS)
    expected = fresh.apply(prefill(1, 2, 6, new_sequences=[new(2, 6, (6, 7))]))
    assert table.prompt_rows(rows) is None
    asked, right = table.sampling_rows(rows), fresh.sampling_rows(expected)
    where = rows.slots[rows.samples].tolist().index(2)
    for name in ("temperature", "top_p", "top_k", "min_p", "typical_p"):
        assert asked.columns[name][where] == right.columns[name][0], name
    for column in ("seed", "position"):
        assert getattr(asked, column)[where] == getattr(right, column)[0], column
    assert (len(asked.banned_rows), len(asked.scored)) == (0, 0)
    table.commit(rows)
    fresh.commit(expected)
    assert table.kept(10_000)[2] == fresh.kept(10_000)[0]


def test_only_prompts_that_are_to_be_scored_have_scored_rows(table: SlotBuffers) -> None:
    """Two prompts in one step: only the second request asks for prompt log probabilities."""
    sampling = SamplingParams(top_p=1, max_tokens=5, prompt_logprobs=True, num_top_prompt_logprobs=3)
    plan = StepPlan(
        step=2,
        new_sequences=[new(2, 4, (6,)), new(3, 4, (7,), sampling=sampling)],
        prefill_slots=pack([2, 3]),
        prefill_tokens=pack([4, 4]),
    )
    rows = table.prompt_rows(table.apply(plan))
    assert rows is not None
    assert rows.rows.tolist() == [5, 6, 7], "its rows follow one decode and the other prompt"
    [chunk] = rows.chunks
    assert (chunk.slot, chunk.start, chunk.tokens.tolist(), chunk.num_top) == (3, 1, [2, 3, 4], 3)


def test_reset_forgets_everything(table: SlotBuffers) -> None:
    table.reset()
    assert table.apply(prefill(1, 0, 6, new_sequences=[new()])).slots.tolist() == [0]


VIOLATIONS: dict[str, tuple[Callable[[], StepPlan], str]] = {
    "step left out": (lambda: StepPlan(step=3), "step 3 follows step 1"),
    "step twice": (lambda: StepPlan(step=1), "step 1 follows step 1"),
    "free of an empty slot": (lambda: StepPlan(step=2, free_slots=pack([2])), "holds no sequence"),
    "free of no slot": (lambda: StepPlan(step=2, free_slots=pack([-1])), "holds no sequence"),
    "free twice": (lambda: StepPlan(step=2, free_slots=pack([0, 0])), "twice"),
    "slot taken": (lambda: StepPlan(step=2, new_sequences=[new(1)]), "which is taken"),
    "slot beyond": (lambda: StepPlan(step=2, new_sequences=[new(4)]), "slot 4 of 4"),
    "no tokens": (lambda: StepPlan(step=2, new_sequences=[new(2, 0)]), "0 tokens"),
    "no prompt": (lambda: StepPlan(step=2, new_sequences=[new(2, num_prompt_tokens=0)]), "prompt: 0"),
    "too long": (lambda: StepPlan(step=2, new_sequences=[new(2, 65)]), "65 tokens"),
    "token beyond": (
        lambda: StepPlan(step=2, new_sequences=[new(2, token_ids=pack([1, 100]), num_prompt_tokens=2)]),
        "v",
    ),
    "negative token": (
        lambda: StepPlan(step=2, new_sequences=[new(2, token_ids=pack([-1]), num_prompt_tokens=1)]),
        "v",
    ),
    "all cached": (lambda: StepPlan(step=2, new_sequences=[new(2, num_cached_tokens=6)]), "6 cached"),
    "cached without blocks": (
        lambda: StepPlan(step=2, new_sequences=[new(2, 10, (1,), num_cached_tokens=5)]),
        "in 1 blocks",
    ),
    "dummy block": (lambda: StepPlan(step=2, new_sequences=[new(2, blocks=(1, 0))]), "outside 1..10"),
    "block beyond": (lambda: StepPlan(step=2, new_sequences=[new(2, blocks=(1, 11))]), "outside 1..10"),
    "table too long": (lambda: StepPlan(step=2, new_sequences=[new(2, blocks=(1,) * 11)]), "more than a sequence"),
    "grow of an empty slot": (lambda: StepPlan(step=2, grow_slots=pack([3]), grow_blocks=pack([1])), "no sequence"),
    "grow with the dummy": (lambda: StepPlan(step=2, grow_slots=pack([0]), grow_blocks=pack([0])), "outside"),
    "grow uneven": (lambda: StepPlan(step=2, grow_slots=pack([0]), grow_blocks=pack([1, 2])), "1 grow_slots and 2"),
    "grow too far": (lambda: StepPlan(step=2, grow_slots=pack([0] * 9), grow_blocks=pack([1] * 9)), "past the longest"),
    "prefill of an empty slot": (lambda: prefill(2, 2, 1), "no sequence"),
    "prefill of a decode": (lambda: prefill(2, 0, 1), "a decoding slot"),
    "prefill of nothing": (lambda: prefill(2, 1, 0), "uncomputed tokens"),
    "prefill past the end": (lambda: prefill(2, 1, 7), "uncomputed tokens"),
    "prefill uneven": (lambda: StepPlan(step=2, prefill_slots=pack([1])), "0 prefill_tokens"),
    "table too short": (lambda: prefill(2, 2, 6, new_sequences=[new(2, blocks=(1,))]), "too few for 6 tokens"),
    "budget": (
        lambda: StepPlan(
            step=2,
            new_sequences=[new(2, 20, (6, 7, 8, 9, 10))],
            prefill_slots=pack([2, 1]),
            prefill_tokens=pack([19, 1]),
        ),
        "21 rows in a step of at most 20",
    ),
    "pause of a prefill": (lambda: StepPlan(step=2, hold_slots=pack([1])), "hold_slots"),
    "pause of an empty slot": (lambda: StepPlan(step=2, hold_slots=pack([3])), "no sequence"),
    "pause twice": (lambda: StepPlan(step=2, hold_slots=pack([0, 0])), "hold_slots"),
    "resume of a slot that is not paused": (lambda: StepPlan(step=2, resume_slots=pack([0])), "resume_slots"),
    "swap out uneven": (lambda: StepPlan(step=2, swap_out_from=pack([1])), "1 blocks in swap_out_from and 0"),
    "swap out beyond": (lambda: StepPlan(step=2, swap_out_from=pack([11]), swap_out_to=pack([1])), "outside 1..10"),
    "swap out to no host block": (
        lambda: StepPlan(step=2, swap_out_from=pack([1]), swap_out_to=pack([6])),
        "host block id outside 1..5",
    ),
    "swap out twice to one": (
        lambda: StepPlan(step=2, swap_out_from=pack([1, 2]), swap_out_to=pack([3, 3])),
        "swap_out_to names a block twice",
    ),
    "swap in uneven": (lambda: StepPlan(step=2, swap_in_to=pack([1])), "0 blocks in swap_in_from and 1"),
    "swap in from no host block": (
        lambda: StepPlan(step=2, swap_in_from=pack([0]), swap_in_to=pack([1])),
        "host block id outside 1..5",
    ),
    "swap in to the dummy": (lambda: StepPlan(step=2, swap_in_from=pack([1]), swap_in_to=pack([0])), "outside 1..10"),
    "swap in twice to one": (
        lambda: StepPlan(step=2, swap_in_from=pack([1, 2]), swap_in_to=pack([3, 3])),
        "swap_in_to names a block twice",
    ),
    "copy twice to one": (
        lambda: StepPlan(step=2, copy_from=pack([1, 2]), copy_to=pack([3, 3])),
        "copy_to names a block twice",
    ),
    "copy to a source": (
        lambda: StepPlan(step=2, copy_from=pack([1, 2]), copy_to=pack([2, 3])),
        "copy_to names a block of copy_from",
    ),
    "draft of a slot that is not held": (lambda: draft(2, 0, 5), "must be held"),
    "draft of a prefill": (lambda: draft(2, 1, 5), "must be held"),
    "draft of an empty slot": (lambda: draft(2, 3, 5), "no sequence"),
    "draft of a resumed slot": (lambda: draft(2, 0, 5, hold_slots=pack([0]), resume_slots=pack([0])), "must be held"),
    "draft twice": (
        lambda: draft(2, 0, hold_slots=pack([0]), draft_slots=pack([0, 0]), draft_counts=pack([0, 0])),
        "named only once",
    ),
    "draft without counts": (
        lambda: draft(2, 0, hold_slots=pack([0]), draft_counts=b""),
        r"1 draft_slots, draft_counts \[\] and 0 draft_tokens",
    ),
    "draft without slots": (lambda: draft(2, 0, 5, draft_slots=b"", draft_counts=b""), "0 draft_slots"),
    "draft with fewer tokens": (
        lambda: draft(2, 0, 5, hold_slots=pack([0]), draft_counts=pack([2])),
        r"draft_counts \[2\] and 1 draft_tokens",
    ),
    "draft with a negative count": (
        lambda: draft(2, 0, hold_slots=pack([0]), draft_counts=pack([-1])),
        r"draft_counts \[-1\]",
    ),
    "draft token beyond": (lambda: draft(2, 0, 100, hold_slots=pack([0])), "outside the vocabulary"),
    "negative draft token": (lambda: draft(2, 0, -1, hold_slots=pack([0])), "outside the vocabulary"),
    "drafts past the blocks": (lambda: draft(2, 0, 5, 5, hold_slots=pack([0])), "too few for 9 tokens"),
    "drafts past the budget": (
        lambda: draft(
            2, 0, *[5] * 20, hold_slots=pack([0]), grow_slots=pack([0] * 5), grow_blocks=pack([6, 7, 8, 9, 10])
        ),
        "21 rows in a step of at most 20",
    ),
    "odd bytes": (lambda: StepPlan(step=2, free_slots=b"abc"), "not packed int32"),
    "negative temperature": (
        lambda: StepPlan(step=2, new_sequences=[new(2, sampling=SamplingParams(temperature=-1))]),
        "temperature",
    ),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_a_plan_against_the_protocol_is_refused(case: str, table: SlotBuffers) -> None:
    plan, message = VIOLATIONS[case]
    with pytest.raises(ProtocolViolation, match=message):
        table.apply(plan())
