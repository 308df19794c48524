"""Make the demo model's tokenizer: byte-level BPE learned from the synthetic corpus.

Every byte is in the base vocabulary, so any UTF-8 text survives encode and decode. A digit is always a token of its
own (with its leading space, if any): numbers are then copied digit by digit and sums have a regular shape.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from demo import words as w
from demo.corpus import training_example

CHECKPOINT = Path(__file__).parent / "checkpoint"
VOCAB_SIZE = 1024
BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
SPECIAL_TOKENS = [BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", END]
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

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


def corpus_text(seed: int, examples: int) -> list[str]:
    """Text to learn merges from: the training mix, plus each listed word with and without a space before it."""
    rng = random.Random(f"tokenizer {seed}")
    text = []
    for _ in range(examples):
        example = training_example(rng)
        text += [message["content"] for message in example.messages] + [example.answer]
    for word in (*w.NAMES, *w.ANIMALS, *w.OBJECTS, *w.COLORS, *w.ADJECTIVES, *w.PLACES, *w.FOODS, *w.SYLLABLES):
        text += [f"{word} {word}"] * (examples // 100)
    return text


def train(seed: int, examples: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus_text(seed, examples), trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[bos]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that transformers' AutoTokenizer (and any server that follows it) reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=20_000)
    options = parser.parse_args()
    tokenizer = train(options.seed, options.examples)
    save(tokenizer, options.out)
    print(f"{tokenizer.get_vocab_size()} tokens -> {options.out}")


if __name__ == "__main__":
    main()
