"""Encodes texts and chats to token ids and decodes them, with the tokenizer files of a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from services.gateway.errors import invalid
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.chat_values import NO_EXTRAS, ChatExtras, strings, with_strings, without_end
from services.gateway.text.control_tokens import ControlTokens, unused_mark
from services.gateway.text.detokenizer import Detokenizer, PrefixDetokenizer, TableDetokenizer, piece_table

# Prompt tokens that show a detokenizer that it is in the middle of a text.
_CONTEXT_TOKENS = 4
# The possible values of a character's second and later bytes.
_CONTINUATIONS = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))


class TextTokenizer:
    """Encodes prompts and chats, and makes detokenizers.

    In a plain prompt, special tokens written as text become special tokens, as in other servers: users write chat
    formats by hand. In a chat they stay text, wherever a client writes them: only the template can write control
    tokens (control_tokens.py)."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        spec = json.loads(tokenizer.to_str())
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        special = [token for token in spec.get("added_tokens", []) if token["special"]]
        self._special_ids = frozenset(token["id"] for token in special)
        # Ids of the tokens that were added to the vocabulary of the tokenizer's model, by the token's text.
        self.added_tokens: dict[str, int] = {token["content"]: token["id"] for token in spec.get("added_tokens", [])}
        self._table = piece_table(spec.get("decoder"), vocab, self._special_ids)
        self._full_table = piece_table(spec.get("decoder"), vocab, ())
        written = {token["content"] for token in special}
        # Not None if the tokenizer looks for some special tokens in normalized text: `＜s＞` may become one of them.
        self._normalizer = tokenizer.normalizer if any(token["normalized"] for token in special) else None
        if self._normalizer is not None:
            written |= {self._normalizer.normalize_str(token["content"]) for token in special if token["normalized"]}
        self._controls = ControlTokens(written)
        self._marked_ids: frozenset[int] = frozenset()
        self._marked_table = self._table
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.longest_token_chars = max(map(len, vocab), default=1)

    @classmethod
    def from_folder(cls, folder: Path, chat_template: str | None = None) -> TextTokenizer:
        """Load tokenizer.json and the files beside it.

        `chat_template`: a template or its path, instead of the checkpoint's.
        Raises FileNotFoundError if there is no tokenizer.json, ValueError if it cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder}: no tokenizer.json (the fast tokenizer's file)")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{path}: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, ChatTemplate.from_folder(folder, chat_template))

    @property
    def template_source(self) -> str | None:
        """The chat template of a chat with tools, if there is one."""
        return self._template.source if self._template is not None else None

    def show_markers(self, markers: Sequence[str]) -> None:
        """From now on, detokenizers with `with_markers` show these special tokens."""
        self._marked_ids = self._special_ids.intersection(
            self.added_tokens[marker] for marker in markers if marker in self.added_tokens
        )
        if self._table is not None and self._full_table is not None:
            self._marked_table = self._table.with_pieces_of(self._full_table, self._marked_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt, with BOS and other tokens that the tokenizer's post-processor adds."""
        return self._encode(text, add_special_tokens)

    def encode_part(
        self, text: str, num_tokens: int, *, cut_off: Literal["left", "right"] = "left", add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a prompt that is cut off at one side. They are at most `num_tokens`, including the tokens that
        the post-processor adds."""
        added = self._tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=False)
        encoding.truncate(max(num_tokens - added, 0), direction=cut_off)
        if added and num_tokens >= added:
            encoding = self._tokenizer.post_process(encoding, add_special_tokens=True)
        return list(encoding.ids)

    def ends_texts_with(self, token: str) -> bool:
        """Whether the post-processor adds this token at the end of each text."""
        return self.token_names(self.encode(""))[-1:] == [token]

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """How the vocabulary writes these tokens (`Ġfox`, `▁fox`); "" for an unknown token."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def offsets(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Where each token of `encode` begins in the text, in characters. A token that only continues a character
        begins after that character."""
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        begins, begin, end = [], 0, 0
        for token_id, (token_begin, token_end) in zip(encoding.ids, encoding.offsets, strict=True):
            is_rest = self.token_bytes(token_id)[:1] in _CONTINUATIONS
            is_added = token_begin == token_end
            # In some tokenizers the space before a word belongs to no token. In others, an added prefix belongs to the
            # next word.
            begin = end if is_rest or is_added or token_begin > end else max(begin, token_begin)
            begins.append(begin)
            end = max(end, token_end)
        return begins

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        extras: ChatExtras = NO_EXTRAS,
    ) -> list[int]:
        """Token ids of a chat. Raises what render_chat raises."""
        parts = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, variables=variables, extras=extras
        )
        return self.encode_parts(parts)

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """Token ids of a chat from render_chat. Each part is encoded by itself."""
        ids: list[int] = []
        for part in parts:
            ids += self._encode(part, False)
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        extras: ChatExtras = NO_EXTRAS,
    ) -> list[str]:
        """Render a chat with its template. Returns the text in parts.

        Special tokens in messages, variables, tools and documents stay text: each is cut in two, and its halves are in
        different parts. Raises ApiError 400 if the model has no template, if the template refuses the chat, or if the
        chat is nested too deep or cannot be continued as `extras` asks.
        """
        if self._template is None:
            raise invalid("messages", "this model has no chat template; use /v1/completions")
        template = self._template if extras.template is None else self._template.replaced_by(extras.template)
        given = [messages, variables or {}, extras.tools, extras.documents]

        def rendered(breaks: Callable[[Any], Any] = lambda value: value) -> str:
            chat, chosen, tools, documents = breaks(given)
            shown = replace(extras, tools=tools, documents=documents)
            text = template.render(chat, add_generation_prompt=add_generation_prompt, variables=chosen, extras=shown)
            if extras.continue_final_message:
                text = without_end(text, chat[-1]["content"] if chat else "")
            return text

        texts = list(strings(given))
        if self._normalizer is not None:
            given = with_strings(given, self._normalized_if_control)
            texts = list(strings(given))
        if not self._controls.may_be_in(texts):
            return [rendered()]
        mark = unused_mark(texts)
        if mark is None:
            raise invalid("messages", "the chat has every Unicode noncharacter from U+FDD0 to U+FDEF in it")
        text = rendered(self._controls.breaks(mark))
        if self._controls.has_parts(texts):
            more = rendered(self._controls.breaks_parts(mark))
            if self._controls.found_in(more) != self._controls.found_in(text):
                text = more
        return text.split(mark)

    def _normalized_if_control(self, text: str) -> str:
        """The normalized text if it has other control tokens than the text, so that they are found; else the text."""
        normal: str = self._normalizer.normalize_str(text) if self._normalizer is not None else text
        return normal if self._controls.found_in(normal) != self._controls.found_in(text) else text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of a whole sequence."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
        """What one token adds to a text. A special token adds its written form, or nothing with `skip_special_tokens`.
        An unknown token adds nothing."""
        table = self._table if skip_special_tokens else self._full_table
        if table is None:
            return str(self._tokenizer.decode([token_id], skip_special_tokens=skip_special_tokens)).encode()
        pieces = table.pieces
        return pieces[token_id] if token_id < len(pieces) else b""

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True, with_markers: bool = False
    ) -> Detokenizer:
        """A new detokenizer for output that follows `prompt_ids`. `with_markers`: it shows the special tokens that
        show_markers() has named."""
        table = self._full_table
        if skip_special_tokens:
            table = self._marked_table if with_markers else self._table
        if table is not None:
            return TableDetokenizer(table)
        hidden = self._special_ids - self._marked_ids if with_markers and skip_special_tokens else frozenset()
        skips = skip_special_tokens and not with_markers

        def decode(ids: Sequence[int]) -> str:
            shown = [token_id for token_id in ids if token_id not in hidden]
            return str(self._tokenizer.decode(shown, skip_special_tokens=skips))

        return PrefixDetokenizer(decode, prompt_ids[-_CONTEXT_TOKENS:])

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Encoding a batch of one releases the GIL, which `encode` holds for the whole text (0.1 s for 60,000 tokens).
        # It also skips the offsets, which take half of the time.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)
