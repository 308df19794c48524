"""Turns tokens into text as they arrive, in whole characters, and cuts the text at stop strings.

No sockets, no clock. A `Detokenizer` turns token ids into text, and keeps an unfinished character. A `StopMatcher`
keeps text that may become a stop string. `TextStream` combines the two for one sequence."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

# A byte-level decoder never needs more tokens than this to complete a character. After that the bytes are invalid.
_MAX_HELD_TOKENS = 8


class Detokenizer(Protocol):
    """The text of one sequence, piece by piece. The pieces together are the text of all tokens."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete, in whole characters."""
        ...

    def finish(self) -> str:
        """The text that is still kept. U+FFFD for an incomplete character."""
        ...


class PieceTable:
    """What each token id adds to a text: its bytes, and the text if the bytes are whole characters."""

    __slots__ = ("pieces", "texts")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.texts = [_whole(piece) for piece in pieces]

    def with_pieces_of(self, other: PieceTable, token_ids: Collection[int]) -> PieceTable:
        """This table, but with the other one's pieces for these tokens."""
        if not token_ids:
            return self
        pieces = list(self.pieces)
        for token_id in token_ids:
            pieces[token_id] = other.pieces[token_id]
        return PieceTable(pieces)


class TableDetokenizer:
    """A look-up for tokenizers with byte strings as tokens (byte-level BPE, SentencePiece with byte fallback)."""

    __slots__ = ("_decoder", "_held", "_pieces", "_texts")

    def __init__(self, table: PieceTable) -> None:
        self._pieces = table.pieces
        self._texts = table.texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Whether the decoder keeps the beginning of a character.
        self._held = False

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._held and len(token_ids) == 1 and token_ids[0] < len(self._texts):
            # The most frequent case: one token of whole characters.
            text = self._texts[token_ids[0]]
            if text is not None:
                return text
        # A model's vocabulary may be padded. An id beyond the tokenizer's vocabulary has no text.
        pieces = self._pieces
        text = self._decoder.decode(b"".join([pieces[i] for i in token_ids if i < len(pieces)]))
        self._held = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class PrefixDetokenizer:
    """For any other tokenizer: decodes a short window of tokens without and with the new token, and returns the
    difference.

    `context_ids`: the last prompt tokens. With them a decoder that strips the space before the first word of a text
    does not strip it in the middle of a text."""

    __slots__ = ("_decode", "_ids", "_read", "_start")

    def __init__(self, decode: Callable[[Sequence[int]], str], context_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context_ids)
        self._start = 0
        self._read = len(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        out = []
        for token_id in token_ids:
            self._ids.append(token_id)
            out.append(self._step(final=False))
        return "".join(out)

    def finish(self) -> str:
        return self._step(final=True) if self._read < len(self._ids) else ""

    def _step(self, final: bool) -> str:
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        held = len(self._ids) - self._read
        if len(after) <= len(before) and not final:
            return ""
        if after.endswith("\ufffd") and not final and held < _MAX_HELD_TOKENS:
            return ""
        self._start, self._read = self._read, len(self._ids)
        if self._start > 64:
            # Keep only the window.
            del self._ids[: self._start]
            self._read -= self._start
            self._start = 0
        return after[len(before) :]


class StopMatcher:
    """Cuts a text before the stop string that is complete first, or after it with `include`. If several stop strings
    end at the same position, the longest counts.

    The returned text never contains a part of a stop string that is completed later.
    """

    __slots__ = ("_held", "_include", "_num_passed", "_stops", "found")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._num_passed = 0  # characters of the kept text that cannot complete a stop string
        self.found: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that can be shown, and whether a stop string was found. Do not call it after True."""
        text = self._held + text
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, self._num_passed - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        if best is not None:
            self._held, self.found = "", text[best[1] : best[0]]
            return text[: best[0] if self._include else best[1]], True
        return self._hold(text, self._num_passed), False

    def let_pass(self, text: str) -> str:
        """Like push(), but a stop string that is complete in this text does not count. A stop string may begin
        here."""
        text = self._held + text
        return self._hold(text, len(text))

    def _hold(self, text: str, num_passed: int) -> str:
        cut = self._possible_start(text)
        self._held, self._num_passed = text[cut:], max(0, num_passed - cut)
        return text[:cut]

    def finish(self) -> str:
        """The kept text. No more text follows, so the kept text cannot become a stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """The index from which `text` may begin a stop string; len(text) if there is none."""
        cut = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < cut:
                if stop.startswith(text[start:]):
                    cut = start
                    break
                start = text.find(stop[0], start + 1)
        return cut


class TextStream:
    """The text of one sequence, detokenised and cut at stop strings.

    Tokens in `silent` (stop tokens, end of sequence) end a sequence and have no text. A stop string counts only if a
    token after the first `min_tokens` completes it. With `include_stop`, the text contains what ended it, if that has
    text.
    """

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_silent", "num_tokens", "stopped")

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        silent: Collection[int] = (),
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include_stop) if stops else None
        self._min_tokens = min_tokens
        self._silent = () if include_stop else silent
        # Tokens that count as output: up to the token that completed a stop string.
        self.num_tokens = 0
        self.stopped = False

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None while there is none."""
        return self._matcher.found if self._matcher is not None else None

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that can be shown after these tokens. Sets `stopped` at a stop string, and ignores later tokens."""
        matcher = self._matcher
        if matcher is None:
            self.num_tokens += len(token_ids)
            if token_ids and token_ids[-1] in self._silent:
                token_ids = token_ids[:-1]
            return self._detokenizer.push(token_ids)
        out = []
        # One token at a time: which token completes a stop string must not depend on the batches of tokens.
        for token_id in token_ids:
            self.num_tokens += 1
            text = "" if token_id in self._silent else self._detokenizer.push((token_id,))
            if self.num_tokens > self._min_tokens:
                text, self.stopped = matcher.push(text)
            else:
                text = matcher.let_pass(text)
            out.append(text)
            if self.stopped:
                break
        return "".join(out)

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        text = self._detokenizer.finish()
        if self._matcher is None or self.stopped:
            return "" if self.stopped else text
        shown, self.stopped = self._matcher.push(text)
        return shown if self.stopped else shown + self._matcher.finish()


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


