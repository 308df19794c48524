"""The bench of llama.cpp computes the same model as transformers: its conversion of the checkpoint is right.

`make peer-test` runs this if llama.cpp's environment stands: `tests/peer/env.sh llama`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bench.cpu.models import VOCAB, write_checkpoint
from bench.peers.peer import ROOT, Peer

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


@pytest.fixture
def llama() -> Iterator[Peer]:
    peer = Peer("llama", ENVIRONMENTS)
    yield peer
    peer.close()


def start(llama: Peer, checkpoint: Path, dtype: str) -> None:
    job = {"checkpoint": str(checkpoint), "dtype": dtype, "threads": 2, "max_num_seqs": 1}
    assert llama.ask({"what": "start", **job}), llama.absent


def greedy(llama: Peer, prompt: list[int], output_tokens: int) -> Any:
    return llama.ask({"what": "greedy", "prompt": prompt, "output_tokens": output_tokens})


def test_float32_tokens_equal_those_of_transformers(llama: Peer, checkpoint: Path) -> None:
    start(llama, checkpoint, "float32")
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for seed in range(PROMPTS):
        prompt = random.Random(seed).choices(range(8, VOCAB), k=PROMPT_TOKENS)
        with torch.inference_mode():
            expected = model.generate(
                torch.tensor([prompt]), max_new_tokens=OUTPUT_TOKENS, min_new_tokens=OUTPUT_TOKENS, do_sample=False
            )
        assert greedy(llama, prompt, OUTPUT_TOKENS) == expected[0, PROMPT_TOKENS:].tolist()


def test_bfloat16_file_holds_the_matrices_in_half_the_bytes(llama: Peer, checkpoint: Path) -> None:
    start(llama, checkpoint, "float32")
    start(llama, checkpoint, "bfloat16")
    full, half = ((checkpoint / f"{dtype}.gguf").stat().st_size for dtype in ("float32", "bfloat16"))
    assert half == pytest.approx(full / 2, rel=0.01)
    assert len(greedy(llama, list(range(8, 264)), 4)) == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_load_of_one_stream_has_the_figures_of_the_client(llama: Peer, checkpoint: Path, dtype: str) -> None:
    start(llama, checkpoint, dtype)
    size = {"prompt_tokens": 32, "output_tokens": 8, "vocab": VOCAB}
    figures = llama.ask({"what": "load", "streams": 1, "requests": 2, **size})
    assert set(figures) == {"tokens_per_s", "ttft_p50_ms", "tpot_p50_ms"}
    assert all(value > 0 for value in figures.values())
