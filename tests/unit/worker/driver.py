"""A planner small enough to be read at a glance: it drives a ModelRunner as the scheduler and the cache would."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from gpu_worker.steps.runner import ModelRunner
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import NewSequence, StepPlan, StepResult

GREEDY = SamplingParams(top_p=1.0, max_tokens=1)


def pack(values: Seq[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


@dataclass
class Sequence:
    slot: int
    tokens: list[int]
    num_prompt: int
    num_computed: int
    num_tokens_wanted: int
    blocks: list[int]
    sampling: SamplingParams
    fresh: bool = True
    held: bool = False
    shared_blocks: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def ended(self) -> bool:
        return len(self.tokens) >= self.num_tokens_wanted

    @property
    def decodes(self) -> bool:
        return self.num_computed == len(self.tokens) - 1 and not self.fresh


@dataclass
class Driver:
    """Blocks are handed out in random order, so that no test passes only because blocks are adjacent."""

    runner: ModelRunner
    chunk_tokens: int = 64
    step: int = 0
    running: dict[int, Sequence] = field(default_factory=dict)
    free_blocks: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    arrivals: list[Sequence] = field(default_factory=list)
    drafts: dict[int, list[int]] = field(default_factory=dict)  # by slot, for the next step
    resumed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free_blocks = list(range(1, self.runner.limits.num_blocks + 1))
        random.Random(1).shuffle(self.free_blocks)

    @property
    def block_size(self) -> int:
        return self.runner.limits.block_size

    def add(
        self,
        prompt: Seq[int],
        new_tokens: int,
        sampling: SamplingParams = GREEDY,
        output: Seq[int] = (),
        prefix_of: Sequence | None = None,
    ) -> Sequence:
        """`output`: tokens from before a preemption. `prefix_of`: share the whole blocks of a common prefix."""
        if sampling.grammar:
            self.prepare(sampling.grammar)
        tokens = [*prompt, *output]
        slot = next(s for s in range(self.runner.limits.max_num_seqs) if s not in self.running)
        shared = 0
        if prefix_of is not None:
            most = min(prefix_of.num_computed, len(tokens) - 1) // self.block_size
            while (
                shared < most
                and tokens[: (shared + 1) * self.block_size] == (prefix_of.tokens[: (shared + 1) * self.block_size])
            ):
                shared += 1
        blocks = [] if prefix_of is None else prefix_of.blocks[:shared]
        sequence = Sequence(
            slot, tokens, len(prompt), shared * self.block_size, len(prompt) + new_tokens, list(blocks), sampling
        )
        sequence.shared_blocks = shared
        self._extend(sequence, len(tokens))
        self.running[slot] = sequence
        self.arrivals.append(sequence)
        return sequence

    def prepare(self, grammar: str) -> str:
        """Compiles a grammar as a worker does. Returns why the grammar is refused, "" if it is accepted."""
        prepared = self.runner._grammars._prepared
        known = prepared.get(grammar)
        return "" if known else prepared.prepare(self.runner.tokenizer, 1, grammar)

    def _extend(self, sequence: Sequence, num_tokens: int) -> list[int]:
        grown = []
        while len(sequence.blocks) * self.block_size < num_tokens:
            grown.append(self.free_blocks.pop())
            sequence.blocks.append(grown[-1])
        return grown

    def draft(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """The next step has a draft row of the sequence. Later steps have none, until another call or resume()."""
        self.drafts[sequence.slot] = list(tokens)

    def resume(self, sequence: Sequence) -> None:
        """From the next step on the sequence decodes again."""
        sequence.held = False
        self.resumed.append(sequence.slot)

    def free(self, sequence: Sequence) -> None:
        del self.running[sequence.slot]
        self.freed.append(sequence.slot)
        self.free_blocks[:0] = sequence.blocks[sequence.shared_blocks :]

    def run_step(self) -> StepResult:
        self.step += 1
        drafts, self.drafts = self.drafts, {}
        drafted = [self.running[slot] for slot in drafts]
        decodes = [s for _, s in sorted(self.running.items()) if s.decodes and not s.held and s.slot not in drafts]
        grow = [
            (s.slot, block)
            for s in [*decodes, *drafted]
            for block in self._extend(s, len(s.tokens) + len(drafts.get(s.slot, ())))
        ]
        prefills = [s for s in self.running.values() if not s.decodes]
        chunks = [min(self.chunk_tokens, len(s.tokens) - s.num_computed) for s in prefills]
        plan = StepPlan(
            step=self.step,
            free_slots=pack(self.freed),
            new_sequences=[
                NewSequence(
                    slot=s.slot,
                    token_ids=pack(s.tokens),
                    num_prompt_tokens=s.num_prompt,
                    num_cached_tokens=s.num_computed,
                    block_table=pack(s.blocks),
                    sampling=s.sampling,
                    request_id=f"r{s.slot}",
                )
                for s in self.arrivals
            ],
            grow_slots=pack([slot for slot, _ in grow]),
            grow_blocks=pack([block for _, block in grow]),
            prefill_slots=pack([s.slot for s in prefills]),
            prefill_tokens=pack(chunks),
            hold_slots=pack([s.slot for s in drafted if not s.held]),
            resume_slots=pack(self.resumed),
            draft_slots=pack(list(drafts)),
            draft_counts=pack([len(tokens) for tokens in drafts.values()]),
            draft_tokens=pack([token for tokens in drafts.values() for token in tokens]),
        )
        self.freed, self.arrivals, self.resumed = [], [], []
        result = self.runner.step(plan)
        sampled = iter(np.frombuffer(result.token_ids, "<i4").tolist())
        for sequence in decodes:
            sequence.num_computed += 1
            sequence.tokens.append(next(sampled))
        for sequence, chunk in zip(prefills, chunks, strict=True):
            sequence.num_computed += chunk
            if sequence.num_computed == len(sequence.tokens):
                sequence.tokens.append(next(sampled))
                sequence.fresh = False
        assert next(sampled, None) is None, "more tokens than rows that sample"
        accepted = iter(np.frombuffer(result.draft_token_ids, "<i4").tolist())
        for sequence, count in zip(drafted, np.frombuffer(result.draft_num_tokens, "<i4").tolist(), strict=True):
            sequence.held = True
            sequence.num_computed += count
            sequence.tokens += [next(accepted) for _ in range(count)]
        assert next(accepted, None) is None, "more tokens than the draft rows report"
        return result

    def run(self) -> None:
        """Until every sequence has its tokens; those that end are freed at once."""
        while self.running:
            self.run_step()
            for sequence in [s for s in self.running.values() if s.ended]:
                self.free(sequence)
