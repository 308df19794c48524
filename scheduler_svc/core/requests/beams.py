"""Beam search for one request: which beams continue, which have ended, and when the search is over.

The rules are those of Hugging Face transformers (`GenerationMixin._beam_search` of 5.23.0), and the tests compare both.
The differences are on purpose:

- Log-probabilities are summed in double precision (there: fp32). So results differ only where sums are equal up to
  rounding.
- Equal sums keep the order of the beams and, within a beam, of the worker's list. Of equal scores, the earlier ending
  comes first (there: as `torch.topk` orders them).
- If the vocabulary has too few tokens to fill the width, there are fewer beams and hypotheses (there: impossible ones
  with a sum of about -1e9 take the empty places).
- A width of 1 is a search too (there: `generate` turns it into greedy decoding). With early_stopping "never" and a
  positive length penalty it can find something better than the first end of sequence.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, NamedTuple

MAX_WIDTH = 64
MAX_LENGTH_PENALTY = 10.0  # either side of zero; far larger ones would overflow length ** penalty

EarlyStopping = Literal["never"] | bool
Candidates = Sequence[tuple[int, float]]  # token and its log-probability, best first


@dataclass(frozen=True, slots=True, eq=False)
class SearchBeam:
    """A sequence under search: its last token, and the beam that it grew from (`origin`). Beams of one origin share the
    earlier tokens.

    `parent` is the index of `origin` among the live beams of the previous step.
    """

    parent: int
    token: int
    logprob: float  # of all output tokens
    num_tokens: int
    origin: SearchBeam | None = field(repr=False)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All output tokens. Takes time in proportion to their number."""
        tokens, beam = [], self
        while beam.origin is not None:
            tokens.append(beam.token)
            beam = beam.origin
        return tuple(reversed(tokens))


PROMPT = SearchBeam(parent=-1, token=-1, logprob=0.0, num_tokens=0, origin=None)


class FinishedBeam(NamedTuple):
    """A beam that has ended."""

    tokens: tuple[int, ...]  # with the token that ended it
    score: float
    reason: Literal["stop", "length"]


@dataclass(slots=True, eq=False, kw_only=True)
class BeamSearch:
    """A beam search. Until `done`: the worker reports the best `candidates_needed` tokens of every beam in `live`
    (fewer if the vocabulary has no more); then call `advance`. Beam b of the result continues from the blocks of the
    former beam `b.parent` with `b.token`. The first live beam is the prompt alone.

    A hypothesis scores logprob / num_tokens ** length_penalty, so more penalty favours longer ones. The search is over
    at max_new_tokens. Before that it is over when `width` hypotheses have ended and `early_stopping` allows it:

    - True: always.
    - False: if no live beam, scored at its present length, is above the worst ended hypothesis. This can be too early:
      with a positive penalty a longer sequence may score better.
    - "never": if no live beam, scored at the length that is best for it, is above the worst ended hypothesis. Then
      nothing better can come.

    The log-probabilities must be those of the whole vocabulary: min_new_tokens is applied here and leaves the weights
    of the other tokens as they are. A log-probability of -inf (or NaN) is no candidate.
    """

    width: int
    num_return: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    max_new_tokens: int
    min_new_tokens: int = 0  # a beam of at most this many tokens cannot end with an eos or stop token
    eos_token_ids: Collection[int] = ()
    stop_token_ids: Collection[int] = ()
    live: Sequence[SearchBeam] = field(init=False, default=(PROMPT,))  # best first; empty when the search is over
    _stops: frozenset[int] = field(init=False)
    _num_tokens: int = field(init=False, default=0)  # of every live beam
    _ended: list[SearchBeam] = field(init=False, default_factory=list)  # at most `width`, best first

    def __post_init__(self) -> None:
        _check_range("width", self.width, 1, MAX_WIDTH)
        _check_range("num_return", self.num_return, 1, self.width)
        _check_range("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping: {self.early_stopping!r} is not True, False or 'never'")
        _check_range("max_new_tokens", self.max_new_tokens, 1, math.inf)
        _check_range("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        for name in ("eos_token_ids", "stop_token_ids"):
            _check_range(name, min(getattr(self, name), default=0), 0, math.inf)
        self._stops = frozenset(self.eos_token_ids) | frozenset(self.stop_token_ids)

    @property
    def candidates_needed(self) -> int:
        """Candidates needed of each beam: `width` tokens that continue, and all stop tokens, which may rank higher."""
        return self.width + len(self._stops)

    @property
    def done(self) -> bool:
        return not self.live

    def advance(self, candidates: Sequence[Candidates]) -> Sequence[SearchBeam]:
        """One step. `candidates`: a list for each live beam, in the order of `live`. Returns the new live beams.

        Only the best `width` extensions may end here: an end that ranks lower is dropped.
        """
        if self.done:
            raise RuntimeError("beam search: it is over")
        if len(candidates) != len(self.live):
            raise ValueError(f"candidates: {len(candidates)} lists for {len(self.live)} live beams")
        self._num_tokens += 1
        at_limit = self._num_tokens == self.max_new_tokens
        grown: list[SearchBeam] = []
        for rank, beam in enumerate(self._extensions(candidates)):
            if len(grown) == self.width or (at_limit and rank == self.width):
                break
            if not at_limit and beam.token not in self._stops:
                grown.append(beam)
            elif rank < self.width:
                bisect.insort(self._ended, beam, key=lambda ended: -self._score(ended, ended.num_tokens))
                del self._ended[self.width :]
        self.live = [] if self._is_settled(grown) else grown
        return self.live

    def best(self) -> list[FinishedBeam]:
        """The `num_return` best hypotheses that have ended so far, best first. A search that is over has that many,
        unless the vocabulary is smaller than the width."""
        return [
            FinishedBeam(
                beam.tokens, self._score(beam, beam.num_tokens), "stop" if beam.token in self._stops else "length"
            )
            for beam in self._ended[: self.num_return]
        ]

    def _extensions(self, candidates: Sequence[Candidates]) -> Iterator[SearchBeam]:
        """Extensions of all live beams, best first. Lazy: the search looks at few."""
        banned = self._stops if self._num_tokens <= self.min_new_tokens else frozenset()

        def grow(parent: int) -> Iterator[SearchBeam]:
            origin = self.live[parent]
            for token, logprob in candidates[parent]:
                if token not in banned and logprob > -math.inf:
                    yield SearchBeam(parent, token, origin.logprob + logprob, self._num_tokens, origin)

        return heapq.merge(*map(grow, range(len(candidates))), key=attrgetter("logprob"), reverse=True)

    def _is_settled(self, grown: Sequence[SearchBeam]) -> bool:
        if not grown:
            return True
        if len(self._ended) < self.width:
            return False
        if self.early_stopping is True:
            return True
        longest_is_best = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_new_tokens if longest_is_best else self._num_tokens
        worst = self._ended[-1]
        return self._score(grown[0], length) <= self._score(worst, worst.num_tokens)

    def _score(self, beam: SearchBeam, num_tokens: int) -> float:
        """The beam's score if it had this many tokens."""
        return beam.logprob / float(num_tokens**self.length_penalty)


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        limit = f"not in [{least}, {most}]" if most < math.inf else f"less than {least}"
        raise ValueError(f"{name}: {value} is {limit}")
