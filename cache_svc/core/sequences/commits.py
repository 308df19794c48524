"""Validates a CommitOp."""

from __future__ import annotations

from collections.abc import Callable

from cache_svc.core.errors import Code, OpError
from cache_svc.core.packing import TOKEN_BYTES
from cache_svc.core.sequences.sequence import Sequence
from paceline.v1 import cache_pb2 as pb


def checked_commits(
    op: pb.CommitOp, num_token_bytes: int, block_size: int, all_admitted: Callable[[list[int]], list[Sequence]]
) -> list[tuple[Sequence, int, int]]:
    """Returns the entries, each valid after those before it (a sequence may have several entries). Raises OpError."""
    # Lists, because protobuf's repeated fields are slow to iterate.
    sequence_ids = op.sequences[:]
    num_new_tokens, num_computed_tokens = op.num_new_tokens[:], op.num_computed_tokens[:]
    if not len(sequence_ids) == len(num_new_tokens) == len(num_computed_tokens):
        raise OpError(
            Code.INVALID_ARGUMENT,
            f"{len(sequence_ids)} sequences, {len(num_new_tokens)} num_new_tokens and "
            f"{len(num_computed_tokens)} num_computed_tokens: the three lists must have one length",
        )
    if op.planned and any(num_new_tokens):
        raise OpError(Code.INVALID_ARGUMENT, "num_new_tokens: not 0, though the tokens are only planned")
    if sum(num_new_tokens) * TOKEN_BYTES != num_token_bytes:
        raise OpError(
            Code.INVALID_ARGUMENT,
            f"token_ids: {num_token_bytes} bytes, but num_new_tokens add up to {sum(num_new_tokens)} int32",
        )
    entries = list(zip(all_admitted(sequence_ids), num_new_tokens, num_computed_tokens, strict=True))
    repeated = len(set(sequence_ids)) < len(entries)
    so_far: dict[
        int, tuple[int, int]
    ] = {}  # by repeated sequence: tokens and computed tokens after the entries read so far
    for sequence, num_new, computed in entries:
        known, before = sequence.num_tokens, sequence.num_computed_tokens
        if repeated:
            known, before = so_far.get(sequence.sequence_id, (known, before))
            so_far[sequence.sequence_id] = known + num_new, computed
        if not before <= computed <= known + num_new or computed > len(sequence.table) * block_size:
            raise OpError(
                Code.INVALID_ARGUMENT,
                f"num_computed_tokens: {computed} for sequence {sequence.sequence_id}, which has {known + num_new} "
                f"tokens, blocks for {len(sequence.table) * block_size}, and {before} computed before",
            )
    return entries
