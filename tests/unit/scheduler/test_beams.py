"""Beam search against transformers' own on small random models, and by its invariants on random tables."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.requests.beams import MAX_WIDTH, BeamSearch, Candidates, FinishedBeam
from tests.support.checkpoints import COMMON

VOCAB = 16
PAD = 0
LENGTH_PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
EARLY_STOPPINGS = (False, True, "never")
ENDS = ((), (2,), (2, 5), (2, 5, 9), (2, 3, 4, 5, 6))  # the last set often ends several of the best extensions at once

Report = Callable[[Sequence[tuple[int, ...]]], list[Candidates]]  # from the output tokens of each beam


def drive(search: BeamSearch, report: Report) -> list[FinishedBeam]:
    while not search.done:
        search.advance(report([beam.tokens for beam in search.live]))
    return search.best()


# ── against transformers ─────────────────────────────────────────────────────────────────────────────────────────────


@cache
def random_llama(seed: int) -> Any:
    import transformers

    spread = (0.1, 0.2, 0.3)[seed % 3]  # from nearly even to peaked distributions
    config = transformers.LlamaConfig(
        **COMMON
        | {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "eos_token_id": None,
            "initializer_range": spread,
        }
    )
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def reference(
    model: Any, prompt: list[int], ends: tuple[int, ...], **options: Any
) -> list[tuple[tuple[int, ...], float]]:
    """Tokens and score of what transformers returns. A single beam uses its beam search too, not greedy search."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),  # else it would take PAD in the prompt for padding
        custom_generate=type(model)._beam_search,
        do_sample=False,
        pad_token_id=PAD,
        eos_token_id=list(ends) or None,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    num_tokens = (output.beam_indices >= 0).sum(dim=1).tolist()
    tokens = [tuple(row[len(prompt) :][:num]) for row, num in zip(output.sequences.tolist(), num_tokens, strict=True)]
    return list(zip(tokens, output.sequences_scores.tolist(), strict=True))


def model_report(model: Any, prompt: list[int], num: int) -> Report:
    @torch.no_grad()
    def report(outputs: Sequence[tuple[int, ...]]) -> list[Candidates]:
        logits = model(torch.tensor([[*prompt, *output] for output in outputs]), use_cache=False).logits[:, -1]
        top = torch.log_softmax(logits, dim=-1).topk(min(num, VOCAB))
        return [list(zip(*row, strict=True)) for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)]

    return report


@pytest.mark.parametrize("early_stopping", EARLY_STOPPINGS)
@pytest.mark.parametrize("length_penalty", LENGTH_PENALTIES)
@pytest.mark.parametrize("width", range(1, 7))
def test_a_search_finds_the_beams_of_transformers(width: int, length_penalty: float, early_stopping: Any) -> None:
    draw = random.Random(f"{width} {length_penalty} {early_stopping}")
    for ends in draw.sample(ENDS, 2):
        model = random_llama(draw.randrange(6))
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 6))]
        max_new_tokens = draw.randint(1, 12)
        min_new_tokens = draw.choice((0, 0, draw.randint(0, max_new_tokens)))
        num_return = draw.randint(1, width)
        options: dict[str, Any] = {
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": min_new_tokens,
        }
        search = BeamSearch(
            width=width, num_return=num_return, eos_token_ids=ends[:1], stop_token_ids=ends[1:], **options
        )
        found = drive(search, model_report(model, prompt, search.candidates_needed))
        expected = reference(model, prompt, ends, num_beams=width, num_return_sequences=num_return, **options)
        assert [hypothesis.tokens for hypothesis in found] == [tokens for tokens, _ in expected]
        assert [h.score for h in found] == pytest.approx([score for _, score in expected], rel=1e-5, abs=1e-5)
        for tokens, _, reason in found:
            assert reason == ("stop" if tokens[-1] in ends else "length")
            assert reason == "stop" or len(tokens) == max_new_tokens


# ── by itself ────────────────────────────────────────────────────────────────────────────────────────────────────────


def table_report(seed: int, vocab: int, num: int, coarse: bool = False) -> Report:
    """Log-probabilities that depend on the whole output. Coarse log-probabilities are often equal."""

    def candidates(output: tuple[int, ...]) -> Candidates:
        draw = random.Random(f"{seed} {output}")
        weights = [float(draw.choice((1, 2, 4))) if coarse else math.exp(draw.gauss(0, 2)) for _ in range(vocab)]
        logprobs = [math.log(weight / sum(weights)) for weight in weights]
        return sorted(enumerate(logprobs), key=lambda pair: -pair[1])[:num]

    return lambda outputs: [candidates(output) for output in outputs]


