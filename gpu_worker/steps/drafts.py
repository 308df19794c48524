"""Draft rows: one forward pass checks several tokens that the scheduler guesses (speculative decoding).

A draft token is accepted only if the slot samples the same token at its position. A draw depends only on the logits,
the seed and the position. So a sequence gets the tokens that decode rows would give it, whatever the drafts are. The
host has to know the tokens before it can prepare the slot's next row, so only synchronous devices compute draft rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from torch import Tensor

from gpu_worker.errors import ProtocolViolation
from gpu_worker.sampling.grammars import Grammars
from gpu_worker.sampling.logits_processors import LogitsProcessors
from gpu_worker.sampling.sampler import Sampled
from gpu_worker.steps.results import VerifiedDrafts
from gpu_worker.steps.rows import Bools, Int32s, StepRows
from gpu_worker.steps.slots import SlotBuffers


def check_drafted(rows: StepRows, slots: SlotBuffers, processors: LogitsProcessors, grammars: Grammars) -> None:
    """Raises ProtocolViolation if a slot with draft rows reports log probabilities, or if its sampling depends on its
    earlier output (grammar, penalties, bad words of several tokens): verify() knows the output only up to the first
    draft token."""
    drafted = rows.slots[rows.drafted]
    if not slots.num_top.keys().isdisjoint(drafted.tolist()) or grammars.of(drafted) or processors.read_output(drafted):
        raise ProtocolViolation(
            "draft_slots names a slot with log probabilities, a grammar, penalties or bad words of several tokens: "
            f"{drafted.tolist()}"
        )


def verify(
    rows: StepRows,
    logits: Iterable[Tensor],
    slots: SlotBuffers,
    processors: LogitsProcessors,
    draw: Callable[..., Sampled],
) -> VerifiedDrafts:
    """Sample after each draft row. Accept tokens up to and including the first that is not the next draft token.

    logits: of all draft rows in order, in pieces [rows, vocab]. draw: as sample()."""
    drafted = rows.drafted
    counts = rows.counts[drafted]
    ends = np.cumsum(counts)
    owners = np.repeat(rows.slots[drafted], counts)
    positions = 1 + np.arange(len(owners)) + np.repeat(rows.starts[drafted] - (ends - counts), counts)
    tokens, failed = np.zeros(len(owners), np.int32), np.zeros(len(owners), np.bool_)
    done = 0
    for piece in logits:
        part = slice(done, done := done + len(piece))
        parameters = slots.sampling_at(owners[part], positions[part])
        sampled = draw(piece, parameters, processors.of(owners[part]))
        tokens[part], failed[part] = sampled.tokens.numpy(), sampled.failed.numpy()
    accepted = []
    for drafts, count, end in zip(rows.drafts(), counts, ends, strict=True):
        own = slice(end - count, end)
        accepted.append(tokens[own][: num_accepted(tokens[own], failed[own], drafts)])
    return VerifiedDrafts(rows.slots[drafted], accepted)


def num_accepted(tokens: Int32s, failed: Bools, drafts: Int32s) -> int:
    """How many of a sequence's sampled tokens are those that decode rows would sample. 0: the first row failed.

    If a later row fails, the tokens before it are accepted, and the next step begins with this row.

    tokens, failed: [1 + drafts]."""
    wrong = np.flatnonzero(tokens[:-1] != drafts)
    most = int(wrong[0]) + 1 if len(wrong) else len(tokens)
    broken = np.flatnonzero(failed[:most])
    return int(broken[0]) if len(broken) else most
