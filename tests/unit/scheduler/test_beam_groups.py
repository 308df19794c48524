"""A beam search as a group of requests: it ends as one, whatever happens to its members."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.v1.common_pb2 import FinishReason, SamplingParams
from paceline.v1.inference_pb2 import BeamOptions
from paceline.v1.worker_pb2 import StepResult
from scheduler_svc.core.lifecycle.beam_groups import UNSEARCHED, make_search
from scheduler_svc.core.rejection import CODE_INVALID_ARGUMENT
from scheduler_svc.core.types import SchedulerConfig
from simulator.system import Client, LocalSystem
from simulator.toy_worker import EOS, ToyWorker, expected_hypotheses

PROMPT = list(range(9, 20))
SAMPLING = SamplingParams(top_p=1.0, max_tokens=9)
BEAM = BeamOptions(width=4, num_return=3, length_penalty=0.5)


def toy(**changes: int) -> ToyWorker:
    return ToyWorker(**{"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_batched_tokens": 64} | changes)


@pytest.fixture
def system() -> LocalSystem:
    return LocalSystem(SchedulerConfig())


@pytest.fixture
def client(system: LocalSystem) -> Client:
    return system.open("s")


def check(client: Client, handle: int = 1) -> None:
    found = client.endings[handle].hypotheses
    right = expected_hypotheses(PROMPT, make_search(BEAM, SAMPLING, [EOS]))
    assert [np.frombuffer(h.token_ids, np.int32).tolist() for h in found] == [tokens for tokens, _ in right]
    assert [h.score for h in found] == pytest.approx([score for _, score in right])
    assert handle not in client.tokens, "the client gets no token before the end"


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 1}, {"num_blocks": 6}, {"max_batched_tokens": 4}])
def test_a_search_finds_the_same_with_few_slots_blocks_or_tokens(
    system: LocalSystem, client: Client, limits: dict[str, int]
) -> None:
    """With six blocks, parked beams do not fit beside the forking beams, so the parked beams give up their blocks."""
    system.attach(toy(**limits))
    system.submit("s", 1, PROMPT, SAMPLING, beam=BEAM)
    system.run()
    check(client)
    assert system.cache.counters.forked_sequences > 0
    system.assert_at_rest()


def test_a_search_starts_when_the_model_is_known_and_outlives_its_worker_and_the_cache(
    system: LocalSystem, client: Client
) -> None:
    system.submit("s", 1, PROMPT, SAMPLING, beam=BEAM)
    system.run()
    for moves in (30, 45):
        end = system.attach(toy())
        system.run_for(moves)
        system.kill(end)
    system.attach(toy())
    system.run_for(25)
    system.restart_cache()
    system.run()
    check(client)
    system.assert_at_rest()


@pytest.mark.parametrize("moves", range(0, 60, 3))
def test_a_cancel_takes_every_beam_along(system: LocalSystem, client: Client, moves: int) -> None:
    system.attach(toy())
    system.submit("s", 1, PROMPT, SAMPLING, beam=BEAM)
    system.run_for(moves)
    assert 1 not in client.endings
    system.cancel("s", 1)
    system.run()
    assert client.endings[1].reason == FinishReason.FINISH_REASON_ABORT
    system.assert_at_rest()


def test_a_worker_that_sends_no_log_probabilities_fails_the_search(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy())
    system.submit("s", 1, PROMPT, SAMPLING, beam=BEAM)
    while moves := system.moves():
        for result in end.results:
            assert isinstance(result, StepResult)
            del result.logprobs[:]
        system.move(*moves[0])
    assert client.endings[1].message == "worker: sent no log probabilities for a beam"
    system.assert_at_rest()


@pytest.mark.parametrize("name", UNSEARCHED)
def test_a_field_that_a_beam_search_does_not_support_is_refused_by_name(
    system: LocalSystem, client: Client, name: str
) -> None:
    values: dict[str, Any] = {
        "logit_bias": {7: 1.0},
        "bad_words": [bytes(4)],
        "allowed_token_ids": bytes(4),
        "grammar": "start: X",
    }
    asked = SamplingParams(top_p=1.0, max_tokens=9, **{name: values.get(name, 1)})
    system.submit("s", 1, PROMPT, asked, beam=BEAM)
    assert (client.endings[1].code, client.endings[1].field) == (CODE_INVALID_ARGUMENT, name)


@pytest.mark.parametrize(
    ("beam", "field"),
    [
        (BeamOptions(), "beam.width"),
        (BeamOptions(width=65), "beam.width"),
        (BeamOptions(width=2, num_return=3), "beam.num_return"),
        (BeamOptions(width=2, length_penalty=11.0), "beam.length_penalty"),
    ],
)
def test_bad_options_are_refused_by_name(system: LocalSystem, client: Client, beam: BeamOptions, field: str) -> None:
    system.submit("s", 1, PROMPT, SAMPLING, beam=beam)
    assert (client.endings[1].code, client.endings[1].field) == (CODE_INVALID_ARGUMENT, field)
