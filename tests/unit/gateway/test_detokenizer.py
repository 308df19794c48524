"""Detokenisation: joined pieces equal a full decode, no broken characters, stop strings as a naive search has them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.gateway.engine.logprobs import Echo, LogprobFormat, ScoredToken, echoed_logprobs
from services.gateway.text.detokenizer import PrefixDetokenizer, StopMatcher, TableDetokenizer, TextStream, piece_table
from services.gateway.text.tokenizer import TextTokenizer

SPECIALS = ["<|bos|>", "<|end|>"]


def byte_level() -> Tokenizer:
    """256 bytes, two merges and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    for merged in ("he", "Ġa"):
        vocab[merged] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """A Llama-2-like tokenizer: ▁ for spaces, byte fallback, the first space stripped."""
    words = ["<unk>", *[f"<0x{b:02X}>" for b in range(256)], "▁", "a", "b", "c", "▁a", "▁ab", "é"]
    vocab = {w: i for i, w in enumerate(words)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁a", "b")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_LEVEL = TextTokenizer(byte_level(), None)
RAW_BYTE_LEVEL = byte_level()
SENTENCEPIECE = TextTokenizer(sentencepiece(), None)
RAW_SENTENCEPIECE = sentencepiece()


def chunks_of(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    out, at = [], 0
    for size in sizes:
        out.append(list(ids[at : at + size]))
        at += size
    out.append(list(ids[at:]))
    return [chunk for chunk in out if chunk]


@given(st.lists(st.integers(0, 259), max_size=40), st.lists(st.integers(1, 4), max_size=20))
def test_byte_level_pieces_join_to_the_full_decode(ids: list[int], sizes: list[int]) -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    assert isinstance(detokenizer, TableDetokenizer)
    text = "".join(detokenizer.push(chunk) for chunk in chunks_of(ids, sizes)) + detokenizer.finish()
    assert text == RAW_BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=30), st.lists(st.integers(1, 4), max_size=20))
def test_valid_text_never_shows_a_broken_character(text: str, sizes: list[int]) -> None:
    ids = BYTE_LEVEL.encode(text)
    detokenizer = BYTE_LEVEL.detokenizer()
    pieces = [detokenizer.push(chunk) for chunk in chunks_of(ids, sizes)]
    assert all(text.startswith("".join(pieces[:i])) for i in range(len(pieces) + 1))
    assert "".join(pieces) + detokenizer.finish() == text


