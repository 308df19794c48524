"""The requests of each workload, and how to recognise the moment for the fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.support.asking import BATCHES, GRPC, RESPONSES, Answer, Question
from tests.support.asking import MESSAGES as PATH_OF_MESSAGES
from tests.support.stack import Stack

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
VOCAB = 1000
WORKERS = ("worker-1", "worker-2")
GATEWAYS = ("gateway", "gateway-2")
# Small enough for queues, chunks and swaps with few requests: 16 run at once, and 4,096 tokens have room.
WORKER_FLAGS = [
    *("--threads", "1", "--block-size", "16", "--num-blocks", "128", "--num-host-blocks", "256"),
    *("--max-num-seqs", "8", "--max-batched-tokens", "128"),
]
# Requests must not be blamed for what random kills do to workers.
SCHEDULER_FLAGS = ["--preset", "vllm-v1", "--policy-options", '{"mode": "swap"}', "--poison-failures", "1000"]
# --resume-keep-s 0: when a client resumes, its answer is generated again. --batch-lines 4: a batch has few lines in
# flight, so other lines still wait when its gateway dies. --resume-grace-s has its default, 10 s. It must be more than
# twice PATIENCE_S of matrix.py: a client that gave up on both gateways must find its answer still running at the first.
GATEWAY_FLAGS = ["--resume-keep-s", "0", "--batch-lines", "4"]
# A list that needs more tokens than `max_tokens` allows.
LONG_LIST = {"type": "array", "items": {"type": "string", "minLength": 4, "maxLength": 9}, "minItems": 99}
MESSAGES = [{"role": "user", "content": "Tell me of a fox."}]


@dataclass(frozen=True)
class Workload:
    """`is_reached`: whether it is time for the fault. It may read metrics: do not call it on an event loop."""

    questions: list[Question]
    is_reached: Callable[[Stack, list[Answer]], bool]


def completion(name: str, prompt: list[int] | list[str] | str, max_tokens: int, **options: Any) -> Question:
    """Streamed, greedy and of exactly this length unless the options say otherwise."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    usage = {} if options.get("stream") is False else {"stream_options": {"include_usage": True}}
    return Question(name, COMPLETION, body | usage | options)


def varied(question: Question, seed: int) -> Question:
    """The question with other token ids and another random seed, of the same size. `seed` 0: unchanged."""
    body = dict(question.body)
    if "seed" in body:
        body["seed"] += 1000 * seed
    for name in ("prompt", "token_ids"):
        if isinstance(tokens := body.get(name), list) and isinstance(tokens[0], int):
            body[name] = [8 + (token - 8 + 101 * seed) % (VOCAB - 8) for token in tokens]
    return replace(question, body=body)


def over_grpc(name: str, **options: Any) -> Question:
    """A question that the Python client asks over gRPC."""
    return Question(name, GRPC, {"stream": True, "ignore_eos": True} | options)


def _greedy(name: str, count: int, prompt_tokens: int, max_tokens: int, **options: Any) -> list[Question]:
    """Questions with different prompts; the name is the seed."""
    rng = random.Random(name)
    prompts = [[rng.randrange(8, VOCAB) for _ in range(prompt_tokens)] for _ in range(count)]
    return [completion(name, prompt, max_tokens, **options) for prompt in prompts]


def _streaming() -> list[Question]:
    """Everything that makes text of tokens, and a request that is not streamed."""
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 7}
    chat = {"messages": MESSAGES, "max_tokens": 150, "ignore_eos": True, "stream": True, "logprobs": True, "seed": 3}
    return [
        completion("streaming", "Once there was", 200, logprobs=2, presence_penalty=0.5, **sampled),
        completion("streaming", "Once there was", 200, stop=["no such end", "e no such"], frequency_penalty=0.4),
        completion("streaming", "One day", 200, ignore_eos=False, min_tokens=150, repetition_penalty=1.1, **sampled),
        completion("streaming", ["A fox", "A hen"], 150, **sampled),
        completion("streaming", "A fox", 200, structured_outputs={"regex": "[a-z ,.]{999}"}, **sampled),
        completion("streaming", "A fox", 200, stream=False, **sampled),
        Question("streaming", CHAT, chat | {"n": 2, "top_logprobs": 1}),
    ]


