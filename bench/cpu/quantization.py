"""What int8 weights change on the demo model: perplexity, likeliest tokens and logits, beside float32 and bfloat16.

    python -m bench.cpu.quantization 30   # questions of each of five tasks

Texts that the model was not trained on (demo/corpus.py): questions of each task with their answers. The model reads
each text in one step and predicts each next token, of the question and of the answer.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer

from demo import CHECKPOINT
from demo.corpus import TASKS, held_out
from demo.score import prompt_text
from gpu_worker.attention.torch_backend import TorchAttention
from gpu_worker.build import matmul_for, pack_for
from gpu_worker.kv.pool import allocate_pool
from gpu_worker.models.decoder import Decoder
from gpu_worker.models.loader import load_model
from gpu_worker.models.ops import TorchOps
from gpu_worker.settings import WorkerSettings
from tests.support.attention import metadata_of

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS = 16, 64
Dtype = Literal["float32", "bfloat16"]
Quantization = Literal["none", "int8"]
KINDS: tuple[tuple[Dtype, Quantization], ...] = (
    ("float32", "none"),
    ("bfloat16", "none"),
    ("float32", "int8"),
    ("bfloat16", "int8"),
)


def texts(num_per_task: int) -> list[list[int]]:
    """The tokens of questions with their answers."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    found = []
    for task in TASKS:
        for example in held_out(task, num_per_task, seed=1):
            prompt = tokenizer.encode(prompt_text(tokenizer, example), add_special_tokens=False)
            answer = tokenizer.encode(example.answer, add_special_tokens=False)
            found.append([*prompt, *answer])
    return found


@torch.inference_mode()
def predictions(dtype: Dtype, quantization: Quantization, of: list[list[int]]) -> list[Tensor]:
    """Per text: logits, float32 [tokens - 1, vocabulary], of each token but the first."""
    settings = WorkerSettings(model=str(CHECKPOINT), dtype=dtype, quantization=quantization)
    model = load_model(
        settings.model,
        dtype=dtype,
        device=CPU,
        pack_for=lambda d: pack_for(settings, CPU, d),
        quantized_embedding=quantization != "none",
    )
    config = model.config
    pool = allocate_pool(
        BLOCKS, BLOCK_SIZE, config.num_layers, config.num_kv_heads, config.head_dim, model.dtype, CPU, 0
    )
    attention = TorchAttention(pool, config.windows)
    ops = TorchOps(config, BLOCKS * BLOCK_SIZE, CPU)
    decoder = Decoder(config, model.weights, attention, ops, matmul_for(settings, CPU, model.dtype))
    found = []
    for tokens in of:
        attention.plan(metadata_of(0, [(0, len(tokens))], [list(range(1, BLOCKS + 1))], BLOCK_SIZE))
        hidden = decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)))
        found.append(decoder.logits(hidden[:-1]).float())
    return found


def compare(num_per_task: int) -> dict[str, Any]:
    of = texts(num_per_task)
    targets = torch.tensor([token for tokens in of for token in tokens[1:]])
    logits = {kind: torch.cat(predictions(*kind, of)) for kind in KINDS}
    exact = logits[KINDS[0]]
    rows = []
    for (dtype, quantization), mine in logits.items():
        scores = mine.log_softmax(1)
        # A constant that is added to all logits of a row changes nothing, so it is no error.
        error, size = (x - x.mean(1, keepdim=True) for x in (mine - exact, exact))
        rows.append(
            {
                "type": f"{dtype}+{quantization}" if quantization != "none" else dtype,
                "perplexity": round(math.exp(-scores.gather(1, targets[:, None]).mean().item()), 5),
                "likeliest_token_is_right": round((mine.argmax(1) == targets).float().mean().item(), 5),
                "likeliest_token_as_float32": round((mine.argmax(1) == exact.argmax(1)).float().mean().item(), 5),
                "logit_error": round((error.norm() / size.norm()).item(), 5),
            }
        )
    return {"texts": len(of), "tokens": len(targets), "rows": rows}


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(compare(int(sys.argv[1]) if len(sys.argv) > 1 else 30), sys.stdout, indent=2)
    print()
