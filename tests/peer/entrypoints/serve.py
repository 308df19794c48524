"""Runs Paceline for `vllm serve MODEL ...`, as vLLM's tests call it. An argument that Paceline lacks is an error."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.ports import free_port

# No answer depends on these arguments: they set speed, memory, or the time at which something is compiled.
WITHOUT_EFFECT = {
    "--attention-backend": True,
    "--enable-chunked-prefill": False,
    "--enforce-eager": False,
    "--gpu-memory-utilization": True,
    "--max-num-batched-tokens": True,
    "--max-num-seqs": True,
    "--no-async-scheduling": False,
    "--no-enable-prefix-caching": False,
    "--seed": True,
    "--show-hidden-metrics-for-version": True,
    "--structured-outputs-config.backend": True,
}
# What these arguments turn on is always on here.
ALWAYS_ON = {
    "--enable-auto-tool-choice": False,
    "--enable-prompt-tokens-details": False,
    "--enable-request-id-headers": False,
    "--enable-server-load-tracking": False,
    "--trust-remote-code": False,
}
# Not served. The server starts all the same, because most tests of their modules use other features.
NOT_SERVED = {
    "--enable-lora": False,
    "--lora-modules": True,
    "--max-cpu-loras": True,
    "--lora-module": True,
    "--max-logprobs": True,  # Paceline's limit is fixed
    "--skip-tokenizer-init": False,  # a gateway has no tokenizer only if the checkpoint has none
    "--max-lora-rank": True,
    "--enable-prompt-embeds": False,
    "--reasoning-config": True,
}


def command(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command of Paceline, and its environment. SystemExit at an argument that it lacks."""
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    parser.add_argument("serve", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--port", required=True)
    parser.add_argument("--served-model-name", default="")
    parser.add_argument("--max-model-len", default="")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "half", "float32"], default="auto")
    parser.add_argument("--root-path", default="")
    parser.add_argument("--api-key", default=environment.get("VLLM_API_KEY", ""))
    parser.add_argument("--chat-template", default="")
    parser.add_argument("--tool-call-parser", choices=["hermes", "llama3_json", "mistral"], default="none")
    parser.add_argument("--reasoning-parser", choices=["qwen3", "deepseek_r1"], default="none")
    parser.add_argument("--enable-force-include-usage", action="store_true")
    parser.add_argument("--enable-tokenizer-info-endpoint", action="store_true")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    parser.add_argument("--return-tokens-as-token-ids", action="store_true")
    for name, has_value in {**WITHOUT_EFFECT, **ALWAYS_ON, **NOT_SERVED}.items():
        parser.add_argument(name, action="store" if has_value else "store_true")
    # vLLM also accepts _ instead of - in names.
    given = [word.replace("_", "-") if word.startswith("--") else word for word in arguments]
    asked = parser.parse_args(given)
    flags = {
        "--port": asked.port,
        "--grpc-port": free_port(),
        "--scheduler-port": free_port(),
        "--cache-port": free_port(),
        "--metrics-port": 0,
        "--model": asked.model,
        "--served-model-name": asked.served_model_name or asked.model,
        "--load-format": asked.load_format,
        "--threads": 1,
    }
    if asked.max_model_len:
        flags["--max-model-len"] = asked.max_model_len
    if asked.dtype != "auto":
        flags["--dtype"] = "float16" if asked.dtype == "half" else asked.dtype
    settings = {
        "PACELINE_GATEWAY_TOOL_CALL_PARSER": asked.tool_call_parser,
        "PACELINE_GATEWAY_REASONING_PARSER": asked.reasoning_parser,
        "PACELINE_GATEWAY_CHAT_TEMPLATE": asked.chat_template,
        "PACELINE_GATEWAY_ROOT_PATH": asked.root_path,
        "PACELINE_GATEWAY_FORCE_INCLUDE_USAGE": "true" if asked.enable_force_include_usage else "",
        "PACELINE_GATEWAY_RETURN_TOKENS_AS_TOKEN_IDS": "true" if asked.return_tokens_as_token_ids else "",
        "PACELINE_GATEWAY_ENABLE_TOKENIZER_INFO": "true" if asked.enable_tokenizer_info_endpoint else "",
        "PACELINE_API_KEYS": asked.api_key,
    }
    store = Path(tempfile.mkdtemp(prefix="paceline-entrypoints-")) / "responses.db"
    chosen = {"PACELINE_GATEWAY_RESPONSE_STORE": f"sqlite:///{store}", **{k: v for k, v in settings.items() if v}}
    words = [str(word) for pair in flags.items() for word in pair]
    return [sys.executable, "-m", "services.cli", "up", *words], {**environment, **chosen}


def main() -> None:
    """Become `paceline up`."""
    arguments, environment = command(sys.argv[1:], os.environ)
    os.execve(arguments[0], arguments, environment)


if __name__ == "__main__":
    main()
