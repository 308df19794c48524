"""Make the demo model's tokenizer: byte-level BPE learned from the synthetic corpus.

Every byte is in the base vocabulary, so any UTF-8 text survives encode and decode. A digit is always a token of its
own (with its leading space, if any): numbers are then copied digit by digit and sums have a regular shape.

Merges inside words come first and the merge with a leading space comes last, so ` mirako` and `mirako` split alike
(` mi|ra|ko`, `mi|ra|ko`). A tiny model then only has to learn that ` mi` and `mi` are the same syllable, and can copy
a word to the start of its answer.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from demo import words as w
from demo.chat import BOS, CHAT_TEMPLATE, EOS, SPACE, SPECIAL_TOKENS
from demo.corpus import single_example

CHECKPOINT = Path(__file__).parent / "checkpoint"
VOCAB_SIZE = 1024
WORD_VOCAB_SIZE = 680  # the rest are the same tokens with a space before them
WORDS = r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s"  # what merges are learned from: no spaces inside
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def corpus_text(seed: int, examples: int) -> list[str]:
    """Text to learn merges from: the training mix, and the syllables, so often that the first merges make syllables."""
    rng = random.Random(f"tokenizer {seed}")
    text = []
    for _ in range(examples):
        example = single_example(rng)
        text += [message["content"] for message in example.messages] + [example.answer]
    return text + [" ".join(w.SYLLABLES)] * (2 * examples)


def byte_level(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Split by `pattern`, then write every byte as a printable character (a space becomes `SPACE`)."""
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def learn_word_merges(text: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges that never cross or contain a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level(WORDS)
    trainer = trainers.BpeTrainer(
        vocab_size=WORD_VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def train(seed: int, examples: int) -> Tokenizer:
    text = corpus_text(seed, examples)
    vocab, merges = learn_word_merges(text)
    words_only = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    words_only.pre_tokenizer = byte_level(PIECES)
    after_space: Counter[str] = Counter()
    for encoding in words_only.encode_batch(text, add_special_tokens=False):
        after_space.update(token for space, token in pairwise(encoding.tokens) if space == SPACE and token != SPACE)
    frequent = sorted(after_space, key=lambda token: (-after_space[token], token))
    for token in frequent[: VOCAB_SIZE - len(vocab)]:
        vocab[SPACE + token] = len(vocab)
        merges.append((SPACE, token))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = byte_level(PIECES)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, vocab[BOS])]
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
