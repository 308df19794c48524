"""How much of its prompt a sequence found in the prefix cache at its first admission, and why not more."""

from __future__ import annotations

from typing import NamedTuple

from paceline.v1.cache_pb2 import AdmitResult


class Missed(NamedTuple):
    """Prompt tokens that were not reused. `reason`: see MissedTokens in protos/paceline/v1/admin.proto."""

    reason: str
    num_tokens: int
    detail: str


class PrefixUse(NamedTuple):
    """`other_worker`: a worker that has tokens which this one does not have."""

    num_tokens: int
    num_cached_tokens: int  # as the client is told
    block_size: int
    needs_whole_prompt: bool = False
    num_other_worker_tokens: int = 0
    other_worker: int = 0
    num_in_flight_tokens: int = 0
    num_evicted_tokens: int = 0

    @classmethod
    def of(
        cls, granted: AdmitResult, num_tokens: int, num_cached_tokens: int, block_size: int, *, needs_whole_prompt: bool
    ) -> PrefixUse:
        """Of an admission that the cache has granted."""
        counts = [granted.num_other_worker_tokens, granted.num_in_flight_tokens, granted.num_evicted_tokens]
        # What the client is told may be rounded down to blocks, but the counts begin where the cache's own number ends.
        # The first count above 0 gets the difference. Otherwise the sum would tell the client how far the prompt agrees
        # with a block of another tenant.
        for index, count in enumerate(counts):
            if count:
                counts[index] += granted.num_cached_tokens - num_cached_tokens
                break
        other_worker, in_flight, evicted = counts
        return cls(
            num_tokens,
            num_cached_tokens,
            block_size,
            needs_whole_prompt,
            other_worker,
            granted.other_worker,
            in_flight,
            evicted,
        )

    def missed(self) -> list[Missed]:
        """The tokens that were not reused, in the order of the prompt. Together with the cached
        tokens, these are all tokens of the prompt."""
        left = self.num_tokens - self.num_cached_tokens
        if self.needs_whole_prompt:
            return (
                [Missed("whole_prompt", left, "the request asks for prompt log probabilities or mean pooling")]
                if left
                else []
            )
        # A match has whole blocks, and never the last token. With partial reuse it may go beyond the last boundary.
        boundary = (self.num_tokens - 1) // self.block_size * self.block_size
        partial = min(left, self.num_tokens - boundary)
        left -= partial
        found: list[Missed] = []
        for reason, num_tokens, detail in (
            ("other_worker", self.num_other_worker_tokens, f"worker {self.other_worker} has them"),
            ("in_flight", self.num_in_flight_tokens, "another sequence was computing them"),
            ("evicted", self.num_evicted_tokens, "they were cached, and evicted for other sequences"),
            ("new", left, "not computed before, or too long ago"),
        ):
            num_tokens = min(num_tokens, left)
            if num_tokens:
                found.append(Missed(reason, num_tokens, detail))
                left -= num_tokens
        if partial:
            detail = f"blocks have {self.block_size} tokens, and the last token of a prompt is always computed"
            found.append(Missed("block_border", partial, detail))
        return found