def _tools() -> list[Question]:
    """Function calls with a list argument that needs more tokens than `max_tokens` allows."""
    names = {"type": "object", "properties": {"names": LONG_LIST}, "required": ["names"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": names}} for name in ("invite", "forget")]
    chat = {"messages": MESSAGES, "max_tokens": 200, "stream": True, "tools": tools, "tool_choice": "required"}
    named = {"type": "function", "function": {"name": "forget"}}
    return [
        Question("tools", CHAT, chat | {"temperature": 0}),
        *(Question("tools", CHAT, chat | {"seed": seed}) for seed in (3, 4)),
        Question("tools", CHAT, chat | {"seed": 5, "tool_choice": named}),
        Question("tools", CHAT, chat | {"seed": 6, "n": 2}),
    ]


def _responses() -> list[Question]:
    """A client continues after the last event that it has."""
    common: dict[str, Any] = {"max_output_tokens": 800, "ignore_eos": True, "stream": True}
    asked = [{"input": "Tell me of a fox.", "temperature": 0}, {"input": "One day", "seed": 3}]
    asked.append({"input": "A hen", "seed": 4, "background": True})
    return [Question("responses", RESPONSES, common | one) for one in asked]


def _messages() -> list[Question]:
    """After a break, a client sends the request again and gets the same answer."""
    names = {"type": "object", "properties": {"names": LONG_LIST}, "required": ["names"]}
    tools = [{"name": "invite", "input_schema": names}]
    common = {"model": "paceline-demo", "messages": MESSAGES, "max_tokens": 400, "stream": True}
    called = common | {"tools": tools, "tool_choice": {"type": "any"}}
    return [Question("messages", PATH_OF_MESSAGES, called | {"seed": seed}) for seed in (3, 4, 5)]


def _batches() -> list[Question]:
    """A batch. At the end its files must have each line once. Half of the lines have a seed."""
    lines = [{**question.body, "stream": False} for question in _greedy("batches", 24, 12, 200, stream=False)]
    for number, line in enumerate(lines):
        line |= {"temperature": 1.0, "seed": number} if number % 2 else {}
    return [Question("batches", BATCHES, {"lines": lines, "stream": True})]


def _grpc() -> list[Question]:
    prompts = [question.body["prompt"] for question in _greedy("grpc", 3, 30, 1)]
    return [
        *(over_grpc("grpc", token_ids=prompt, max_tokens=250, seed=i, logprobs=1) for i, prompt in enumerate(prompts)),
        over_grpc("grpc", prompt="Once there was", max_tokens=250, temperature=0, stop=["no such end", "e no such"]),
        over_grpc(
            "grpc", prompt="One day", max_tokens=200, seed=5, repetition_penalty=1.1, ignore_eos=False, min_tokens=150
        ),
        over_grpc("grpc", messages=MESSAGES, max_tokens=200, seed=3),
        over_grpc("grpc", prompt="One day", max_tokens=200, seed=6, json_schema=LONG_LIST),
    ]


def _all_have(num_events: int) -> Callable[[Stack, list[Answer]], bool]:
    def is_reached(_: Stack, answers: list[Answer]) -> bool:
        streams = [answer for answer in answers if answer.question.body["stream"]]
        return all(len(answer.events) >= num_events for answer in streams)

    return is_reached


def _is_queued(stack: Stack, answers: list[Answer]) -> bool:
    waiting = stack.metric("paceline_scheduler_num_requests_waiting") or 0
    return waiting > 0 and any(answer.events for answer in answers)


def _is_prefilling(stack: Stack, answers: list[Answer]) -> bool:
    return (stack.metric("paceline_scheduler_num_requests_running") or 0) > 0


def _is_swapped(stack: Stack, answers: list[Answer]) -> bool:
    return stack.total("paceline_cache_host_blocks", 'state="used"', "cache") > 0


WORKLOADS: dict[str, Workload] = {
    "queued": Workload(_greedy("queued", 36, 20, 80), _is_queued),
    "prefill": Workload(_greedy("prefill", 8, 800, 24), _is_prefilling),
    "decode": Workload(_greedy("decode", 6, 12, 300), _all_have(20)),
    "n=4": Workload(_greedy("n=4", 3, 40, 160, n=4, temperature=1.0, seed=3), _all_have(10)),
    "seeded": Workload(_greedy("seeded", 6, 12, 250, temperature=1.0, top_p=0.95, seed=11), _all_have(20)),
    "streaming": Workload(_streaming(), _all_have(10)),
    "tools": Workload(_tools(), _all_have(10)),
    "responses": Workload(_responses(), _all_have(10)),
    "messages": Workload(_messages(), _all_have(10)),
    "batches": Workload(_batches(), _all_have(2)),
    "grpc": Workload(_grpc(), _all_have(10)),
    "swapped": Workload(_greedy("swapped", 16, 60, 280), _is_swapped),
}