def _byte_level_piece(alphabet: dict[str, int], token: str) -> bytes:
    try:
        return bytes([alphabet[c] for c in token])
    except KeyError:
        # An added token with characters outside the alphabet is its own text.
        return token.encode()


def _sentencepiece_piece(token: str, space: str, byte_fallback: bool) -> bytes:
    if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(space, " ").encode()


def _piece_function(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    """A function from token to bytes, for decoders with independent byte strings as tokens. None for others."""
    if decoder is None:
        return None
    if decoder["type"] == "ByteLevel":
        alphabet = _byte_level_alphabet()
        return lambda token: _byte_level_piece(alphabet, token)
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    space, byte_fallback = None, False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": pattern}, "content": " "}:
                space = pattern
            case {"type": "Metaspace", "replacement": replacement}:
                space = replacement
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"} | {"type": "Strip", "content": " ", "stop": 0}:
                # Strip removes the space before a text's first word. Output continues a prompt, so its space stays.
                pass
            case _:
                return None
    if space is None:
        return None
    return lambda token: _sentencepiece_piece(token, space, byte_fallback)


def piece_table(
    decoder: dict[str, Any] | None, vocab: dict[str, int], special_ids: Collection[int]
) -> PieceTable | None:
    """The bytes of each token id (special tokens: none). None if this decoder has no such table.

    `decoder`: the decoder section of tokenizer.json.
    """
    piece = _piece_function(decoder)
    if piece is None:
        return None
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        if token_id not in special_ids:
            table[token_id] = piece(token)
    return PieceTable(table)
