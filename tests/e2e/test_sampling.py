"""Sampling parameters end to end: greedy against transformers' generate(), log probabilities against its logits."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from demo import CHECKPOINT
from services.client import PacelineClient
from tests.support import reference
from tests.support.stack import Stack

PROMPT = [50, 60, 70, 80, 60, 70]
STORY = reference.tokenizer(str(CHECKPOINT))("Once there was a fox")["input_ids"]


class OpenAiPenalties(LogitsProcessor):
    """The penalties of OpenAI's documentation, which transformers does not have."""

    def __init__(self, frequency: float, presence: float) -> None:
        self.frequency, self.presence = frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, len(STORY) :], minlength=scores.shape[-1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


def answer(stack: Stack, **body: Any) -> dict[str, Any]:
    defaults = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{stack.url}/v1/completions", json=defaults | body, trust_env=False, timeout=200)
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0])


def text(tokens: list[int]) -> str:
    return str(reference.tokenizer(str(CHECKPOINT)).decode(tokens, skip_special_tokens=True))


def echo(tokens: list[int]) -> str:
    """An echo of token ids shows special tokens."""
    return str(reference.tokenizer(str(CHECKPOINT)).decode(tokens))


def cases(plain: list[int]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs: fields of a request to Paceline, and arguments of transformers with the same effect."""
    allowed = sorted({*plain[:5], *range(100, 400, 7)})
    words = [[plain[1]], plain[2:4], plain[5:8]]
    return [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        (
            {"frequency_penalty": 0.6, "presence_penalty": 0.9},
            {"logits_processor": LogitsProcessorList([OpenAiPenalties(0.6, 0.9)])},
        ),
        ({"logit_bias": {str(plain[0]): -100, "200": 4.5}}, {"sequence_bias": {(plain[0],): -100.0, (200,): 4.5}}),
        ({"bad_words": words}, {"bad_words_ids": words}),
        ({"allowed_token_ids": allowed}, {"prefix_allowed_tokens_fn": lambda *_: allowed}),
        (
            {"repetition_penalty": 1.2, "logit_bias": {"200": 3.0}, "bad_words": words},
            {"repetition_penalty": 1.2, "sequence_bias": {(200,): 3.0}, "bad_words_ids": words},
        ),
    ]


def test_greedy_tokens_equal_transformers(stack: Stack) -> None:
    plain = reference.greedy(CHECKPOINT, STORY, 40)
    for ours, theirs in cases(plain):
        expected = reference.processed(CHECKPOINT, STORY, 40, **theirs)
        assert expected != plain, ours
        assert answer(stack, prompt=STORY, **ours)["text"] == text(expected), ours


def test_a_bad_word_is_not_generated(stack: Stack) -> None:
    story = {"prompt": "Once there was a fox", "max_tokens": 60}
    plain = answer(stack, **story)["text"]
    word = plain.split()[3]
    assert word not in answer(stack, **story, bad_words=[word])["text"].split()


def test_log_probabilities_are_those_of_transformers(stack: Stack) -> None:
    shown = answer(stack, max_tokens=12, logprobs=3, prompt_logprobs=2)
    output = reference.greedy(CHECKPOINT, PROMPT, 12)
    right = reference.logprobs(CHECKPOINT, [*PROMPT, *output])
    expected = [float(right[len(PROMPT) - 1 + i, token]) for i, token in enumerate(output)]
    assert shown["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-3)
    assert "".join(shown["logprobs"]["tokens"]) == shown["text"]
    first, *rest = shown["prompt_logprobs"]
    assert first is None
    for i, entries in enumerate(rest):
        values, ids = right[i].topk(2)
        own = entries[str(PROMPT[i + 1])]
        assert own["logprob"] == pytest.approx(float(right[i, PROMPT[i + 1]]), abs=1e-3)
        assert own["rank"] == int((right[i] > right[i, PROMPT[i + 1]]).sum()) + 1
        top = [entries[str(token)]["logprob"] for token in ids.tolist()]
        assert top == pytest.approx(values.tolist(), abs=1e-3)


def test_an_echo_is_scored_as_evaluation_harnesses_want_it(stack: Stack) -> None:
    """Harnesses send token ids and read the log probabilities of the last tokens."""
    right = reference.logprobs(CHECKPOINT, STORY)
    expected = [float(right[i - 1, STORY[i]]) for i in range(1, len(STORY))]
    best = [int(right[i - 1].argmax()) == STORY[i] for i in range(1, len(STORY))]
    for max_tokens in (0, 1):
        shown = answer(stack, prompt=STORY, echo=True, logprobs=1, max_tokens=max_tokens)
        values = shown["logprobs"]
        first, *rest = values["token_logprobs"]
        assert first is None
        assert len(rest) == len(expected) + max_tokens
        assert rest[: len(expected)] == pytest.approx(expected, abs=1e-3)
        tops = values["top_logprobs"][1 : len(STORY)]
        tokens = values["tokens"][1 : len(STORY)]
        assert [max(top, key=top.get) == token for top, token in zip(tops, tokens, strict=True)] == best
        more = reference.greedy(CHECKPOINT, STORY, max_tokens) if max_tokens else []
        assert shown["text"] == echo(STORY) + text(more)
    beam = {"prompt": STORY, "max_tokens": 4, "use_beam_search": True, "n": 1, "best_of": 2}
    found = answer(stack, **beam)["text"]
    assert answer(stack, **beam, echo=True)["text"] == echo(STORY) + found
    alone = answer(stack, **beam | {"max_tokens": 0}, echo=True)
    assert (alone["text"], alone["finish_reason"]) == (echo(STORY), "length")


def test_a_prompt_is_scored_even_if_it_is_cached(stack: Stack) -> None:
    prompt = [60 + i % 50 for i in range(300)]
    answer(stack, prompt=prompt, max_tokens=1)
    with PacelineClient(f"127.0.0.1:{stack.grpc_port}") as client:
        scored = client.generate(token_ids=prompt, max_tokens=1, temperature=0, prompt_logprobs=0)
        again = client.generate(token_ids=prompt, max_tokens=1, temperature=0)
    right = reference.logprobs(CHECKPOINT, prompt)
    expected = [float(right[i - 1, prompt[i]]) for i in range(1, len(prompt))]
    assert [token.logprob for token in scored.prompt_logprobs] == pytest.approx(expected, abs=1e-3)
    assert (scored.usage.cached_tokens, again.usage.cached_tokens) == (0, 299)
    assert scored.token_ids == again.token_ids


def test_a_sample_with_many_parameters_is_the_same_alone_and_beside_others(stack: Stack) -> None:
    asked = {
        "temperature": 1.1, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95, "seed": 3, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "bad_words": ["fox"], "logit_bias": {"200": 1.0},
    }  # fmt: skip
    alone = answer(stack, **asked)["text"]
    with httpx.Client(trust_env=False, timeout=200) as client:
        body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "n": 8, **asked}
        together = client.post(f"{stack.url}/v1/completions", json=body).json()["choices"]
    assert together[0]["text"] == alone
    assert len({choice["text"] for choice in together}) == 8


def test_a_request_that_rules_out_every_token_is_refused_with_the_reason(stack: Stack) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "allowed_token_ids": [7, 8], "bad_words": [[7], [8]]}
    response = httpx.post(f"{stack.url}/v1/completions", json=body, trust_env=False, timeout=200)
    assert response.status_code == 400
    assert "no token is left to sample" in response.json()["error"]["message"]
    assert answer(stack, max_tokens=1)["text"]
