"""Texts of about a given number of tokens, and the messages or prompt of a request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any, Literal

from services.cli.bench.load.sessions import LoadSession, Segment

Endpoint = Literal["chat", "completion"]
# Common words, most of which are one token in the vocabularies of current models.
_WORD_LIST = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service "
    "friend father power hour game line end member law car city name team minute idea body back parent face "
    "others level office door health person art war history party result change morning reason research girl guy "
    "moment air teacher force education foot boy age policy music market sense nation plan college interest death "
    "course effect class control field light road paper value"
)
WORDS = tuple(_WORD_LIST.split())
# Slightly more than one token per word. Used until the server has counted the two probe prompts.
DEFAULT_TOKENS_PER_WORD = 1.1
# Some chat templates refuse two messages of one role in a row, and some refuse an empty message.
NO_REPLY = "-"


@dataclass(frozen=True, slots=True)
class Calibration:
    """How the server counts: tokens per word, and tokens that each prompt has besides its words (chat template)."""

    tokens_per_word: float = DEFAULT_TOKENS_PER_WORD
    extra_tokens: float = 0.0

    @classmethod
    def of(cls, short: tuple[int, int], long: tuple[int, int]) -> Calibration:
        """From two prompts of (words, tokens as the server counts them). Raises ValueError."""
        tokens_per_word = (long[1] - short[1]) / (long[0] - short[0])
        if not 0.2 <= tokens_per_word <= 20:
            raise ValueError(f"{short[0]} words count as {short[1]} tokens, but {long[0]} words as {long[1]}")
        return cls(tokens_per_word, max(0.0, short[1] - short[0] * tokens_per_word))


class PromptWriter:
    """Writes prompts. The same seed, key and length give the same text."""

    def __init__(self, seed: int, endpoint: Endpoint, calibration: Calibration, vocabulary: int = 0) -> None:
        self._seed = seed
        self._endpoint = endpoint
        self._calibration = calibration
        self._vocabulary = vocabulary  # 0: texts instead of token ids
        # Prefixes and blocks of traces come again and again.
        self._text = lru_cache(maxsize=4096)(self._write)

    def words(self, key: str, count: int) -> str:
        return " ".join(Random(f"{self._seed}/{key}").choices(WORDS, k=max(1, count)))

    def body(self, session: LoadSession, turn: int, replies: list[str]) -> dict[str, Any]:
        """`messages` or `prompt` of a turn's request. If the session keeps its history, it includes the earlier turns
        and their `replies`. A prompt of token ids never does."""
        first = 0 if session.keeps_history else turn
        parts = [session.turns[i].segments for i in range(first, turn + 1)]
        if self._vocabulary:
            return {"prompt": [token for segment in (*session.system, *parts[-1]) for token in self._ids(segment)]}
        # The template's tokens are taken off the first part, so that the prompt has the wanted length.
        spare = self._calibration.extra_tokens
        system = self._joined(session.system, spare)
        texts = [self._joined(part, spare if i == 0 and not system else 0.0) for i, part in enumerate(parts)]
        said = replies[first:turn]
        if self._endpoint == "completion":
            pieces = [system] if system else []
            for text, reply in zip(texts, [*said, ""], strict=True):
                pieces += [text, reply]
            return {"prompt": "\n".join(piece for piece in pieces if piece)}
        messages = [{"role": "system", "content": system}] if system else []
        for text, reply in zip(texts, said, strict=False):
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": reply or NO_REPLY})
        messages.append({"role": "user", "content": texts[-1]})
        return {"messages": messages}

    def _joined(self, segments: tuple[Segment, ...], spare_tokens: float) -> str:
        """The texts of segments. `spare_tokens` shorten the last one, so that shared texts in front stay equal."""
        if not segments:
            return ""
        last = Segment(segments[-1].key, max(1, round(segments[-1].tokens - spare_tokens)))
        return " ".join(map(self._text, (*segments[:-1], last)))

    def _write(self, segment: Segment) -> str:
        return self.words(segment.key, round(segment.tokens / self._calibration.tokens_per_word))

    def _ids(self, segment: Segment) -> list[int]:
        random = Random(f"{self._seed}/{segment.key}")
        # The first ids of most vocabularies are special tokens or bytes.
        least = min(256, self._vocabulary // 2)
        return random.choices(range(least, self._vocabulary), k=segment.tokens)
