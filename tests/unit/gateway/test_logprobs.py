"""Shapes of log probabilities: a token's text, where it begins, and the alternatives to the token."""

from __future__ import annotations

from services.gateway.engine.logprobs import LogprobFormat, ScoredToken, prompt_logprobs

PIECES = {1: b"a", 2: b" b\xc3", 3: b"\xa9", 4: b"", 5: b"\xc3"}
TOKENS = [
    ScoredToken(1, -0.5, [(1, -0.5), (5, -2.0)]),
    ScoredToken(2, -3.0, [(1, -0.25), (3, -1.0)]),
    ScoredToken(3, -0.125, []),
    ScoredToken(4, -0.0, [(4, 0.0)]),
]


def test_logprobs_of_completions_have_their_shape() -> None:
    shape = LogprobFormat(chat=False, token_bytes=PIECES.__getitem__, shown_bytes=PIECES.__getitem__)
    first, rest = shape.shape(TOKENS[:2]), shape.shape(TOKENS[2:])
    assert first["tokens"] == ["a", "bytes:\\x20\\x62\\xc3"]
    assert first["token_logprobs"] == [-0.5, -3.0]
    assert first["top_logprobs"] == [
        {"a": -0.5, "bytes:\\xc3": -2.0},
        {"a": -0.25, "bytes:\\xa9": -1.0, "bytes:\\x20\\x62\\xc3": -3.0},
    ]
    # The text is "a bé": its last character began in the second token.
    assert first["text_offset"] + rest["text_offset"] == [0, 1, 4, 4]
    assert rest["top_logprobs"] == [{"bytes:\\xa9": -0.125}, {"": 0.0}]


def test_the_token_itself_comes_before_likelier_ones() -> None:
    """vLLM's order; its clients read the first key."""
    shape = LogprobFormat(chat=False, token_bytes=PIECES.__getitem__, shown_bytes=PIECES.__getitem__)
    shown = shape.shape(TOKENS[:2])["top_logprobs"]
    assert [next(iter(tops)) for tops in shown] == ["a", "bytes:\\x20\\x62\\xc3"]


def test_offsets_are_those_of_the_text() -> None:
    """A hidden special token adds nothing to the text. A byte that is not valid UTF-8 adds one character (U+FFFD)."""
    written = {1: b"a", 2: b"<|end|>", 3: b"\x80", 4: b"\xc3", 5: b"b"}
    shape = LogprobFormat(chat=False, token_bytes=written.__getitem__, shown_bytes=(written | {2: b""}).__getitem__)
    ids = [1, 2, 1, 3, 5, 4, 5, 1]  # "aa\ufffdb\ufffdba"
    assert shape.shape([ScoredToken(i, -1.0, []) for i in ids])["text_offset"] == [0, 1, 1, 2, 3, 4, 5, 6]


def test_logprobs_of_chats_have_their_shape() -> None:
    shape = LogprobFormat(chat=True, token_bytes=PIECES.__getitem__, shown_bytes=PIECES.__getitem__)
    content = shape.shape(TOKENS[1:2])["content"]
    assert content == [
        {
            "token": "bytes:\\x20\\x62\\xc3",
            "logprob": -3.0,
            "bytes": [32, 98, 195],
            "top_logprobs": [
                {"token": "a", "logprob": -0.25, "bytes": [97]},
                {"token": "bytes:\\xa9", "logprob": -1.0, "bytes": [169]},
            ],
        }
    ]


def test_logprobs_of_prompts_have_their_shape() -> None:
    tokens = [ScoredToken(1, -0.5, [(1, -0.5)], rank=1), ScoredToken(3, -7.0, [(1, -0.5), (4, -0.75)], rank=9)]
    assert prompt_logprobs(tokens, PIECES.__getitem__) == [
        None,
        {"1": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}},
        {
            "3": {"logprob": -7.0, "rank": 9, "decoded_token": "bytes:\\xa9"},
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "4": {"logprob": -0.75, "rank": 2, "decoded_token": ""},
        },
    ]
