"""How a conversation becomes tokens: the special tokens, the chat template and the encoding of training examples."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from demo.corpus import Example

BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
SPECIAL_TOKENS = [BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", END]
SPACE = "\u0120"  # how byte-level BPE writes a space
STORY_WEIGHT = 0.2  # many tokens of a story have no single right value: they must not outweigh the few that have one

# The model sees only the name of a function and the names of its parameters.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content | trim -}}
    {%- else -%}
        {%- for part in content or [] if part['type'] == 'text' -%}
            {{- part['text'] | trim -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set later = messages -%}
{%- if tools -%}
    {{- '<|system|>' -}}
    {%- if messages and messages[0]['role'] == 'system' -%}
        {{- text(messages[0]['content']) + ' ' -}}
        {%- set later = messages[1:] -%}
    {%- endif -%}
    {{- 'Tools:' -}}
    {%- for tool in tools -%}
        {%- set parameters = (tool['function']['parameters'] or {})['properties'] or {} -%}
        {{- ' ' + tool['function']['name'] + '(' + (parameters | join(', ')) + ')' -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
{%- endif -%}
{%- for message in later -%}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
        {{- raise_exception('The demo model knows the roles system, user, assistant and tool only.') -}}
    {%- endif -%}
    {%- if message['role'] == 'tool' -%}
        {{- '<|user|><tool_response>' + text(message['content']) + '</tool_response>' -}}
    {%- else -%}
        {{- '<|' + message['role'] + '|>' + text(message['content']) -}}
        {%- for call in message['tool_calls'] or [] -%}
            {%- if message['content'] or not loop.first -%}
                {{- '\n' -}}
            {%- endif -%}
            {{- '<tool_call>{"name": "' + call['function']['name'] + '", "arguments": ' -}}
            {%- if call['function']['arguments'] is string -%}
                {{- call['function']['arguments'] -}}
            {%- else -%}
                {{- call['function']['arguments'] | tojson -}}
            {%- endif -%}
            {{- '}</tool_call>' -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def turns(example: Example) -> list[tuple[str, str]]:
    """The chat as the template writes it: the role token's name and the text of each turn."""
    found = [(message["role"], message["content"]) for message in example.messages]
    if example.tools:
        shown = "Tools:"
        for tool in example.tools:
            function = tool["function"]
            shown += f" {function['name']}({', '.join(function['parameters']['properties'])})"
        if found[0][0] == "system":
            shown = f"{found.pop(0)[1]} {shown}"
        found.insert(0, ("system", shown))
    return [
        ("user", f"<tool_response>{text}</tool_response>") if role == "tool" else (role, text) for role, text in found
    ]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(f"the tokenizer has no token {token!r}")
    return found


@dataclass(frozen=True)
class Encoded:
    """Token ids, and for each the weight of its prediction in the loss."""

    ids: list[int]
    weights: list[float]

    def add(self, ids: list[int], weight: float) -> None:
        self.ids.extend(ids)
        self.weights.extend([weight] * len(ids))


def encode(tokenizer: Tokenizer, example: Example) -> Encoded:
    """The chat template by hand (special tokens split the text, so each turn is encoded alone). In the loss, the answer
    counts, and with `graded_turns` also the earlier turns of the assistant."""

    def text_ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def special(token: str) -> int:
        return token_id(tokenizer, token)

    encoded = Encoded([special(BOS)], [0.0])
    for role, text in turns(example):
        graded = example.graded_turns and role == "assistant"
        encoded.add([special(f"<|{role}|>")], 0.0)
        encoded.add([*text_ids(text), special(END)], float(graded))
    if example.messages:
        encoded.add([special("<|assistant|>")], 0.0)
    weight = STORY_WEIGHT if example.task in ("story", "continue", "tell") else 1.0
    encoded.add([*text_ids(example.answer), special(END if example.messages else EOS)], weight)
    return encoded
