"""Operations on logits: bans, bias, penalties. All write into the logits.

Every index is int64, and every tensor is on the logits' device. No operation makes the host wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

# In the counts, the lowest bit says that a token is in the prompt. The other bits count it in the output.
IN_PROMPT = 1
ONCE_IN_OUTPUT = 2


def allow_only(logits: Tensor, rows: Tensor, owners: Tensor, tokens: Tensor) -> None:
    """In each of `rows` [n] keep only the tokens of its pairs: token tokens[i] of row rows[owners[i]]."""
    kept = logits.new_full((len(rows), logits.shape[-1]), -torch.inf)
    kept[owners, tokens] = logits[rows[owners], tokens]
    logits.index_copy_(0, rows, kept)


def allow_bits(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """In each of `rows` [n] keep only the tokens with a set bit. bits: uint8 [n, bytes]; token 0 is the lowest bit of
    the first byte. Bits beyond the vocabulary are ignored."""
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = ((bits.unsqueeze(-1) >> places) & 1).view(len(rows), -1)[:, : logits.shape[-1]] != 0
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(~allowed, -torch.inf))


def ban(logits: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Ban token tokens[i] in row rows[i]. A pair may occur several times."""
    logits.index_put_((rows, tokens), logits.new_full((), -torch.inf))


def ban_words(logits: Tensor, rows: Tensor, tails: Tensor, prefixes: Tensor, last: Tensor) -> None:
    """Ban last[i] in row rows[i] if the sequence ends with prefixes[i], like transformers' NoBadWordsLogitsProcessor.

    tails: [words, n], the last n tokens of the word's row; -1 before the beginning of the sequence.
    prefixes: [words, n], aligned to the right; -1 where a word is shorter. So a word of one token is always banned.
    """
    complete = ((prefixes < 0) | (prefixes == tails)).all(-1)
    # Added, so that an incomplete word does not undo the ban of another word.
    penalty = torch.where(complete, -torch.inf, 0.0).to(logits.dtype)
    logits.index_put_((rows, last), penalty, accumulate=True)


def add_bias(logits: Tensor, rows: Tensor, tokens: Tensor, bias: Tensor) -> None:
    """Add bias[i] to token tokens[i] of row rows[i]. Each pair occurs once."""
    logits[rows, tokens] += bias


def penalise(
    logits: Tensor,
    rows: Tensor,
    counts: Tensor,
    repetition_penalty: Tensor,
    frequency_penalty: Tensor,
    presence_penalty: Tensor,
) -> None:
    """Apply repetition like transformers' RepetitionPenaltyLogitsProcessor, over prompt and output. Then apply
    frequency and presence as OpenAI's API defines them, over the output.

    rows: [n], each once. counts: int32 [n, vocab], see IN_PROMPT. The penalties: float32 [n], neutral at 1, 0, 0.
    """
    part = logits.index_select(0, rows)
    factor = repetition_penalty.unsqueeze(-1)
    part = torch.where(counts > 0, torch.where(part < 0, part * factor, part / factor), part)
    in_output = counts >> 1
    part -= frequency_penalty.unsqueeze(-1) * in_output
    part -= presence_penalty.unsqueeze(-1) * (in_output > 0)
    logits.index_copy_(0, rows, part)