@given(st.text(alphabet="abc hé漢😀", min_size=1, max_size=20))
def test_tokens_begin_where_the_tokenizer_says(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        ids, offsets = tokenizer.encode(text), tokenizer.offsets(text)
        assert offsets == sorted(offsets)
        for token, offset in zip(ids, offsets, strict=True):
            piece = tokenizer.token_bytes(token)
            if "\ufffd" not in piece.decode(errors="replace"):  # else it is a part of a character
                assert text.encode()[len(text[:offset].encode()) :].startswith((piece, piece.removeprefix(b" "))), text


@given(st.text(alphabet="abc é", min_size=1, max_size=20))
def test_logprobs_of_echoed_token_ids_have_their_text_offsets(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        ids = tokenizer.encode(text)
        shape = LogprobFormat(False, tokenizer.token_bytes, tokenizer.token_bytes)
        others = [ScoredToken(token, -1.0, ()) for token in ids[1:]]
        echoed = echoed_logprobs(shape, ids[0], others, Echo(tokenizer.decode(ids)))
        assert echoed["text_offset"] == tokenizer.offsets(text)


@given(st.text(alphabet="abc é漢😀", min_size=1, max_size=20), st.lists(st.integers(1, 3), max_size=20))
def test_sentencepiece_output_continues_a_prompt(text: str, sizes: list[int]) -> None:
    ids = RAW_SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    anchor = RAW_SENTENCEPIECE.encode("b", add_special_tokens=False).ids
    whole = RAW_SENTENCEPIECE.decode(anchor + ids)[1:]
    table, prefix = SENTENCEPIECE.detokenizer(anchor), PrefixDetokenizer(RAW_SENTENCEPIECE.decode, anchor)
    assert isinstance(table, TableDetokenizer)
    for detokenizer in (table, prefix):
        assert "".join(detokenizer.push(c) for c in chunks_of(ids, sizes)) + detokenizer.finish() == whole


@given(st.text(max_size=200), st.lists(st.integers(1, 4), max_size=80))
def test_any_other_tokenizer_decodes_by_windows(text: str, sizes: list[int]) -> None:
    ids = BYTE_LEVEL.encode(text)
    detokenizer = PrefixDetokenizer(lambda window: RAW_BYTE_LEVEL.decode(list(window)))
    pieces = [detokenizer.push(chunk) for chunk in chunks_of(ids, sizes)]
    assert "".join(pieces) + detokenizer.finish() == text


def test_an_unfinished_character_is_flushed_as_the_full_decode_shows_it() -> None:
    ids = BYTE_LEVEL.encode("a漢")[:-1]
    detokenizer = BYTE_LEVEL.detokenizer()
    assert detokenizer.push(ids) == "a"
    assert detokenizer.finish() == RAW_BYTE_LEVEL.decode(ids)[1:] == "\ufffd"


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    assert detokenizer.push([100_000]) == ""
    assert detokenizer.push([100_000, BYTE_LEVEL.encode("x")[0]]) == "x"


def test_special_tokens_show_on_request() -> None:
    end = RAW_BYTE_LEVEL.token_to_id("<|end|>")
    assert end is not None
    assert BYTE_LEVEL.detokenizer().push([end]) == ""
    assert BYTE_LEVEL.detokenizer(skip_special_tokens=False).push([end]) == "<|end|>"


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece"}, {"type": "Sequence", "decoders": [{"type": "CTC"}]}])
def test_an_unknown_decoder_has_no_table(decoder: dict[str, object] | None) -> None:
    assert piece_table(decoder, {"a": 0}, ()) is None


# -- stop strings


def naive_stop(text: str, stops: Sequence[str], after: int = 0) -> tuple[str, bool]:
    """The text before the first stop string that ends beyond position `after`. If several end at the same position, the
    longest counts."""
    for end in range(after + 1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=400)
@given(st.text(alphabet="abc", max_size=30), STOPS, st.lists(st.integers(1, 5), max_size=30))
def test_stop_strings_are_found_as_by_a_naive_search(text: str, stops: list[str], sizes: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown, found, at = "", False, 0
    for size in [*sizes, len(text)]:
        piece, found = matcher.push(text[at : at + size])
        shown += piece
        at += size
        # Nothing shown is ever taken back.
        assert naive_stop(text, stops)[0].startswith(shown)
        if found:
            break
    if not found:
        shown += matcher.finish()
    assert (shown, found) == naive_stop(text, stops)


@given(st.text(alphabet="abc", max_size=20), STOPS, st.integers(0, 5), st.lists(st.integers(1, 5), max_size=20))
def test_batching_of_tokens_changes_nothing(text: str, stops: list[str], min_tokens: int, sizes: list[int]) -> None:
    ids = BYTE_LEVEL.encode(text)

    def run(chunks: list[list[int]]) -> tuple[str, int, bool]:
        stream = TextStream(BYTE_LEVEL.detokenizer(), stops, min_tokens)
        shown = ""
        for chunk in chunks:
            shown += stream.push(chunk)
            if stream.stopped:
                return shown, stream.num_tokens, True
        return shown + stream.finish(), stream.num_tokens, stream.stopped

    one_by_one = run([[i] for i in ids])
    assert run(chunks_of(ids, sizes)) == one_by_one
    if len(ids) == len(text):  # no merged tokens: the naive search tells where it ends
        expected, stopped = naive_stop(text, stops, after=min_tokens)
        assert one_by_one[0] == expected
        assert one_by_one[2] == stopped


def test_a_stop_token_has_no_text_but_counts() -> None:
    ids = BYTE_LEVEL.encode("xy")
    stream = TextStream(BYTE_LEVEL.detokenizer(), silent={ids[1]})
    assert stream.push(ids) + stream.finish() == "x"
    assert stream.num_tokens == 2
    stream = TextStream(BYTE_LEVEL.detokenizer(), stops=["zz"], silent={ids[1]})
    assert stream.push(ids) + stream.finish() == "x"
    assert stream.num_tokens == 2


def test_include_stop_keeps_the_stop_string_or_token_in_the_text() -> None:
    ids = BYTE_LEVEL.encode("xyzzy")
    stream = TextStream(BYTE_LEVEL.detokenizer(), stops=["zz"], include_stop=True)
    assert stream.push(ids) == "xyzz"
    assert stream.stopped
    ids = BYTE_LEVEL.encode("xy")
    stream = TextStream(BYTE_LEVEL.detokenizer(), silent={ids[1]}, include_stop=True)
    assert stream.push(ids) + stream.finish() == "xy"


def test_a_stop_string_that_ends_too_early_stops_nothing_later() -> None:
    matcher = StopMatcher(["abc", "b"])
    assert matcher.let_pass("ab") == ""
    assert matcher.push("x") == ("abx", False)
    assert matcher.push("b") == ("", True)
    matcher = StopMatcher(["abc", "b"])
    assert matcher.let_pass("ab") == ""
    assert matcher.push("c") == ("", True)


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_the_table_agrees_with_the_tokenizer_on_every_token() -> None:
    spec = json.loads(RAW_BYTE_LEVEL.to_str())
    table = piece_table(spec["decoder"], RAW_BYTE_LEVEL.get_vocab(with_added_tokens=True), ())
    assert table is not None
    for token_id in range(260):
        assert table.pieces[token_id].decode(errors="replace") == RAW_BYTE_LEVEL.decode(
            [token_id], skip_special_tokens=False
        )
