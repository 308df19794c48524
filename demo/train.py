"""Train the demo model on one CPU thread: `python -m demo.train --seed 0`, then `python -m demo.train --tools`.

The first stage begins with random weights. The second stage continues from the weights of the first stage, with tool
use among the examples.

Everything follows from the seed: the examples, their order and the initial weights. The same seed on the same torch
build and processor gives the same file. Elsewhere floating point differs a little; `demo.score` rates the result.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from demo.chat import BOS, END, EOS, SPACE, Encoded, encode, token_id
from demo.corpus import training_example
from demo.train_tokenizer import CHECKPOINT

ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class Plan:
    """The length of a training run, the size of its batches and its learning rate."""

    seed: int = 0
    steps: int = 6_000
    batch_tokens: int = 2_048
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    pool_examples: int = 256  # generated together and sorted by length, so that batches have little padding
    tools: bool = False  # the second stage


STAGES = {False: Plan(), True: Plan(steps=3_500, tools=True)}


@dataclass(frozen=True)
class TrainingBatch:
    """ids: int64 [rows, tokens]. weights: float32 [rows, tokens], of each token in the loss; 0 for padding."""

    ids: torch.Tensor
    weights: torch.Tensor


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """A Llama with head_dim 64 (what GPU attention kernels are built for) and grouped queries.

    `initializer_range` is three times the usual 0.02. At this width attention then learns to copy several times faster.
    """
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.06,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=token_id(tokenizer, BOS),
        eos_token_id=[token_id(tokenizer, END), token_id(tokenizer, EOS)],
        pad_token_id=token_id(tokenizer, EOS),
    )


def new_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Random weights, but ` word` starts near `word`: so the model need not learn which tokens are the same word."""
    model = LlamaForCausalLM(model_config(tokenizer))
    vocab = tokenizer.get_vocab()
    table = model.model.embed_tokens.weight
    with torch.no_grad():
        space = torch.randn(table.shape[1]) * table.std()
        for token, index in sorted(vocab.items()):
            if token.startswith(SPACE) and token[1:] in vocab:
                table[index] = table[vocab[token[1:]]] + space + 0.5 * table[index]
    return model


def pad(rows: list[Encoded], pad_id: int) -> TrainingBatch:
    """Padding goes to the right, where causal attention never sees it."""
    width = max(len(row.ids) for row in rows)
    ids = [row.ids + [pad_id] * (width - len(row.ids)) for row in rows]
    weights = [row.weights + [0.0] * (width - len(row.weights)) for row in rows]
    return TrainingBatch(torch.tensor(ids), torch.tensor(weights))


def curriculum_cap(step: int, steps: int) -> float:
    """The highest level of the examples at this step. On short text the model learns to copy sooner. The last levels
    are above 1, the level that demo.score rates."""
    return 0.25 + min(1.0, max(0.0, (step / steps - 0.05) / 0.45))


def batches(tokenizer: Tokenizer, plan: Plan) -> Iterator[TrainingBatch]:
    """`plan.steps` batches of about `plan.batch_tokens` tokens, each of examples of similar length."""
    rng = random.Random(f"{'tools' if plan.tools else 'train'} {plan.seed}")
    pad_id = token_id(tokenizer, EOS)
    step = 0
    while True:
        cap = curriculum_cap(plan.steps if plan.tools else step, plan.steps)
        pool = [
            encode(tokenizer, training_example(rng, cap * rng.random(), plan.tools)) for _ in range(plan.pool_examples)
        ]
        pool.sort(key=lambda row: len(row.ids))
        groups: list[list[Encoded]] = [[]]
        for row in pool:
            if groups[-1] and (len(groups[-1]) + 1) * len(row.ids) > plan.batch_tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for rows in groups:
            if step == plan.steps:
                return
            step += 1
            yield pad(rows, pad_id)


def loss_of(model: LlamaForCausalLM, batch: TrainingBatch) -> torch.Tensor:
    """Weighted mean cross-entropy. Logits are computed only for tokens with a weight above 0."""
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1]
    weights = batch.weights[:, 1:]
    counted = weights > 0
    logits = model.lm_head(hidden[counted])
    losses = functional.cross_entropy(logits, batch.ids[:, 1:][counted], reduction="none")
    return (losses * weights[counted]).sum() / weights.sum()


def learning_rate(step: int, plan: Plan) -> float:
    """Linear warm-up to `plan.learning_rate`, then a cosine down to a hundredth of it."""
    if step < plan.warmup_steps:
        return plan.learning_rate * (step + 1) / plan.warmup_steps
    done = (step - plan.warmup_steps) / max(1, plan.steps - plan.warmup_steps)
    return plan.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights and configuration; `rope_theta` also at the top level, where most readers of config.json look."""
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = ROPE_THETA
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def train(plan: Plan, folder: Path, log_every: int = 50, save_every: int = 500) -> None:
    """Train the model and write it to the folder: every `save_every` steps, and at the end."""
    torch.manual_seed(plan.seed)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32) if plan.tools else new_model(tokenizer)
    model.train(True)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.98))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {plan}", flush=True)
    started, tokens, running = time.perf_counter(), 0, 0.0
    for step, batch in enumerate(batches(tokenizer, plan), start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, plan)
        loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += batch.ids.numel()
        running += loss.item() / log_every
        if step % log_every == 0:
            wall, cpu = time.perf_counter() - started, time.process_time()
            print(f"step {step} loss {running:.4f} tokens {tokens:,} wall {wall:.0f} s cpu {cpu:.0f} s", flush=True)
            running = 0.0
        if step % save_every == 0:
            save(model, folder)
    save(model, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder that already has the tokenizer")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--steps", type=int, help="default: 6,000, with --tools 3,500")
    parser.add_argument("--tools", action="store_true", help="the second stage: go on from the weights in the folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    plan = STAGES[options.tools]
    train(replace(plan, seed=options.seed, steps=options.steps or plan.steps), options.out)


if __name__ == "__main__":
    main()
