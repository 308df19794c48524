"""Asks for log likelihoods and generations through lm-eval's client of the completions API. The requests are made
here, because its tasks need data sets that tests cannot fetch."""

from __future__ import annotations

import os

from checks import MODEL, URL, run
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


def model() -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        base_url=f"{URL}/v1/completions",
        model=MODEL,
        tokenizer=os.environ["PACELINE_CHECKPOINT"],
        tokenizer_backend="huggingface",
        num_concurrent=2,
        max_length=1024,
    )


def instances(kind: str, *arguments: tuple[object, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=given, idx=i) for i, given in enumerate(arguments)]


def likelihoods() -> None:
    pairs = [("Once there was a fox that", " lived"), ("Once there was a fox that", " vidle")]
    found = model().loglikelihood(instances("loglikelihood", *pairs))
    assert all(score < 0 for score, _ in found), found
    assert found[0][0] > found[1][0], found


def generations() -> None:
    options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    [text] = model().generate_until(instances("generate_until", ("Once there was", options)))
    assert text


run(log_likelihood=likelihoods, generation=generations)
