"""Prevents text of users from becoming control tokens in a chat.

A chat template writes control tokens (`<|im_end|>`) between texts of users, and the tokenizer reads the whole. So a
text with a control token in it would end its message and begin another one, in another role. Texts are broken before
rendering: a mark goes into each control token, the rendered text is split at the marks, and the pieces are tokenized
one by one. A text without a control token has no mark, and its tokens are those of transformers' apply_chat_template.

A template can also join a control token from parts: from several texts, or from a text and characters of the template
(`<` + name + `>`). If a text contains such a part, the template renders a second time, with marks in these parts as
well. If the two rendered texts have different control tokens, some of these tokens came from users, and the second
rendering is used. A word alone does not count as a part: templates compare words (`role == "user"`), so a mark must not
split a word.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from services.gateway.text.chat_values import with_strings

# Unicode noncharacters. No text has a reason to contain one, so one of them can mark positions in a text that passes
# through a template.
_MARKS = [chr(c) for c in range(0xFDD0, 0xFDF0)]
_WORD = re.compile(r"\w+")


class ControlTokens:
    """The special tokens of a tokenizer, by their written form. A token of a single character is left out."""

    def __init__(self, written: Iterable[str]) -> None:
        tokens = sorted(token for token in written if len(token) > 1)
        # Each token contains one of these, and so does each part of a token that `has_parts` finds.
        self._chars = {char for token in tokens for char in token if _WORD.fullmatch(char) is None}
        self._chars |= {token[0] for token in tokens if _WORD.fullmatch(token)}
        self._any = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None
        self._starts = _first_of_each(tokens)
        self._parts = _parts_of_any(tokens)

    def may_be_in(self, texts: Sequence[str]) -> bool:
        """A quick check: False if no text can have a control token in it, or a part of one."""
        return any(char in text for text in texts for char in self._chars)

    def breaks(self, mark: str) -> Callable[[Any], Any]:
        """A function that puts the mark into each control token in a value, which may be nested."""
        return _marks(self._starts, mark)

    def breaks_parts(self, mark: str) -> Callable[[Any], Any]:
        """The same for everything that could be a part of a control token."""
        return _marks(self._parts, mark)

    def has_parts(self, texts: Iterable[str]) -> bool:
        """Whether one of the texts contains something that could be a part of a control token."""
        return self._parts is not None and any(map(self._parts.search, texts))

    def found_in(self, text: str) -> list[str]:
        """The control tokens in a text, in order."""
        return self._any.findall(text) if self._any is not None else []


def unused_mark(texts: Sequence[str]) -> str | None:
    """A mark that is in none of the texts. None if the texts contain all marks."""
    return next((mark for mark in _MARKS if not any(mark in text for text in texts)), None)


def _marks(pattern: re.Pattern[str] | None, mark: str) -> Callable[[Any], Any]:
    if pattern is None:
        return lambda value: value
    return lambda value: with_strings(value, partial(pattern.sub, rf"\g<0>{mark}"))


def _first_of_each(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Matches the first character of each token in a text. The rest is a look-ahead, so that overlapping tokens are
    found, too."""
    starts = [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in tokens]
    return re.compile("|".join(starts)) if starts else None


def _parts_of_any(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Matches (1) the first of two adjacent characters of a text that are adjacent in a token, too; (2) the last
    character of a text, if a token has this character before the token's end. Ignores the case of letters. A pair of
    two word characters does not count, nor a word character at the end: otherwise "user" would be a part of
    `<|user|>`."""
    seconds: dict[str, set[str]] = defaultdict(set)  # by first
    for token in tokens:
        for first, second in pairwise(token.lower()):
            if _WORD.fullmatch(first + second) is None:
                seconds[first].add(second)
    firsts: dict[frozenset[str], set[str]] = defaultdict(set)  # few branches, as each costs time at every character
    for first, following in seconds.items():
        firsts[frozenset(following)].add(first)
    ends = {char for token in tokens for char in token[:-1] if _WORD.fullmatch(char) is None}
    found = [f"{_one_of(first)}(?={_one_of(following)})" for following, first in firsts.items()]
    found += [_one_of(ends) + r"\Z"] if ends else []
    return re.compile("|".join(found), re.IGNORECASE) if found else None


def _one_of(chars: Iterable[str]) -> str:
    return f"[{''.join(map(re.escape, sorted(chars)))}]"
