"""Why a test that passes on vLLM does not pass on Paceline: patterns of test ids, each with its reason.

In a pattern < and > stand for the brackets of an id.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_LORA = "LoRA adapters are not served."
_EMBEDS = "Embeddings as a prompt (`prompt_embeds`) are not served."
_ALL_LOGPROBS = "At most 20 log probabilities per token are served; the test asks for all (`--max-logprobs 151936`)."
_NO_THINKING = (
    "The demo model writes no `<think>`. For `qwen3`, vLLM treats an answer without tags as reasoning. Paceline treats "
    "it as content, unless the prompt ends with `<think>`."
)
REASONS: dict[str, str] = {
    "openai/chat_completion/test_batched_chat_completions.py::*": (
        "vLLM's `/v1/chat/completions/batch`, several chats in one body, is not served."
    ),
    "*<zephyr-lora>": _LORA,
    "openai/models/test_models.py::test_check_models": _LORA,
    "openai/chat_completion/test_chat_completion_with_prompt_embeds.py::test_[!im]*": _EMBEDS,
    "openai/chat_completion/test_chat_completion_with_prompt_embeds.py::test_multi*": _EMBEDS,
    "openai/completion/test_completion_with_prompt_embeds.py::test_prompt_logprobs_*": _EMBEDS,
    "openai/completion/test_completion_with_prompt_embeds.py::test_completions_with_*": _EMBEDS,
    "openai/completion/test_prompt_validation.py::test_empty_prompt": (
        "The 400 says what a `prompt` is. vLLM's words, which the test wants, offer `prompt_embeds` instead."
    ),
    "openai/chat_completion/test_chat.py::test_custom_role": (
        "Only OpenAI's roles are served: many chat templates make a control token of the role, so any other text there "
        "could forge one."
    ),
    "openai/chat_completion/test_chat.py::test_chat_completion_n_parameter_non_streaming*": (
        "The demo model is nearly sure of its answer to this question: the three samples of the test's seed are alike "
        "here, and differ on vLLM, which draws other random numbers."
    ),
    "openai/chat_completion/test_chat.py::test_long_seed": (
        "Seeds up to 2^64 - 1 are served, as by TGI; vLLM's end at 2^63 - 1. The 400 beyond 64 bits names the field "
        "and the limit."
    ),
    "openai/chat_completion/test_chat.py::test_invocations": "SageMaker's `/invocations` is not served.",
    "*::test_kv_transfer_prompt_token_ids_*": "`kv_transfer_params` (prefill on another server) is not served.",
    "openai/chat_completion/test_chat_echo.py::test_prompt_logprobs": _ALL_LOGPROBS,
    "openai/chat_completion/test_chat_echo.py::test_top_logprobs": _ALL_LOGPROBS,
    "openai/chat_completion/test_include_reasoning.py::test_reasoning_tokens_in_usage": _NO_THINKING,
    "openai/chat_completion/test_include_reasoning.py::test_default_includes_reasoning": _NO_THINKING,
    "openai/chat_completion/test_thinking_token_budget.py::test_thinking_*": "`thinking_token_budget` is not served.",
    "serve/tokenize/test_tokenization.py::test_tokenize_chat*": (
        "`add_special_tokens: true` is refused for a chat: its template writes them, and vLLM adds them twice."
    ),
    "serve/instrumentator/test_basic.py::test_show_version": "`/version` says Paceline's version, not vLLM's.",
    "serve/instrumentator/test_uds.py::test_show_version": (
        "The gateway listens on TCP, not on a Unix socket (`--uds`); and the test wants vLLM's version."
    ),
    "openai/chat_completion/test_root_path.py::*": "An API key has at least 16 characters; the test's has 7.",
}


def reason(test: str) -> str:
    """Empty if the test has to pass."""
    escaped = test.replace("[", "<").replace("]", ">")  # fnmatch reads brackets as sets
    return next((why for pattern, why in REASONS.items() if fnmatchcase(escaped, pattern)), "")
