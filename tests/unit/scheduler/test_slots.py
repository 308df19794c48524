"""Sampled tokens in the slots' output buffer: a ring of the latest steps, flushed to the requests in time."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.requests.output_buffer import BUFFER_STEPS, FLUSH_EVERY_STEPS
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.slots import SlotLedger
from scheduler_svc.settings import SchedulerSettings

PROMPT = np.array([5], np.int32).tobytes()
NUM_SLOTS = 3


def make_request(handle: int) -> Request:
    return Request(handle, "s", handle, f"r{handle}", PROMPT, bytearray(), SamplingParams(max_tokens=9999), 0.0)


def output(table: SlotLedger, slot: int) -> list[int]:
    request = table.requests[slot]
    assert request is not None
    request.add_output(table.output.flush(slot))
    return np.frombuffer(bytes(request.output), np.int32).tolist()


@pytest.mark.parametrize(
    "steps", [1, FLUSH_EVERY_STEPS + 1, BUFFER_STEPS - 1, BUFFER_STEPS, BUFFER_STEPS + 1, 3 * BUFFER_STEPS + 7]
)
def test_a_long_decode_loses_no_token(steps: int) -> None:
    """No reader asks before the end, so only the regular flush saves a token before the ring overwrites it."""
    table = SlotLedger(NUM_SLOTS, block_size=4)
    slots = np.array([table.occupy(make_request(handle), 1, 1) for handle in range(NUM_SLOTS)], np.intp)
    for slot in slots.tolist():
        table.start_decoding(slot, 2, 0)
    for step in range(steps):
        table.write_tokens(step, slots, (1000 * slots + step).astype(np.int32))
    for slot in slots.tolist():
        assert output(table, slot) == [1000 * slot + step for step in range(steps)]


def test_the_ring_holds_all_tokens_in_flight() -> None:
    """Between two flushes of a slot there are at most FLUSH_EVERY_STEPS steps, plus the steps in flight when the slot
    is freed."""
    window = SchedulerSettings.model_fields["window"]
    largest = next(limit.le for limit in window.metadata if hasattr(limit, "le"))
    assert FLUSH_EVERY_STEPS + largest <= BUFFER_STEPS


@given(
    events=st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(1, 120)), min_size=1, max_size=14),
    phase=st.integers(0, BUFFER_STEPS),
)
@settings(max_examples=60, deadline=None)
def test_a_sequence_that_pauses_and_goes_on_has_every_token_once(events: list[tuple[int, int]], phase: int) -> None:
    """Each event pauses or resumes one slot, and then some steps run."""
    table = SlotLedger(NUM_SLOTS, block_size=4)
    expected: dict[int, list[int]] = defaultdict(list)
    for handle in range(NUM_SLOTS):
        table.occupy(make_request(handle), 1, 1)
    step = phase
    for slot, num_steps in events:
        if table.decoding[slot]:
            table.stop_decoding(slot, step)
        else:
            table.start_decoding(slot, 2 + len(expected[slot]), step)
        for _ in range(num_steps):
            slots = np.flatnonzero(table.decoding)
            table.write_tokens(step, slots, (1000 * slots + step).astype(np.int32))
            for one in slots.tolist():
                expected[one].append(1000 * one + step)
            step += 1
    for slot in range(NUM_SLOTS):
        assert output(table, slot) == expected[slot]


def test_each_release_of_a_slot_counts_once() -> None:
    table = SlotLedger(NUM_SLOTS, block_size=4)
    for number in range(1, 4):
        slot = table.occupy(make_request(number), 1, 1)
        table.release(slot, 0)
        assert (table.generation[slot], table.num_releases) == (number, number)
