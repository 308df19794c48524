"""The sequences that run on one worker: which of them prefill, which decode, which are paused, which draft."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.arrays import Slots
from scheduler_svc.core.drafts.drafter import Drafter
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.slots import SlotLedger
from scheduler_svc.core.workers.steps import Prefill, PrefillChunk


@dataclass(slots=True, eq=False)
class Batch:
    """A running sequence prefills, then decodes in every step until its last token is in flight. It is paused while a
    policy leaves it out. While it drafts (speculative decoding), the worker holds its slot as if it were paused, and a
    draft row takes the place of its decode row. Then at most one step in flight has such a row, because the next drafts
    depend on the tokens before them. Steps in flight count as run."""

    slots: SlotLedger
    running: dict[int, Request] = field(default_factory=dict)  # by slot, in order of admission
    prefills: dict[int, Prefill] = field(default_factory=dict)  # by slot, in order of admission
    paused: dict[int, int] = field(default_factory=dict)  # of decoding sequences: tokens by slot
    # Of drafting sequences: tokens by slot. One more token is certain while a draft row is in flight.
    drafting: dict[int, int] = field(default_factory=dict)
    held_drafting: set[int] = field(default_factory=set)  # drafting slots that the worker was told to hold
    # By slot: what proposes the drafts of a sequence that has decoded; None if its request allows none.
    drafters: dict[int, Drafter | None] = field(default_factory=dict)
    finishing: set[int] = field(default_factory=set)  # slots with their last token in flight; to be freed by a plan
    frees: list[int] = field(default_factory=list)  # slots that the worker has not been told to free yet
    decode_step: int = 0  # number of the next decode step
    num_departed: int = 0  # sequences that ever left the worker
    num_further: int = 0  # running sequences with Request.is_further_sequence
    offline: set[int] = field(default_factory=set)  # slots of the running sequences of offline requests
    num_offline_departed: int = 0  # of num_departed
    # Step timers, by decode step: the slots that sample their last token in it, with their decode epochs. That step is
    # known when a sequence starts to decode, so no step scans the running sequences.
    _last_steps: defaultdict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    # ── reads ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_decoding(self) -> int:
        """Decoding sequences, paused and drafting ones included."""
        return len(self.slots.decode_rows()) + len(self.paused) + len(self.drafting)

    def num_tokens(self, slot: int) -> int:
        """Tokens of the slot's sequence after the steps in flight."""
        if (prefill := self.prefills.get(slot)) is not None:
            return prefill.num_tokens
        apart = self.paused.get(slot) or self.drafting.get(slot)
        return apart or int(self.slots.base[slot]) + self.decode_step

    def num_computed_tokens(self, slot: int) -> int:
        """Known tokens that are computed once the steps in flight have run. The last token may still be uncomputed."""
        if (prefill := self.prefills.get(slot)) is not None:
            return prefill.num_planned
        num_known = self.running[slot].num_tokens
        return num_known if slot in self.finishing else min(num_known, self.num_tokens(slot) - 1)

    def slots_of(self, offline: bool | None) -> Slots:
        """Slots of the running sequences of one class (None: of both), in order of admission."""
        slots = np.fromiter(self.running, np.intp, len(self.running))
        return slots if offline is None else slots[self.slots.offline[slots] == offline]

    def num_decoding_of(self, offline: bool) -> int:
        """As num_decoding, of the sequences of one class."""
        num_offline = sum(slot not in self.prefills and slot not in self.finishing for slot in self.offline)
        return num_offline if offline else self.num_decoding - num_offline

    def decoding_slots(self, offline: bool) -> list[int]:
        """Slots of the decoding sequences of one class, paused and drafting ones included."""
        rows = self.slots.decode_rows().slots
        own: list[int] = rows[self.slots.offline[rows] == offline].tolist()
        return own + [slot for slot in (*self.paused, *self.drafting) if (slot in self.offline) == offline]

    def remaining_new_tokens(self, offline: bool | None = None) -> npt.NDArray[np.int64]:
        """For each running sequence of a class (None: of both): tokens that it may still generate, without those in
        flight. [running]"""
        slots = self.slots_of(offline)
        tokens = self.slots.base[slots] + self.decode_step
        some_apart = self.prefills or self.paused or self.drafting or self.finishing
        for i, slot in enumerate(slots.tolist() if some_apart else ()):
            if slot in self.finishing:
                tokens[i] = self.slots.max_total[slot]
            elif slot in self.prefills or slot in self.paused or slot in self.drafting:
                tokens[i] = self.num_tokens(slot)
        left: npt.NDArray[np.int64] = np.maximum(self.slots.max_total[slots] - tokens, 0)
        return left

    def promised_blocks(self, offline: bool | None = None) -> int:
        """Blocks that the running sequences of a class (None: of both) still take if they generate as many tokens as
        they may."""
        slots, size = self.slots_of(offline), self.slots.block_size
        total_blocks = -(-self.slots.max_total[slots] // size)
        return int(np.maximum(total_blocks - self.slots.capacity[slots] // size, 0).sum())

    @property
    def context_tokens(self) -> int:
        """Known tokens of the running sequences that do not have their last token in flight. A step that runs all of
        these attends to this many tokens."""
        rows = self.slots.decode_rows()
        tokens = rows.base_tokens + len(rows) * self.decode_step
        tokens += sum(self.paused.values()) + sum(self.drafting.values())
        return tokens + sum(prefill.num_tokens for prefill in self.prefills.values())

    @property
    def may_grow(self) -> bool:
        return len(self.growing_slots()) > 0

    def growing_slots(self) -> Slots:
        """Slots that need one more block if all sequences decode in the next step, except drafting slots that wait for
        their tokens."""
        slots = self.slots
        due = slots.block_boundaries.due(self.decode_step, slots.base, slots.capacity)
        if not (self.paused or self.drafting):
            return due
        apart = [slot for slot, num_tokens in self.paused.items() if slots.capacity[slot] < num_tokens]
        apart += [slot for slot in self.ready_drafting() if slots.capacity[slot] < self.drafting[slot]]
        return np.concatenate((due, np.array(apart, np.intp)))

    def ready_drafting(self) -> list[int]:
        """The drafting slots of which no token is in flight: a draft row may follow."""
        running = self.running
        return [
            slot
            for slot, num_tokens in self.drafting.items()
            if running[slot].num_prompt_tokens + running[slot].num_generated_tokens == num_tokens
        ]

    # ── a sequence's way through the batch ───────────────────────────────────────────────────────────────────────────

    def start(self, request: Request, session_index: int, block_table: bytes, num_cached_tokens: int) -> int:
        """The request runs from now on, in a free slot. Returns the slot. `block_table`: packed int32."""
        slot = self.slots.occupy(request, session_index, len(block_table) // 4)
        request.held.slot, request.held.block_table = slot, array("i", block_table)
        self.running[slot] = request
        self.num_further += request.is_further_sequence
        if request.metadata.offline:
            self.offline.add(slot)
        self.prefills[slot] = Prefill(slot, request.num_tokens, num_cached_tokens)
        return slot

    def chunk(self, slot: int, size: int) -> PrefillChunk:
        """The next `size` tokens of the slot's prefill, as a row of a step."""
        prefill = self.prefills[slot]
        return PrefillChunk(slot, int(self.slots.generation[slot]), prefill.num_planned + size, prefill.num_tokens)

    def advance_prefill(self, chunk: PrefillChunk) -> None:
        """The chunk is in flight. After its last chunk, the sequence decodes."""
        self.prefills[chunk.slot].num_planned = chunk.num_computed
        self.running[chunk.slot].held.num_committed = chunk.num_computed
        if not chunk.samples:
            return
        del self.prefills[chunk.slot]
        if chunk.num_tokens + 1 < self.running[chunk.slot].max_total_tokens:
            self._begin_decoding(chunk.slot, chunk.num_tokens + 1)
        else:
            self.finish_sending(chunk.slot)

    def advance_decodes(self) -> None:
        """A step with all decoding sequences, except paused and drafting ones, is in flight."""
        last = self._last_steps.pop(self.decode_step, ())
        self.decode_step += 1
        for slot, decode_epoch in last:
            if self.slots.decoding[slot] and self.slots.decode_epoch[slot] == decode_epoch:
                self.finish_sending(slot)

    def choose_decodes(self, chosen: list[int] | None) -> tuple[list[int], list[int]]:
        """Pause the decoding sequences that were not chosen, and resume the chosen ones. None chooses all. Returns the
        slots that were paused and those that were resumed."""
        wanted = None if chosen is None else set(chosen)
        resumed = [slot for slot in self.paused if wanted is None or slot in wanted]
        paused = []
        if wanted is not None:
            paused = [slot for slot in self.slots.decode_rows().slots.tolist() if slot not in wanted]
        for slot in paused:
            self.paused[slot] = self.num_tokens(slot)
            self.slots.stop_decoding(slot, self.decode_step)
        self.resume(resumed)
        return paused, resumed

    def resume(self, slots: list[int]) -> None:
        for slot in slots:
            self._begin_decoding(slot, self.paused.pop(slot))

    def begin_drafting(self, slot: int) -> None:
        """The decoding slot has no decode row in later steps. `take_holds` tells the worker."""
        self.drafting[slot] = self.num_tokens(slot)
        self.slots.stop_decoding(slot, self.decode_step)

    def end_drafting(self, slot: int) -> bool:
        """The slot, of which no token is in flight, decodes again. Returns whether the worker has to resume it."""
        self._begin_decoding(slot, self.drafting.pop(slot))
        is_held = slot in self.held_drafting
        self.held_drafting.discard(slot)
        return is_held

    def take_holds(self) -> list[int]:
        """The drafting slots that the next plan has to hold."""
        slots = [slot for slot in self.drafting if slot not in self.held_drafting]
        self.held_drafting.update(slots)
        return slots

    def advance_draft(self, slot: int) -> None:
        """A draft row of the slot is in flight."""
        self.drafting[slot] += 1

    def drafted(self, slot: int, num_sampled: int) -> None:
        """The draft row in flight has sampled this many tokens."""
        self.drafting[slot] += num_sampled - 1

    def _begin_decoding(self, slot: int, num_tokens: int) -> None:
        """The slot decodes from the next decode step on. `num_tokens` includes the token that is being sampled now."""
        slots, step = self.slots, self.decode_step
        slots.start_decoding(slot, num_tokens, step)
        last_step = int(slots.max_total[slot]) - 1 - num_tokens + step
        self._last_steps[last_step].append((slot, int(slots.decode_epoch[slot])))

    def grow(self, slots: Slots) -> None:
        """Each slot gets one block (a slot in prefill may occur several times). A decoding slot needs its block for the
        next decode step."""
        if self.slots.block_boundaries.grown(slots, self.decode_step):
            self.slots.capacity[slots] += self.slots.block_size
        else:
            np.add.at(self.slots.capacity, slots, self.slots.block_size)

    def finish_sending(self, slot: int) -> None:
        """The last token of the slot is in flight: no later plan contains the slot."""
        self.slots.stop_decoding(slot, self.decode_step)
        self.finishing.add(slot)
        self.frees.append(slot)

    def vacate(self, slot: int) -> Request:
        """The slot's sequence leaves the worker. Results in flight for it are dropped."""
        request = self.running.pop(slot)
        self.prefills.pop(slot, None)
        self.paused.pop(slot, None)
        self.drafting.pop(slot, None)
        self.drafters.pop(slot, None)
        self.held_drafting.discard(slot)
        if slot in self.finishing:
            self.finishing.remove(slot)
        else:
            self.frees.append(slot)
        self.slots.release(slot, self.decode_step)
        self.num_departed += 1
        self.num_further -= request.is_further_sequence
        if request.metadata.offline:
            self.offline.remove(slot)
            self.num_offline_departed += 1
        request.held.slot = -1
        return request
