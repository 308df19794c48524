"""The benchmark's llama.cpp server computes the same model as transformers: the conversion of the checkpoint is right.

`make peer-test` runs this if llama.cpp's environment stands: `tests/peer/env.sh llama`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from bench.cpu.models import MODELS, VOCAB, write_checkpoint
from bench.cpu.servers import SERVERS, ServerSetup
from bench.peers.peer import ROOT

ENVIRONMENTS = ROOT / ".venv-peers"
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 256, 64

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (ENVIRONMENTS / "llama" / "requirements.stamp").exists(),
        reason="llama.cpp's environment is missing: tests/peer/env.sh llama makes it",
    ),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def setup(checkpoint: Path, dtype: str) -> ServerSetup:
    return ServerSetup(MODELS["llama"], checkpoint, dtype, threads=2, environments=ENVIRONMENTS)


def greedy(url: str, prompt: list[int], output_tokens: int) -> Any:
    fields = {"prompt": prompt, "n_predict": output_tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    return httpx.post(f"{url}/completion", json=fields, timeout=60).raise_for_status().json()["tokens"]


def test_float32_tokens_equal_those_of_transformers(checkpoint: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with SERVERS["llama"].run(setup(checkpoint, "float32")) as server:
        for seed in range(PROMPTS):
            prompt = random.Random(seed).choices(range(8, VOCAB), k=PROMPT_TOKENS)
            with torch.inference_mode():
                expected = model.generate(
                    torch.tensor([prompt]), max_new_tokens=OUTPUT_TOKENS, min_new_tokens=OUTPUT_TOKENS, do_sample=False
                )
            assert greedy(server.url, prompt, OUTPUT_TOKENS) == expected[0, PROMPT_TOKENS:].tolist()


def test_bfloat16_file_holds_the_matrices_in_half_the_bytes(checkpoint: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        with SERVERS["llama"].run(setup(checkpoint, dtype)) as server:
            assert len(greedy(server.url, list(range(8, 264)), 4)) == 4
    full, half = ((checkpoint / f"{dtype}.gguf").stat().st_size for dtype in ("float32", "bfloat16"))
    assert half == pytest.approx(full / 2, rel=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_load_has_the_figures_of_the_client(checkpoint: Path, dtype: str) -> None:
    with SERVERS["llama"].run(setup(checkpoint, dtype)) as server:
        figures = server.load(2, 4)
    assert set(MODELS["llama"].figures) <= set(figures)
    assert figures["tokens"] == 4 * MODELS["llama"].output_tokens
