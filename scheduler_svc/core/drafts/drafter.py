"""Proposes draft tokens for one sequence, and notes whether they are right."""

from __future__ import annotations

from paceline.request_fields import PENALTY_NAMES
from scheduler_svc.core.drafts.ngram import NgramIndex
from scheduler_svc.core.requests.request import TOKEN_BYTES, Request

# A request with any of these decodes as usual: a draft row reports no log probabilities, and samples each position
# without knowing the tokens that the same row samples before it.
UNDRAFTED_PARAMS = (*PENALTY_NAMES, "bad_words", "min_tokens", "grammar", "logprobs")
# A sequence begins to speculate when the lookup would have proposed this many of its latest tokens in a row. A drafting
# sequence skips steps until its sampled tokens arrive. So a sequence drafts only after its text has repeated itself.
PROBE_TOKENS = 3
# With two steps in flight (the default with drafts), a sequence that speculates has a row only in every second step,
# because it waits for its tokens. So a draft row pays if it brings two tokens: one accepted draft, and the token after
# it. A sequence stops drafting when its rows are this many tokens behind two tokens per row: after two rows without an
# accepted draft, or later if less than one draft is accepted on average.
MAX_LOST_TOKENS = 2
# Tokens that one call indexes, at most: about 0.5 ms. A long prompt is indexed while its first tokens are sampled.
MAX_INDEXED_TOKENS = 1024


def may_draft(request: Request) -> bool:
    """Whether the request's fields allow draft rows."""
    if request.metadata.disable_speculation:
        return False
    return not any(getattr(request.sampling, name) for name in UNDRAFTED_PARAMS)


class Drafter:
    """The draft tokens of one sequence. While it decodes, its tokens are compared with what the lookup proposes."""

    __slots__ = ("_expected", "_index", "_num_lost", "_num_right", "was_used")

    def __init__(self, longest: int, shortest: int) -> None:
        """The lengths of the n-grams, as in NgramIndex."""
        self._index = NgramIndex(longest, shortest)
        self._expected = -1  # the token that the lookup proposes next; -1: none
        self._num_right = 0  # latest tokens, seen one by one, that were the expected ones
        self._num_lost = 0  # tokens by which the draft rows fell behind decode rows; what they won before is forgotten
        self.was_used = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence that it has seen."""
        return len(self._index)

    def see(self, token_ids: bytes) -> None:
        """These are the sequence's tokens after the first `num_tokens`, packed int32. If they are many, only the first
        ones are taken, and the next call has to bring the others again."""
        if not token_ids:
            return
        is_one = len(token_ids) == TOKEN_BYTES
        is_right = is_one and int.from_bytes(token_ids, "little", signed=True) == self._expected
        self._num_right = self._num_right + 1 if is_right else 0
        taken = token_ids[: MAX_INDEXED_TOKENS * TOKEN_BYTES]
        self._index.extend(taken)
        expected = self._index.propose(1) if len(taken) == len(token_ids) else []
        self._expected = expected[0] if expected else -1

    @property
    def pays(self) -> bool:
        """Whether the lookup would have proposed the latest tokens."""
        return self._num_right >= PROBE_TOKENS

    def propose(self, count: int) -> list[int]:
        """At most `count` draft tokens. Empty if the lookup finds nothing, or if its latest drafts were wrong."""
        return [] if self._num_lost >= MAX_LOST_TOKENS else self._index.propose(count)

    def verified(self, num_accepted: int) -> None:
        """A draft row had this many accepted drafts."""
        self._num_lost = max(0, self._num_lost + 1 - num_accepted)

    def stop(self) -> None:
        """The sequence decodes again: the probe starts anew."""
        self._num_right = self._num_lost = 0
