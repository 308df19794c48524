"""Prompt lookup finds the same draft tokens as a scan of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.arrays import packed
from scheduler_svc.core.drafts.ngram import MAX_OCCURRENCES, NgramIndex

TEXT = st.lists(st.integers(0, 3), max_size=60)


def scanned(tokens: list[int], longest: int, shortest: int, count: int) -> list[int]:
    """The draft by the rule in docs/speculation.md, among the latest MAX_OCCURRENCES occurrences."""
    suffix = tokens[-shortest:]
    ends = [end for end in range(len(tokens) - 1, shortest - 1, -1) if tokens[end - shortest : end] == suffix]
    for length in range(longest, shortest - 1, -1):
        for end in ends[:MAX_OCCURRENCES]:
            if length <= end and tokens[end - length : end] == tokens[-length:]:
                text = list(tokens)
                while len(text) < len(tokens) + count:
                    text.append(text[end + len(text) - len(tokens)])
                return text[len(tokens) :]
    return []


@given(parts=st.lists(TEXT, max_size=5), shortest=st.integers(1, 3), more=st.integers(0, 3), count=st.integers(1, 9))
def test_a_lookup_equals_a_scan(parts: list[list[int]], shortest: int, more: int, count: int) -> None:
    index, text = NgramIndex(shortest + more, shortest), list[int]()
    for part in parts:
        text += part
        index.extend(packed(part))
        assert len(index) == len(text)
        found = index.propose(count)
        assert found == (scanned(text, shortest + more, shortest, count) if len(text) >= shortest else [])
        assert len(found) in (0, count)


def test_the_longest_match_wins_and_then_the_latest() -> None:
    index = NgramIndex(longest=3, shortest=1)
    index.extend(packed([1, 2, 3, 4, 5, 9, 3, 5, 8, 9, 3, 6, 1, 2, 3]))
    assert index.propose(2) == [4, 5]  # after 1, 2, 3
    index = NgramIndex(longest=2, shortest=1)
    index.extend(packed([7, 3, 4, 8, 3, 5, 9, 3]))
    assert index.propose(1) == [5]  # after the latest 3


def test_a_short_period_continues() -> None:
    index = NgramIndex(longest=4, shortest=2)
    index.extend(packed([1, 2, 3, 1, 2, 3, 1, 2]))
    assert index.propose(7) == [3, 1, 2, 3, 1, 2, 3]


def test_a_text_without_repetition_proposes_nothing() -> None:
    index = NgramIndex(longest=4, shortest=2)
    index.extend(packed(range(2000)))
    assert index.propose(4) == []


def test_a_token_that_is_everywhere_costs_few_comparisons() -> None:
    """Only the latest occurrences are compared, so the match of three tokens at the beginning is not found."""
    index = NgramIndex(longest=3, shortest=1)
    index.extend(packed([5, 6, 1, 9, *([2, 1] * MAX_OCCURRENCES), 8, 5, 6, 1]))
    assert index.propose(1) == [8]
