"""The runner on a CUDA device: it runs, and twice the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gpu_worker.build import build_worker
from gpu_worker.settings import WorkerSettings
from tests.support.kv_swaps import check_swaps
from tests.unit.worker.driver import Driver

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.mark.gpu
def test_runs_and_is_reproducible(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    outputs = []
    for _ in range(2):
        settings = WorkerSettings(
            model=str(tmp_path), load_format="dummy", dtype="float32", device="cuda", num_blocks=200, max_num_seqs=8
        )
        driver = Driver(build_worker(settings).runner, chunk_tokens=10)
        sequences = [driver.add(list(range(n)), 10) for n in (1, 17, 40)]
        driver.run()
        outputs.append([s.output for s in sequences])
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
def test_swapped_blocks_come_back() -> None:
    for _ in range(20):  # copies that do not wait for one another would lose a race sooner or later
        check_swaps(torch.device("cuda"))
