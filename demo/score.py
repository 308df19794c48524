"""Score the demo checkpoint on held-out prompts, greedy, exact match: exits non-zero when a task is below the bar.

`python -m demo.score` asks 300 prompts a task; with `--n 20` it is a quick look.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from demo.corpus import TASKS, Example, held_out
from demo.train_tokenizer import CHECKPOINT

BARS = {"repeat": 0.95, "lookup": 0.95, "add": 0.95, "tool": 0.9, "result": 0.95}
BATCH_PROMPTS = 32
MAX_NEW_TOKENS = 120


@dataclass(frozen=True)
class Answered:
    """What the model said, and the tokens from the end of the fact to the end of the prompt (0: no look-up)."""

    example: Example
    said: str
    distance_tokens: int

    @property
    def right(self) -> bool:
        return self.said == self.example.answer


def prompt_text(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    return str(
        tokenizer.apply_chat_template(
            list(example.messages), tools=list(example.tools) or None, tokenize=False, add_generation_prompt=True
        )
    )


def fact_distance(tokenizer: PreTrainedTokenizerBase, example: Example) -> int:
    """Look-up only: tokens from the end of the fact to the end of the prompt."""
    if example.task != "lookup":
        return 0
    prompt = prompt_text(tokenizer, example)
    after = prompt[prompt.index(example.answer) + len(example.answer) :]
    return len(tokenizer.encode(after, add_special_tokens=False))


def answer_all(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, examples: list[Example]
) -> Iterator[Answered]:
    """Greedy answers. A batch has prompts of one length, so that no padding can change an answer."""
    prompts: dict[int, list[tuple[Example, list[int]]]] = {}
    for example in examples:
        prompt_ids = tokenizer.encode(prompt_text(tokenizer, example), add_special_tokens=False)
        prompts.setdefault(len(prompt_ids), []).append((example, prompt_ids))
    for length, group in sorted(prompts.items()):
        for start in range(0, len(group), BATCH_PROMPTS):
            rows = group[start : start + BATCH_PROMPTS]
            ids = torch.tensor([row_ids for _, row_ids in rows])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_NEW_TOKENS
            )
            for (example, _), row in zip(rows, out[:, length:], strict=True):
                said = str(tokenizer.decode(row, skip_special_tokens=True))
                yield Answered(example, said, fact_distance(tokenizer, example))


def table_rows(answered: list[Answered]) -> Iterator[tuple[str, list[Answered]]]:
    """The rows of the table: one a task, and look-up again by distance."""
    for task in TASKS:
        yield task, [a for a in answered if a.example.task == task]
    for low, high in ((0, 50), (50, 100), (100, 150), (150, 200), (200, 1000)):
        name = f"  lookup, {low}-{high} tokens back" if high < 1000 else f"  lookup, over {low} tokens back"
        yield name, [a for a in answered if a.example.task == "lookup" and low <= a.distance_tokens < high]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--n", type=int, default=300, help="prompts a task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--show-errors", type=int, default=0, help="print this many wrong answers a task")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    model = LlamaForCausalLM.from_pretrained(options.checkpoint, dtype=getattr(torch, options.dtype))
    model.train(False)
    examples = [example for task in TASKS for example in held_out(task, options.n, options.seed)]
    with torch.inference_mode():
        answered = list(answer_all(model, tokenizer, examples))
    passed = True
    print(f"{'held-out task':32} {'right':>6} {'of':>6} {'exact':>8}")
    for name, rows in table_rows(answered):
        right = sum(row.right for row in rows)
        share = right / len(rows) if rows else 1.0
        if name in TASKS:
            passed = passed and share >= BARS[name]
        print(f"{name:32} {right:6d} {len(rows):6d} {share:8.1%}")
    for task in TASKS:
        wrong = [row for row in answered if row.example.task == task and not row.right]
        for row in wrong[: options.show_errors]:
            asked = row.example.messages[-1]["content"][-90:]
            print(f"{task}: {asked!r} -> {row.said!r}, not {row.example.answer!r}")
    print(
        f"{'PASS' if passed else 'FAIL'}: the bar is 95 % a task, for calls of tools 90 % "
        "(distance: end of the fact to end of the prompt)"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
