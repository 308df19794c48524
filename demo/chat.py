"""How a conversation becomes tokens: the special tokens, the chat template and the encoding of training examples."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from demo.corpus import Example

BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
SPECIAL_TOKENS = [BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", END]
SPACE = "\u0120"  # how byte-level BPE writes a space
STORY_WEIGHT = 0.2  # a story has many tokens with no right answer: they must not drown the few that have one

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('The demo model knows the roles system, user and assistant only.') -}}
    {%- endif -%}
    {{- '<|' + message['role'] + '|>' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] | trim -}}
    {%- else -%}
        {%- for part in message['content'] if part['type'] == 'text' -%}
            {{- part['text'] | trim -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(f"the tokenizer has no token {token!r}")
    return found


@dataclass(frozen=True)
class Encoded:
    """Token ids and, for each, how much predicting it counts."""

    ids: list[int]
    weights: list[float]

    def add(self, ids: list[int], weight: float) -> None:
        self.ids.extend(ids)
        self.weights.extend([weight] * len(ids))


def encode(tokenizer: Tokenizer, example: Example) -> Encoded:
    """The chat template by hand (special tokens split the text, so each turn is encoded alone). Only answers count."""

    def text_ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def special(token: str) -> int:
        return token_id(tokenizer, token)

    encoded = Encoded([special(BOS)], [0.0])
    for message in example.messages:
        graded = example.graded_turns and message["role"] == "assistant"
        encoded.add([special(f"<|{message['role']}|>")], 0.0)
        encoded.add([*text_ids(message["content"]), special(END)], float(graded))
    if example.messages:
        encoded.add([special("<|assistant|>")], 0.0)
    weight = STORY_WEIGHT if example.task in ("story", "continue", "tell") else 1.0
    encoded.add([*text_ids(example.answer), special(END if example.messages else EOS)], weight)
    return encoded
