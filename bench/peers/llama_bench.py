"""llama.cpp's side of bench.cpu.serving: one stream, in this process and without HTTP. Runs in an environment of its
own (tests/peer/env.sh llama). It reads jobs from stdin, and writes results, each as a line of JSON."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from safetensors.numpy import load_file

# What the libraries print goes to stderr.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
TYPES = {"bfloat16": gguf.GGMLQuantizationType.BF16, "float32": gguf.GGMLQuantizationType.F32}
CONTEXT_TOKENS = 2048
ERROR = 4  # GGML_LOG_LEVEL_ERROR


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def log_error(level: int, text: bytes, _: Any) -> None:
    """Without it, llama.cpp logs each tensor of each graph."""
    if level == ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class LlamaBench:
    """The jobs of one process: `start` first."""

    def __init__(self) -> None:
        self.model: Any = None
        self.context: Any = None
        self.sampler: Any = None

    def version(self) -> str:
        return f"llama-cpp-python {llama_cpp.__version__}"

    def features(self) -> str:
        """The processor's instructions that llama.cpp was compiled for."""
        return bytes(llama_cpp.llama_print_system_info()).decode()

    def start(self, checkpoint: str, dtype: str, threads: int, max_num_seqs: int) -> bool:
        """Convert the checkpoint, unless that was done before, and load it. Raises ValueError if the file is bad."""
        path = Path(checkpoint) / f"{dtype}.gguf"
        if not path.exists():
            write_gguf(Path(checkpoint), dtype, path)
        llama_cpp.llama_log_set(log_error, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max = CONTEXT_TOKENS, max_num_seqs
        options.n_threads = options.n_threads_batch = threads
        if dtype == "float32":
            # The KV cache is float16 by default. With flash attention, logits of the bench model differ from those of
            # transformers by up to 5e-3, and without it by 2e-6.
            options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
            options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = self.model and llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise ValueError(f"llama.cpp does not load {path}")
        self.sampler = llama_cpp.llama_sampler_init_greedy()
        return True

    def greedy(self, prompt: list[int], output_tokens: int) -> list[int]:
        """The greedy continuation of the prompt."""
        return list(self._tokens(prompt, output_tokens))

    def load(self, streams: int, requests: int, prompt_tokens: int, output_tokens: int, vocab: int) -> dict[str, float]:
        """The figures of bench.client, for `requests` requests one after another. Raises ValueError for more than one
        stream."""
        if streams != 1:
            raise ValueError(f"{streams} streams: this bench of llama.cpp runs one")
        rng = random.Random(time.time_ns())
        first_s, rest_s = [], []
        began_s = time.perf_counter()
        for _ in range(requests):
            prompt = [rng.randrange(8, vocab) for _ in range(prompt_tokens)]
            start_s = time.perf_counter()
            token_s = [time.perf_counter() for _ in self._tokens(prompt, output_tokens)]
            first_s.append(token_s[0] - start_s)
            rest_s.append((token_s[-1] - token_s[0]) / (output_tokens - 1))
        return {
            "tokens_per_s": requests * output_tokens / (time.perf_counter() - began_s),
            "ttft_p50_ms": 1000 * statistics.median(first_s),
            "tpot_p50_ms": 1000 * statistics.median(rest_s),
        }

    def _tokens(self, prompt: list[int], output_tokens: int) -> Iterator[int]:
        """Yields each token as soon as it is sampled. Raises ValueError if llama.cpp cannot compute a step."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        step = prompt
        for _ in range(output_tokens):
            tokens = (llama_cpp.llama_token * len(step))(*step)
            status = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(tokens, len(step)))
            if status:
                raise ValueError(f"llama_decode returns {status}")
            token = int(llama_cpp.llama_sampler_sample(self.sampler, self.context, -1))
            yield token
            step = [token]


def write_gguf(checkpoint: Path, dtype: str, path: Path) -> None:
    """Writes a Llama checkpoint of Hugging Face as GGUF. Matrices have the type `dtype`, and norms are float32. The
    file has no tokenizer, because prompts are token ids."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    num_layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    writer.add_block_count(num_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, num_layers)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        array = tensor.astype(np.float32)
        if name.endswith("q_proj.weight"):
            array = interleaved(array, heads)
        if name.endswith("k_proj.weight"):
            array = interleaved(array, kv_heads)
        kind = TYPES[dtype] if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        found = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(found, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rope_theta(config: dict[str, Any]) -> float:
    """The base of the rotary positions. Transformers 5 writes it into `rope_parameters`."""
    parameters = config.get("rope_parameters") or config
    return float(parameters["rope_theta"])


def interleaved(matrix: Any, heads: int) -> Any:
    """The rows [heads * size, in] of a query or key matrix in the order of GGUF. Hugging Face rotates row i of a head
    with row i + size / 2, and llama.cpp rotates rows 2 i and 2 i + 1."""
    halves = matrix.reshape(heads, 2, -1, matrix.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(matrix.shape)


def main() -> None:
    bench = LlamaBench()
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(getattr(bench, job.pop("what"))(**job)), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
