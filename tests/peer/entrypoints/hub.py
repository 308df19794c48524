"""A cache of the Hugging Face hub in which each model that vLLM's tests name is the demo model.

So vLLM's tests, its server and Paceline find `Qwen/Qwen3-0.6B` without a network, and have the same weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from demo import CHECKPOINT

MODELS = (
    "HuggingFaceH4/zephyr-7b-beta",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "facebook/opt-125m",
    "gpt2",
    "hmellor/tiny-random-LlamaForCausalLM",
    "openai-community/gpt2",
    "unsloth/llama-3.2-1b-Instruct",
)
ADAPTERS = (
    "Jackmin108/Qwen3-0.6B-Meow-LoRA",
    "Jackmin108/Qwen3-0.6B-Woof-LoRA",
    "charent/self_cognition_Alice",
    "jekunz/smollm-135m-lora-fineweb-faroese",
    "peft-internal-testing/opt-125m-dummy-lora",
    "typeof/zephyr-7b-beta-lora",
)
# The tests ask for contexts of up to 32,768 tokens. The demo model's own limit is 2,048.
CONTEXT_TOKENS = 32768
RANK = 8
# The demo model's own template refuses tools and the roles `tool` and `developer`, which the tests use.
CHAT_TEMPLATE = """{{- bos_token -}}
{%- if tools -%}
    {{- '<|system|>Call a tool as <tool_call>{"name": ..., "arguments": ...}</tool_call>. Tools: ' -}}
    {%- for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}
    {{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|' + (message['role'] if message['role'] in ['system', 'assistant'] else 'user') + '|>' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] | trim -}}
    {%- elif message['content'] -%}
        {%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] | trim -}}{%- endfor -%}
    {%- endif -%}
    {%- if not (loop.last and continue_final_message) -%}{{- '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def fill(hub: Path) -> None:
    """Write the cache anew to the folder `hub` (`HF_HUB_CACHE`)."""
    shutil.rmtree(hub, ignore_errors=True)
    for name in MODELS:
        write_model(_snapshot(hub, name))
    for name in ADAPTERS:
        write_adapter(_snapshot(hub, name))


def write_model(folder: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json", "generation_config.json"):
        (folder / name).symlink_to(CHECKPOINT / name)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
    tokenizer = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    changed = {"model_max_length": CONTEXT_TOKENS, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | changed))


def write_adapter(folder: Path) -> None:
    """A LoRA adapter of the demo model with small random weights."""
    config = json.loads((CHECKPOINT / "config.json").read_text())
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    hidden, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * 0.02
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(heads * head_dim, RANK, generator=generator) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "demo",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))


def _snapshot(hub: Path, name: str) -> Path:
    """The empty folder of the one revision of this repository."""
    repository = hub / f"models--{name.replace('/', '--')}"
    revision = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    folder = repository / "snapshots" / revision
    folder.mkdir(parents=True)
    return folder
