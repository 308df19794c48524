"""Runs step plans, strictly in order. `ModelRunner.step` is the worker's table of contents."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionBackend, AttentionMetadata
from gpu_worker.kv.pool import KvPool
from gpu_worker.models.decoder import Decoder
from gpu_worker.sampling.controls import Controls
from gpu_worker.sampling.prompt_scores import PromptRows, score_chunks
from gpu_worker.sampling.sampler import Scores, sample
from gpu_worker.slots import SlotLimits, SlotTable, StepRows
from paceline.v1.worker_pb2 import RowError, StepPlan, StepResult, TokenLogprobs

NO_NUMBER = "the model gave no number (NaN or infinity in the logits)"
INVALID_ARGUMENT = 3  # google.rpc.Code
NO_TOKEN = "no token is left to sample: allowed_token_ids, bad_words, logit_bias and min_tokens together rule out all"


@dataclass(frozen=True, slots=True)
class StepInput:
    tokens: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    sampling_rows: Tensor | None  # int64: whose logits are wanted; None: all rows
    attention: AttentionMetadata


@dataclass(frozen=True, slots=True)
class StepStats:
    """What a step did, for metrics."""

    decode_tokens: int = 0
    prefill_tokens: int = 0
    sequences: int = 0
    # Entries of all block tables; a block that two sequences share counts twice.
    table_blocks: int = 0


class ModelRunner:
    def __init__(
        self, decoder: Decoder, attention: AttentionBackend, pool: KvPool, limits: SlotLimits, device: torch.device
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._pool = pool
        self._slots = SlotTable(limits)
        self._controls = Controls(limits.vocab_size, device)
        self._device = device
        # By slot: the token sampled last. It feeds the slot's next step from here, whatever the link does meanwhile.
        self._last_tokens = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        self.last_stats = StepStats()

    @property
    def limits(self) -> SlotLimits:
        return self._slots.limits

    def reset(self) -> None:
        """The link is gone: forget every sequence. The pool stays, its contents mean nothing any more."""
        self._slots.reset()
        self._controls.reset()

    def request_ids(self) -> list[str]:
        """Of the sequences that hold a slot."""
        return list(self._slots.request_ids.values())

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """ProtocolViolation if the plan breaks the contract; after that, or any other exception, reset()."""
        started_us = _now_us()
        rows = self._slots.apply(plan)
        self._controls.apply(plan)
        if len(rows.swaps_out[0]):
            self._pool.swap_out(*rows.swaps_out)
        if len(rows.swaps_in[0]):
            self._pool.swap_in(*rows.swaps_in)
        if len(rows.copies[0]):
            self._pool.copy(*rows.copies)
        if len(rows.granted_blocks):
            self._pool.clear(rows.granted_blocks)
        result = self._forward(rows) if rows.num_rows else StepResult()
        self._slots.commit(rows)
        self.last_stats = StepStats(
            decode_tokens=rows.num_decodes,
            prefill_tokens=rows.num_rows - rows.num_decodes,
            sequences=len(rows.slots),
            table_blocks=self._slots.table_blocks,
        )
        result.step, result.started_us, result.finished_us = plan.step, started_us, _now_us()
        return result

    def _forward(self, rows: StepRows) -> StepResult:
        """The sampled tokens, the rows that failed, the log probabilities that were asked for."""
        prompts = self._slots.prompt_rows(rows)
        step = self._stage(rows, prompts)
        self._attention.plan(step.attention)
        logits = self._decoder.forward(step.tokens, step.positions, step.sampling_rows)
        num_samples = int(rows.samples.sum())
        result = self._sample(rows, logits[:num_samples]) if num_samples else StepResult()
        if prompts is not None:
            for scores, are_numbers in score_chunks(logits[num_samples:], prompts.chunks):
                result.prompt_logprobs.append(scores)
                if not are_numbers and scores.slot not in {error.slot for error in result.errors}:
                    result.errors.add(slot=scores.slot, message=NO_NUMBER)
        return result

    def _sample(self, rows: StepRows, logits: Tensor) -> StepResult:
        """logits: [rows that sample, vocab]."""
        parameters = self._slots.sampling_rows(rows)
        slots = rows.slots[rows.samples]
        controls = self._controls.of(slots)
        result = sample(logits, parameters, controls)
        if controls is not None:
            controls.record(result.tokens)
        self._last_tokens.index_copy_(0, self._to_device(slots), result.tokens)
        tokens, failed = result.tokens.cpu().numpy().astype("<i4"), result.failed.cpu().numpy()
        tokens[failed] = -1
        return StepResult(
            token_ids=tokens.tobytes(),
            errors=_row_errors(slots, failed, result.ruled_out) if failed.any() else (),
            logprobs=_token_logprobs(result.scores, slots[parameters.scored], parameters.num_top),
        )

    def _stage(self, rows: StepRows, prompts: PromptRows | None) -> StepInput:
        """What the forward pass reads, from the slots' state. All of it vectorised: no Python per decoding row.

        Its logits are those of the rows that sample, then those of `prompts`."""
        table, block_size = self._slots, self._slots.limits.block_size
        tokens = self._last_tokens.index_select(0, self._to_device(rows.slots[: rows.num_decodes]))
        if len(rows.slots) > rows.num_decodes:
            tokens = torch.cat((tokens, self._to_device(table.prefill_tokens(rows))))
        qo_indptr = _indptr(rows.counts)
        owners = np.repeat(np.arange(len(rows.slots)), rows.counts)
        positions = rows.starts[owners] + np.arange(len(owners)) - qo_indptr[owners]
        block_ids = table.block_table[rows.slots[owners], positions // block_size]
        kv_lens = rows.starts + rows.counts
        widths = -(-kv_lens // block_size)
        longest = np.arange(widths.max())
        indices = table.block_table[rows.slots, : len(longest)][longest < widths[:, None]]
        wanted = qo_indptr[1:][rows.samples] - 1
        if prompts is not None:
            wanted = np.concatenate((wanted, prompts.rows))
        all_sample = rows.num_rows == len(rows.slots) and bool(rows.samples.all())
        return StepInput(
            tokens,
            self._to_device(positions),
            None if all_sample else self._to_device(wanted),
            AttentionMetadata(
                num_decodes=rows.num_decodes,
                qo_indptr=qo_indptr,
                kv_indptr=_indptr(widths),
                kv_indices=indices,
                last_block_len=kv_lens - (widths - 1) * block_size,
                slot_mapping=self._to_device(block_ids.astype(np.int64) * block_size + positions % block_size),
            ),
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self._device)


def _row_errors(slots: np.ndarray, failed: np.ndarray, ruled_out: Tensor | None) -> Iterator[RowError]:
    no_token = np.zeros_like(failed) if ruled_out is None else ruled_out.cpu().numpy()
    for row in np.flatnonzero(failed).tolist():
        if no_token[row]:
            yield RowError(slot=slots[row], message=NO_TOKEN, code=INVALID_ARGUMENT)
        else:
            yield RowError(slot=slots[row], message=NO_NUMBER)


def _token_logprobs(scores: Scores | None, slots: np.ndarray, num_top: np.ndarray) -> Iterator[TokenLogprobs]:
    if scores is None:
        return
    sampled, ids, values = scores.sampled.tolist(), scores.top_tokens.cpu().numpy(), scores.top.cpu().numpy()
    for i, (slot, count) in enumerate(zip(slots.tolist(), num_top.tolist(), strict=True)):
        yield TokenLogprobs(
            slot=slot,
            logprob=sampled[i],
            top_token_ids=ids[i, :count].astype("<i4").tobytes(),
            top_logprobs=values[i, :count].astype("<f4").tobytes(),
        )


def _indptr(counts: np.ndarray) -> np.ndarray:
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr


def _now_us() -> int:
    return time.monotonic_ns() // 1000
