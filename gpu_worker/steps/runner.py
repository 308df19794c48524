"""Runs step plans, strictly in order. Start reading at `ModelRunner.launch`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from llguidance import LLTokenizer
from torch import Tensor

from gpu_worker.attention.base import AdvancingAttention, AttentionBackend, SplitAttention
from gpu_worker.device import DeviceEvent
from gpu_worker.errors import ProtocolViolation
from gpu_worker.kv.pool import KvPool
from gpu_worker.models.decoder import Decoder
from gpu_worker.sampling.compiled import PreparedGrammars
from gpu_worker.sampling.fused import NUM_PARAMETERS, sample_rows
from gpu_worker.sampling.grammars import GrammarMask, Grammars
from gpu_worker.sampling.logits_processors import LogitsProcessors
from gpu_worker.sampling.prompt_scores import rows_at_once, score_prompts
from gpu_worker.sampling.sampler import Largest, Sampled, SamplingRows, sample
from gpu_worker.steps.drafts import check_drafted, verify
from gpu_worker.steps.graphs import Capture, CaptureProgress, DecodeGraphs, GraphOutput
from gpu_worker.steps.history import SampledSlots
from gpu_worker.steps.inputs import StepInput, StepInputs
from gpu_worker.steps.launched import LaunchedStep, StepClock, StepStats, UnrecordedStep, now_us
from gpu_worker.steps.pieces import PieceGraphs
from gpu_worker.steps.pooling import Pooled, Pooler
from gpu_worker.steps.repeated import RepeatedStep
from gpu_worker.steps.results import Drawn, StepOutputs, VerifiedDrafts, fetch_drawn
from gpu_worker.steps.rows import StepRows
from gpu_worker.steps.slots import SlotBuffers, SlotLimits
from gpu_worker.steps.step_arrays import StepArrays, dummy_decodes, largest_step, step_arrays
from paceline.v1.worker_pb2 import KeptSequence, StepPlan, StepResult


def takes_all_cores(_num_rows: int) -> bool:
    """What a runner assumes of each step."""
    return False


class ModelRunner:
    """Executes the step plans of one link, then of the next, on one device: `launch` queues a step, `reset` forgets all
    sequences. After an exception in a step, only `reset` makes the runner usable again.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        pool: KvPool,
        limits: SlotLimits,
        inputs: StepInputs,
        device: torch.device,
        tokenizer: LLTokenizer | None = None,
        pooler: Pooler | None = None,
        fused_sampling: bool = False,
        largest: Largest | None = None,
        *,
        leaves_core: Callable[[int], bool] = takes_all_cores,
    ) -> None:
        """Without a `tokenizer`, requests with a grammar fail. With a `pooler`, a step returns the vectors of sequences
        and samples no token. `fused_sampling`, `largest`: see sample(). `leaves_core`: whether a step of so many
        rows leaves a core to other threads."""
        self.leaves_core = leaves_core
        self._decoder = decoder
        self._attention = attention
        self._advancing: AdvancingAttention | None = None
        if isinstance(attention, AdvancingAttention) and device.type == "cpu":  # a GPU may still read the arrays
            self._advancing = attention
        self._pool = pool
        self._slots = SlotBuffers(limits)
        self._logits_processors = LogitsProcessors(limits.vocab_size, limits.max_num_seqs, device)
        self._grammars = Grammars(tokenizer, limits.vocab_size, device)
        self._pooler = pooler
        self._fused_sampling = fused_sampling
        self._largest = largest
        self._draw = partial(sample, fused=fused_sampling, largest=largest)
        self._inputs = inputs
        self._device = device
        self._graphs: DecodeGraphs | None = None
        self._pieces: PieceGraphs | None = None
        # By slot: the last sampled token, the input of the slot's next step. Behind them a spare slot, for padding.
        self._last_tokens = torch.zeros(limits.max_num_seqs + 1, dtype=torch.int64, device=device)
        self._clock = StepClock()
        self._rows: StepRows | None = None  # of the last launched step
        # A limit for the memory of logits.
        self._rows_at_once = max(limits.max_num_seqs, rows_at_once(limits.vocab_size))
        self._repeated: RepeatedStep | None = None
        self._is_whole = True  # whether every plan so far was executed completely
        self._unrecorded: deque[UnrecordedStep] = deque()  # steps that are not in the history yet

    @property
    def limits(self) -> SlotLimits:
        return self._slots.limits

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def graphs(self) -> DecodeGraphs | None:
        return self._graphs

    @property
    def tokenizer(self) -> LLTokenizer | None:
        """The tokenizer for compiling grammars."""
        return self._grammars.tokenizer

    @property
    def pools(self) -> bool:
        """Whether the model is an embedding model: its steps return vectors and sample no token."""
        return self._pooler is not None

    @property
    def is_asynchronous(self) -> bool:
        """Whether launch() returns before the step is done."""
        return self._device.type == "cuda"

    def call_before_kernels(self, call: Callable[[], None]) -> None:
        """In each later step with rows, call this in launch(): if the step leaves a core, when its kernels start or
        before it copies blocks, and otherwise when the plan has been applied."""
        self._decoder.before_kernels = call

    @property
    def verifies_drafts(self) -> bool:
        """Whether plans may have draft rows."""
        return not (self.is_asynchronous or self.pools)

    def reset(self, grammars: PreparedGrammars | None = None) -> None:
        """A new link begins: forget every sequence. The pool keeps its contents: sequences of the new link may begin
        with KV that kept() has reported.

        `grammars`: the grammars that the next link's sequences may use."""
        self._repeated = None
        self._slots.reset()
        self._logits_processors.reset()
        self._grammars.reset(grammars or PreparedGrammars())
        self._unrecorded.clear()
        self._is_whole = True

    def kept(self, max_bytes: int) -> list[KeptSequence]:
        """The sequences of an ended link with their tokens and block tables, up to `max_bytes`. Empty after a failed
        step. Waits for the launched steps."""
        if not self._is_whole:
            return []
        self._note_all()
        return self._slots.kept(max_bytes)

    def _note(self) -> None:
        """Note the oldest step that is not in the history. The step must be done."""
        step = self._unrecorded.popleft()
        self._slots.history.note(step.sampled, step.drawn.token_ids)

    def _note_all(self) -> None:
        """Wait for the launched steps, and note them all."""
        while self._unrecorded:
            self._unrecorded[0].done.wait()
            self._note()

    def request_ids(self) -> list[str]:
        """The requests of the last launched step. If its plan could not be applied: of all occupied slots."""
        by_slot = self._slots.request_ids
        return [by_slot.get(slot, "") for slot in (by_slot if self._rows is None else self._rows.slots.tolist())]

    @torch.inference_mode()
    def check(self) -> None:
        """Forget every sequence, and run a dummy step. If the device is broken, this raises the device's error."""
        self.reset()
        if self.is_asynchronous:
            torch.cuda.empty_cache()  # memory of a step that ran out of memory
        self._last_tokens.zero_()
        self._compute(self._prepare(dummy_decodes(1, self._spare_slot), captured=False))
        if self.is_asynchronous:
            torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def capture_graphs(self, sizes: list[int], capture: Capture, progress: CaptureProgress | None = None) -> None:
        """Capture graphs of these sizes (rows). A later step of decodes alone uses the smallest graph with enough rows.
        Call this before the first step."""
        graphs = DecodeGraphs(sizes)
        logits = torch.zeros(sizes[-1], self.limits.vocab_size, dtype=self._pool.storage.dtype, device=self._device)

        def prepare(size: int, out: Tensor) -> Callable[[], GraphOutput]:
            step = self._prepare(self._padded(dummy_decodes(0, self._spare_slot), size, None), captured=True)
            return lambda: self._run_in_graph(step, out)

        graphs.capture(prepare, logits, capture, progress)
        self._graphs = graphs

    @torch.inference_mode()
    def capture_pieces(self, sizes: list[int], capture: Capture, progress: CaptureProgress | None = None) -> None:
        """Capture the pieces of steps with these numbers of rows (pieces.py). A later step that no decode graph fits
        uses the smallest size with enough rows. Call this before the first step."""
        assert isinstance(self._attention, SplitAttention)
        pieces = PieceGraphs(sizes, self._decoder, self._attention, self._pool.storage.dtype, self._device)
        empty = dummy_decodes(0, self._spare_slot)
        pieces.capture(lambda size: self._prepare(empty.with_padding_rows(size), False), capture, progress)
        self._pieces = pieces

    @torch.inference_mode()
    def try_largest_step(self) -> None:
        """Run the largest step, to measure its memory. It writes to the dummy block."""
        self._compute(self._prepare(largest_step(self.limits), captured=False))

    def step(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step while the previous one is queued or runs. With FlashInfer, this waits until the previous one can
        begin. A row with a grammar waits for more: after its forward pass is queued, for the end of the previous step.

        Raises ProtocolViolation if the plan breaks the contract. After any exception, call reset()."""
        started_us = now_us()
        while self._unrecorded and self._unrecorded[0].done.is_passed():
            self._note()
        repeated, self._repeated = self._repeated, None
        self._is_whole, self._rows = False, None
        if repeated is not None and repeated.takes(plan):
            outputs = self._repeat(plan, repeated)
            self._repeated = repeated
            return self._launched(plan, started_us, repeated.rows, repeated.sampled, outputs)
        if plan.draft_slots and not self.verifies_drafts:
            raise ProtocolViolation("a plan has draft rows, and this worker computes none")
        rows = self._rows = self._slots.apply(plan)
        if not self.leaves_core(rows.num_rows):
            self._decoder.before_kernels()
        self._logits_processors.apply(plan)
        self._grammars.apply(plan)
        if rows.num_drafted:
            check_drafted(rows, self._slots, self._logits_processors, self._grammars)
        if rows.moves_blocks:
            self._move_blocks(rows)
        if len(rows.granted_blocks) and self._attention.reads_whole_blocks:
            self._pool.clear(rows.granted_blocks)
        sampled = self._slots.sampling(rows)
        outputs = self._forward(rows, sampled) if rows.num_rows else StepOutputs()
        self._slots.commit(rows)
        if outputs.drafts is not None:
            self._advance(outputs.drafts)
        return self._launched(plan, started_us, rows, sampled, outputs)

    def _launched(
        self, plan: StepPlan, started_us: int, rows: StepRows, sampled: SampledSlots, outputs: StepOutputs
    ) -> LaunchedStep:
        stats = StepStats(
            decode_tokens=rows.num_decodes,
            prefill_tokens=rows.num_rows - rows.num_decodes - rows.num_draft_rows,
            draft_tokens=rows.num_draft_rows,
            sequences=len(rows.slots),
            table_blocks=self._slots.table_blocks,
        )
        done = DeviceEvent(self._device, blocking=True)
        done.record()
        if outputs.drawn is not None:
            self._unrecorded.append(UnrecordedStep(sampled, outputs.drawn, done))
        self._is_whole = True
        return LaunchedStep(plan.step, stats, started_us, outputs, done, self._clock)

    def _repeat(self, plan: StepPlan, repeated: RepeatedStep) -> StepOutputs:
        """Run the last step again, one token further. Its tokens must be in the history."""
        assert self._advancing is not None
        rows = repeated.rows
        self._slots.repeat(plan, rows)
        self._rows = rows
        if not self.leaves_core(rows.num_rows):
            self._decoder.before_kernels()
        repeated.advance()
        self._advancing.advance(self._slots.block_table, rows.slots)
        return StepOutputs(self._decode(rows, repeated.step, repeated.parameters, repeated.only_largest))

    def _move_blocks(self, rows: StepRows) -> None:
        self._decoder.before_kernels()  # copies may take long
        if len(rows.swaps_out[0]):
            self._pool.swap_out(*rows.swaps_out)
        if len(rows.swaps_in[0]):
            self._pool.swap_in(*rows.swaps_in)
        if len(rows.copies[0]):
            self._pool.copy(*rows.copies)

    def _forward(self, rows: StepRows, sampled: SampledSlots) -> StepOutputs:
        if self._pooler is not None:
            return StepOutputs(pooled=self._pool_rows(rows, self._pooler))
        prompts = self._slots.prompt_rows(rows)
        arrays = step_arrays(rows, self._slots, None if prompts is None else prompts.rows)
        graph = self._graphs.size_for(arrays) if self._graphs else None
        if self._graphs and graph is not None:
            return StepOutputs(self._replay(rows, arrays, self._graphs, graph))
        size = self._pieces.size_for(arrays.num_rows) if self._pieces else None
        step = self._prepare(arrays if size is None else arrays.with_padding_rows(size), captured=False)
        parameters = self._slots.sampling_rows(rows)
        only_largest = parameters.need_only_largest and self._is_plain(rows.sampled_slots)
        if self._pieces is None and arrays.sampling_rows is None and len(arrays.sampled_slots) == arrays.num_rows:
            if self._can_repeat(rows):
                self._repeated = RepeatedStep(rows, sampled, step, parameters, only_largest)
            return StepOutputs(self._decode(rows, step, parameters, only_largest))
        hidden = self._hidden(step, size)
        num_samples = len(arrays.sampled_slots)
        num_logits = num_samples + rows.num_draft_rows
        drawn = drafts = likeliest = None
        if only_largest and not rows.num_draft_rows:
            likeliest = self._decoder.likeliest_of(hidden[:num_samples])
        if likeliest is not None:
            drawn = self._drawn(rows, step, parameters, *likeliest)
        elif num_logits:
            # One product with the head for all rows, unless there are very many draft tokens.
            first, *more = torch.split(hidden[:num_logits], self._rows_at_once)
            logits = self._decoder.logits(first)
            drawn = self._sample(rows, step, logits[:num_samples], parameters, only_largest) if num_samples else None
            if rows.num_drafted:
                drafts = self._verify(rows, chain([logits[num_samples:]], map(self._decoder.logits, more)))
        scores = None
        if prompts is not None:
            scores = score_prompts(hidden[num_logits:], self._decoder.logits, self.limits.vocab_size, prompts.chunks)
        return StepOutputs(drawn, scores, drafts=drafts)

    def _can_repeat(self, rows: StepRows) -> bool:
        """Whether the next step may be a RepeatedStep: nothing but the sampling parameters may change the logits."""
        only_decodes = rows.num_decodes == len(rows.slots)
        is_possible = self._advancing is not None and only_decodes and not self._slots.banned
        return is_possible and self._is_plain(rows.slots)

    def _decode(self, rows: StepRows, step: StepInput, parameters: SamplingRows, only_largest: bool) -> Drawn:
        """A step in which each row samples."""
        tokens = self._tokens(step)
        if only_largest and (likeliest := self._decoder.likeliest(tokens, step.positions)) is not None:
            return self._drawn(rows, step, parameters, *likeliest)
        logits = self._decoder.all_logits(tokens, step.positions)
        return self._sample(rows, step, logits, parameters, only_largest)

    def _replay(self, rows: StepRows, arrays: StepArrays, graphs: DecodeGraphs, size: int) -> Drawn:
        """Run decodes in a graph. It also samples the tokens if nothing but fused.py's kernel is needed for that."""
        slots = rows.sampled_slots
        parameters = self._slots.sampling_rows(rows)
        draws = parameters.draws() if self._fused_sampling and self._is_plain(slots) else None
        step = self._prepare(self._padded(arrays, size, draws), captured=True)
        output = graphs.replay(size)
        if draws is None or output.drawn is None:
            return self._sample(rows, step, output.logits[: arrays.num_rows], parameters)
        tokens, failed = output.drawn
        sampled = Sampled(tokens[: arrays.num_rows], failed[: arrays.num_rows], None, None)
        return fetch_drawn(sampled, slots, parameters, {})

    def _padded(self, arrays: StepArrays, size: int, draws: np.ndarray | None) -> StepArrays:
        """The step of a graph. Without `draws`, a graph that samples draws the likeliest tokens, and these are not
        used."""
        if self._fused_sampling:
            nothing = np.zeros((arrays.num_rows, NUM_PARAMETERS), np.int32)
            arrays = replace(arrays, draws=nothing if draws is None else draws)
        return arrays.padded(size, self._spare_slot)

    def _run_in_graph(self, step: StepInput, out: Tensor) -> GraphOutput:
        logits = self._compute(step, out)
        if step.draws is None:
            return GraphOutput(logits, None)
        tokens, failed = sample_rows(logits, step.draws)
        self._last_tokens.index_copy_(0, step.decode_slots, tokens)
        return GraphOutput(logits, (tokens, failed))

    @property
    def _spare_slot(self) -> int:
        return self.limits.max_num_seqs

    def _pool_rows(self, rows: StepRows, pooler: Pooler) -> Pooled | None:
        step = self._prepare(step_arrays(rows, self._slots), captured=False)
        wanted = None if pooler.needs_all_rows else step.sampling_rows
        hidden = self._decoder.forward(self._tokens(step), step.positions, wanted)
        return pooler.pool(rows, self._slots.num_tokens, self._decoder.final(hidden)) if len(hidden) else None

    def _is_plain(self, slots: np.ndarray) -> bool:
        """Whether nothing changes the logits of these slots but their sampling parameters."""
        return self._logits_processors.of(slots) is None and not self._grammars.of(slots)

    def _sample(
        self, rows: StepRows, step: StepInput, logits: Tensor, parameters: SamplingRows, only_largest: bool = False
    ) -> Drawn:
        """logits: [rows that sample, vocab]. only_largest: the token is the one with the largest logit."""
        slots = rows.sampled_slots
        if only_largest and self._largest is not None:
            return self._drawn(rows, step, parameters, *self._largest(logits))
        processors, mask = self._logits_processors.of(slots), self._grammar_mask(slots)
        sampled = self._draw(logits, parameters, processors, mask)
        if processors is not None:
            processors.record(sampled.tokens)
        self._last_tokens.index_copy_(0, step.sampled_slots, sampled.tokens)
        return fetch_drawn(sampled, slots, parameters, {} if mask is None else mask.refused)

    def _drawn(
        self, rows: StepRows, step: StepInput, parameters: SamplingRows, tokens: Tensor, failed: Tensor
    ) -> Drawn:
        """tokens, failed: as of largest_logits()."""
        self._last_tokens.index_copy_(0, step.sampled_slots, tokens)
        return fetch_drawn(Sampled(tokens, failed, None, None), rows.sampled_slots, parameters, {})

    def _verify(self, rows: StepRows, logits: Iterator[Tensor]) -> VerifiedDrafts:
        """logits: of the draft rows, in pieces [rows, vocab]."""
        return verify(rows, logits, self._slots, self._logits_processors, self._draw)

    def _advance(self, drafts: VerifiedDrafts) -> None:
        """The sequences continue after the tokens of their draft rows."""
        for slot, tokens in zip(drafts.slots.tolist(), drafts.tokens, strict=True):
            self._slots.advance(slot, tokens)
            if len(tokens):
                self._last_tokens[slot] = int(tokens[-1])

    def _grammar_mask(self, slots: np.ndarray) -> GrammarMask | None:
        asking = self._grammars.of(slots)
        if not asking:
            return None
        self._note_all()
        return self._grammars.mask(asking, self._slots.history.of)

    def _prepare(self, arrays: StepArrays, captured: bool) -> StepInput:
        step = self._inputs.send(arrays, captured)
        self._attention.plan(step.attention)
        self._inputs.sent()
        return step

    def _compute(self, step: StepInput, out: Tensor | None = None) -> Tensor:
        """Logits of the rows that need logits; of an embedding model: hidden states of all rows."""
        if self._pooler is not None:
            return self._decoder.final(self._decoder.forward(self._tokens(step), step.positions)).float()
        return self._decoder.logits(self._hidden(step), out)

    def _hidden(self, step: StepInput, size: int | None = None) -> Tensor:
        """Hidden states of the rows that need logits. size: the step is padded to it, for captured pieces."""
        if self._pieces is None or size is None:
            return self._decoder.forward(self._tokens(step), step.positions, step.sampling_rows)
        return self._pieces.forward(size, self._tokens(step), step.attention.num_rows, step.sampling_rows)

    def _tokens(self, step: StepInput) -> Tensor:
        tokens = self._last_tokens.index_select(0, step.decode_slots)
        return tokens if step.prefill_tokens is None else torch.cat((tokens, step.prefill_tokens))