@st.composite
def searches(draw: st.DrawFn) -> dict[str, Any]:
    width = draw(st.integers(1, 6))
    max_new_tokens = draw(st.integers(1, 8))
    return {
        "width": width,
        "num_return": draw(st.integers(1, width)),
        "length_penalty": draw(st.sampled_from(LENGTH_PENALTIES)),
        "early_stopping": draw(st.sampled_from(EARLY_STOPPINGS)),
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": draw(st.integers(0, max_new_tokens)),
        "eos_token_ids": draw(st.sets(st.integers(0, 9), max_size=2)),
        "stop_token_ids": draw(st.sets(st.integers(0, 9), max_size=2)),
    }


@given(searches(), st.integers(0, 1 << 30), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_search_returns_the_best_endings_of_the_whole_vocabulary(
    options: dict[str, Any], seed: int, coarse: bool
) -> None:
    """Replays every step on the whole vocabulary, by plain sorting."""
    search, width = BeamSearch(**options), options["width"]
    everything, reported = (table_report(seed, 10, num, coarse) for num in (10, search.candidates_needed))
    stops = options["eos_token_ids"] | options["stop_token_ids"]
    endings: list[tuple[float, tuple[int, ...]]] = []
    num_steps = 0
    while not search.done:
        live = search.live
        outputs = [beam.tokens for beam in live]
        assert 1 <= len(live) <= width
        assert len(set(outputs)) == len(live)
        assert [beam.logprob for beam in live] == sorted((beam.logprob for beam in live), reverse=True)
        num_steps += 1
        extensions = [
            (beam.logprob + logprob, beam.tokens, token)
            for beam, row in zip(live, everything(outputs), strict=True)
            for token, logprob in row
            if num_steps > options["min_new_tokens"] or token not in stops
        ]
        extensions.sort(key=lambda extension: -extension[0])
        at_limit = num_steps == options["max_new_tokens"]
        for logprob, tokens, token in extensions[:width]:
            if at_limit or token in stops:
                endings.append((logprob / num_steps ** options["length_penalty"], (*tokens, token)))
        going_on = [(*tokens, token) for _, tokens, token in extensions if token not in stops and not at_limit]
        new = search.advance(reported(outputs))
        assert new is search.live
        assert [beam.tokens for beam in new] == (going_on[:width] if new else [])
        assert all(beam.tokens == (*outputs[beam.parent], beam.token) for beam in new)
    endings.sort(key=lambda ending: -ending[0])
    assert [(score, tokens) for tokens, score, _ in search.best()] == endings[: options["num_return"]]
    assert len(search.best()) == options["num_return"]


@given(searches(), st.integers(0, 1 << 30), st.booleans())
@settings(max_examples=50, deadline=None)
def test_same_input_same_search(options: dict[str, Any], seed: int, coarse: bool) -> None:
    first, again = (drive(BeamSearch(**options), table_report(seed, 10, 10, coarse)) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("length_penalty", LENGTH_PENALTIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_enough_search_finds_the_best_sequence(seed: int, length_penalty: float) -> None:
    vocab, eos, limit = 3, 0, 4
    report = table_report(seed, vocab, vocab)
    scores: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(vocab), repeat=limit):
        num_tokens = tokens.index(eos) + 1 if eos in tokens else limit
        logprob = sum(dict(report([tokens[:at]])[0])[tokens[at]] for at in range(num_tokens))
        scores[tokens[:num_tokens]] = logprob / num_tokens**length_penalty
    search = BeamSearch(
        width=48, length_penalty=length_penalty, early_stopping="never", max_new_tokens=limit, eos_token_ids=[eos]
    )
    best = drive(search, report)[0]
    assert best.tokens == max(scores, key=scores.__getitem__)
    assert best.score == pytest.approx(scores[best.tokens])


@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0])
def test_the_search_goes_on_while_a_longer_sequence_could_win_if_early_stopping_is_never(length_penalty: float) -> None:
    """Token 0 ends at once with -0.5; the other way scores -0.4 after 5 tokens, and less with fewer."""
    logprob = -0.4 * 5**length_penalty

    def best(early_stopping: Any) -> FinishedBeam:
        search = BeamSearch(
            width=1, length_penalty=length_penalty, early_stopping=early_stopping, max_new_tokens=5, eos_token_ids=[0]
        )
        (hypothesis,) = drive(
            search, lambda outputs: [[(1, 0.0)] if output else [(0, -0.5), (1, logprob)] for output in outputs]
        )
        return hypothesis

    assert best(True) == best(False) == ((0,), -0.5, "stop")
    kept = best("never")
    assert (kept.tokens, kept.reason) == ((1,) * 5, "length")
    assert kept.score == pytest.approx(-0.4)


