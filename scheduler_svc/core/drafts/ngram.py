"""Prompt lookup: a text that repeats itself proposes its own continuation (vLLM's method "ngram")."""

from __future__ import annotations

from array import array

# A lookup compares at most this many earlier occurrences, the latest first. Without a limit, a token that the text
# repeats thousands of times would make each lookup slow.
MAX_OCCURRENCES = 32


class NgramIndex:
    """The n-grams of a growing sequence of tokens. A new token costs one dictionary entry, however long the text is.

    Only n-grams of `shortest` tokens are indexed. Each links to its previous occurrence, so that a lookup follows the
    chain and compares further tokens backwards.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        """A lookup matches the last `longest` tokens, or fewer, but at least the last `shortest` ones."""
        self._longest = longest
        self._shortest = shortest
        self._tokens = array("i")
        self._latest: dict[bytes, int] = {}  # by n-gram: the end of its latest occurrence
        self._previous = array("i", [0])  # by position: the end of the previous occurrence of the n-gram that ends here

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: bytes) -> None:
        """Append tokens, packed int32."""
        tokens, size = self._tokens, self._shortest
        begin = len(tokens)
        tokens.frombytes(token_ids)
        for end in range(begin + 1, len(tokens) + 1):
            if end < size:
                self._previous.append(0)
                continue
            ngram = tokens[end - size : end].tobytes()
            self._previous.append(self._latest.get(ngram, 0))
            self._latest[ngram] = end

    def propose(self, count: int) -> list[int]:
        """The `count` tokens that follow the latest of the longest matches. Empty if there is no match.

        A match may be so near to the end that fewer tokens follow it. Then the proposal continues with its own first
        tokens: the text is taken to go on in the same period.
        """
        at = self._find()
        if not at:
            return []
        proposed = self._tokens[at : at + count].tolist()
        while len(proposed) < count:
            proposed.append(proposed[at + len(proposed) - len(self._tokens)])
        return proposed

    def _find(self) -> int:
        """The end of the best earlier match of the last tokens; 0 if there is none."""
        tokens, end = self._tokens, len(self._tokens)
        best_at = best = 0
        at = self._previous[end]
        for _ in range(MAX_OCCURRENCES):
            if not at:
                break
            length = self._shortest
            while length < min(self._longest, at) and tokens[at - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > best:
                best_at, best = at, length
            if best == self._longest:
                break
            at = self._previous[at]
        return best_at
