"""The models that bench.cpu.serving measures, with their load and their checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo import CHECKPOINT

VOCAB = 32_000
QWEN_VOCAB = 151_936
# 32 sequences of this length need more than 1 GiB of KV memory, so that both servers take 1 GiB.
QWEN_TOKENS = 4096
FIGURES = {"tokens_per_s": "output_tokens_per_s", "ttft_p50_ms": "ttft_ms_p50", "tpot_p50_ms": "tpot_ms_p50"}


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model, its load, and the servers that are measured with it. `dtypes`: a list of rows for each. `requests`:
    number of concurrent streams: number of requests. `peers`: names of bench.cpu.servers.SERVERS. `rows`: name of its
    list in the report. `figures`: the name of each measurement, and its field in a row."""

    title: str
    rows: str
    write: Callable[[Path], Path]
    dtypes: Sequence[str]
    prompt_tokens: int
    output_tokens: int
    vocab: int
    requests: Mapping[int, int]
    peers: Sequence[str]
    figures: Mapping[str, str]
    max_num_seqs: int
    max_model_len: int = 2048
    # Random weights from config.json alone.
    dummy: bool = False
    # If the peers are faster with fewer threads than cores.
    peer_threads: int | None = None


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer with a word per token."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", unk_token="w0").save_pretrained(
        folder
    )


def write_checkpoint(folder: Path) -> Path:
    """A Llama of 56 M parameters with random weights, and a tokenizer."""
    import torch
    import transformers

    write_tokenizer(folder, VOCAB)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_qwen(folder: Path) -> Path:
    """The config.json of a model with the shapes of Qwen2.5-0.5B, and a tokenizer; no weights."""
    import transformers

    write_tokenizer(folder, QWEN_VOCAB)
    config = transformers.Qwen2Config(
        vocab_size=QWEN_VOCAB,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=QWEN_TOKENS,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(folder)
    return folder


MODELS = {
    "llama": BenchModel(
        title="Llama of 56 M parameters",
        rows="rows",
        write=write_checkpoint,
        dtypes=("bfloat16", "float32"),
        prompt_tokens=256,
        output_tokens=64,
        vocab=VOCAB,
        requests={1: 6, 8: 32, 32: 96},
        peers=("vllm", "openvino", "llama"),
        figures=FIGURES,
        max_num_seqs=32,
    ),
    "demo": BenchModel(
        title="demo model",
        rows="demo_rows",
        write=lambda _: CHECKPOINT,
        dtypes=("float32",),
        prompt_tokens=64,
        output_tokens=64,
        vocab=1024,
        requests={1: 16, 32: 192, 128: 512},
        peers=("vllm",),
        figures=FIGURES,
        max_num_seqs=128,
        peer_threads=1,
    ),
    "qwen": BenchModel(
        title="Qwen2.5 of 0.5 B parameters, dummy weights",
        rows="qwen_rows",
        write=write_qwen,
        dtypes=("bfloat16",),
        prompt_tokens=256,
        output_tokens=64,
        vocab=QWEN_VOCAB,
        requests={1: 4, 8: 16},
        peers=("vllm",),
        figures=FIGURES | {"peak_memory_mib": "peak_memory_mib"},
        max_num_seqs=32,
        max_model_len=QWEN_TOKENS,
        dummy=True,
    ),
}