@pytest.mark.parametrize("early_stopping", EARLY_STOPPINGS)
def test_only_early_stopping_true_ends_as_soon_as_enough_beams_have_ended(early_stopping: Any) -> None:
    """After two steps, the beams (0) and (1, 0) have ended with scores -3 and -4.1. The live beam (1, 1) can still get
    a better score if it ends soon."""
    table = {
        (): [(1, -0.05), (0, -3.0), (2, -9.0)],
        (1,): [(1, -0.01), (0, -2.0), (2, -9.0)],
        (1, 1): [(0, -0.1), (1, -3.0), (2, -9.0)],
    }
    search = BeamSearch(
        width=2, length_penalty=-1.0, early_stopping=early_stopping, max_new_tokens=99, eos_token_ids=[0]
    )
    (best,) = drive(search, lambda outputs: [table.get(output, [(2, -9.0)]) for output in outputs])
    if early_stopping is True:
        assert best == ((0,), -3.0, "stop")
    else:
        assert (best.tokens, best.reason) == ((1, 1, 0), "stop")
        assert best.score == pytest.approx(-0.48)


def test_equal_scores_keep_the_order_of_beams_and_then_of_the_list() -> None:
    search = BeamSearch(width=3, num_return=3, max_new_tokens=2, length_penalty=0.0)
    assert [beam.token for beam in search.advance([[(7, -1.0), (3, -1.0), (5, -1.0)]])] == [7, 3, 5]
    search.advance([[(2, -1.0), (1, -1.0)], [(4, -1.0)], [(0, -0.5)]])
    assert [hypothesis.tokens for hypothesis in search.best()] == [(5, 0), (7, 2), (7, 1)]


def test_a_small_vocabulary_leaves_beams_empty() -> None:
    search = BeamSearch(width=4, num_return=4, max_new_tokens=9, eos_token_ids=[0])
    assert len(search.advance([[(0, -0.5), (1, -1.0), (2, -math.inf), (3, math.nan)]])) == 1
    assert not search.advance([[(0, -0.1)]])
    assert search.done
    assert [hypothesis.tokens for hypothesis in search.best()] == [(0,), (1, 0)]


def test_very_long_outputs_neither_recurse_nor_copy() -> None:
    search = BeamSearch(width=1, max_new_tokens=20_000)
    while not search.done:
        search.advance([[(1, -0.1)]])
    (hypothesis,) = search.best()
    assert hypothesis.tokens == (1,) * 20_000
    del search


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, rf"width: 0 is not in \[1, {MAX_WIDTH}\]"),
        ({"width": MAX_WIDTH + 1}, "width: "),
        ({"num_return": 0}, "num_return: "),
        ({"num_return": 3}, r"num_return: 3 is not in \[1, 2\]"),
        ({"length_penalty": math.nan}, r"length_penalty: nan is not in \[-10.0, 10.0\]"),
        ({"length_penalty": 11.0}, "length_penalty: "),
        ({"early_stopping": "always"}, "early_stopping: 'always' is not True, False or 'never'"),
        ({"early_stopping": 1}, "early_stopping: 1"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 is less than 1"),
        ({"min_new_tokens": -1}, r"min_new_tokens: -1 is not in \[0, 4\]"),
        ({"min_new_tokens": 5}, "min_new_tokens: "),
        ({"eos_token_ids": [-2]}, "eos_token_ids: -2 is less than 0"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids: -1 is less than 0"),
    ],
)
def test_an_invalid_option_is_refused_with_its_field_and_limit(changes: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"width": 2, "max_new_tokens": 4}
    with pytest.raises(ValueError, match=f"^{message}"):
        BeamSearch(**options | changes)


def test_invalid_candidates_are_refused() -> None:
    search = BeamSearch(width=2, max_new_tokens=1)
    with pytest.raises(ValueError, match="2 lists for 1 live beams"):
        search.advance([[(1, -1.0)], [(1, -1.0)]])
    search.advance([[(1, -1.0)]])
    with pytest.raises(RuntimeError, match="over"):
        search.advance([])
