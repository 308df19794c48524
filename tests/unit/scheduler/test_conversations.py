"""Conversations: what they keep between requests, and when they end."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.v1.common_pb2 import RetentionRange, SamplingParams
from scheduler_svc.core.lifecycle import conversations
from scheduler_svc.core.types import SchedulerConfig
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker

PARAMS = SamplingParams(top_p=1.0, max_tokens=3, seed=1, ignore_eos=True)
PROMPT = list(range(12))


def started(**config: Any) -> LocalSystem:
    system = LocalSystem(SchedulerConfig(**config))
    system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=1, max_batched_tokens=64))
    return system


def ask(system: LocalSystem, handle: int, prompt: list[int] = PROMPT, **fields: Any) -> None:
    system.submit("s", handle, prompt, PARAMS, **fields)


def retained(system: LocalSystem, tenant: str = "") -> int:
    [worker] = system.cache.workers.values()
    share = worker.device.shares.tenants.get(tenant)
    return 0 if share is None else share.num_blocks


def positions(system: LocalSystem) -> list[int]:
    return [request.queue_position for request in system.scheduler.queue]


def test_blocks_are_retained_until_the_release() -> None:
    system = started()
    ask(system, 1)
    system.run()
    assert retained(system) == 0
    ask(system, 2, conversation="c")
    system.run()
    assert retained(system) == 4  # the partial block behind the prompt, too
    system.scheduler.release_conversation("c")
    with pytest.raises(KeyError):
        system.scheduler.release_conversation("c")
    system.poll()
    system.run()
    assert retained(system) == 0


def test_a_request_that_outlives_its_conversation_retains_nothing() -> None:
    system = started()
    ask(system, 1, conversation="c")
    system.run_for(4)
    system.scheduler.release_conversation("c")
    system.run()
    assert retained(system) == 0


def test_a_requests_own_retention_takes_precedence() -> None:
    system = started()
    ask(system, 1, conversation="c", cache_retention=[RetentionRange(start=0, end=4, priority=80)])
    system.run()
    assert retained(system) == 1


def test_a_later_request_has_the_queue_position_of_the_first() -> None:
    system = started()
    ask(system, 1, conversation="c")
    system.run()
    for handle, name in ((2, ""), (3, ""), (4, "c"), (5, "d"), (6, "c")):
        ask(system, handle, conversation=name)
    first, *_ = positions(system)
    assert positions(system) == [2, 3, 1, 5, 1]
    assert first == 2
    system.run()
    ended = list(system.clients["s"].endings)
    assert ended.index(4) < ended.index(3)
    assert ended.index(6) < ended.index(3)


def test_an_idle_conversation_ends_and_a_running_one_does_not() -> None:
    system = started(conversation_ttl_s=10.0)
    ask(system, 1, conversation="idle")
    system.run()
    ask(system, 2, conversation="busy")
    system.scheduler.tick(9.0)
    system.scheduler.tick(30.0)
    system.run()
    system.scheduler.release_conversation("busy")
    with pytest.raises(KeyError):
        system.scheduler.release_conversation("idle")


def test_another_tenant_cannot_join() -> None:
    system = started()
    ask(system, 1, conversation="c", tenant="a")
    ask(system, 2, conversation="c", tenant="b")
    system.run()
    ending = system.clients["s"].endings[2]
    assert (ending.field, ending.message) == ("conversation", "conversation: belongs to another tenant")


def test_a_tenant_with_too_many_conversations_loses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_OF_TENANT", (3, 2**20))
    system = started()
    ask(system, 1, conversation="other", tenant="b")
    for i in range(5):
        ask(system, 2 + i, [*range(100 * i, 100 * i + 12)], conversation=f"c{i}", tenant="a")
        system.run()
    known = [name for name in ("other", "c0", "c1", "c2", "c3", "c4") if is_known(system, name)]
    assert known == ["other", "c2", "c3", "c4"]


def test_tokens_of_conversations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_OF_ALL", (100, 4 * 15 * 2))
    system = started()
    for i in range(4):
        ask(system, 1 + i, [*range(100 * i, 100 * i + 12)], conversation=f"c{i}", tenant=str(i))
        system.run()
    assert [name for name in ("c0", "c1", "c2", "c3") if is_known(system, name)] == ["c2", "c3"]
    assert (retained(system, "1"), retained(system, "3")) == (0, 4)


def is_known(system: LocalSystem, name: str) -> bool:
    return name in system.scheduler.life.conversations._all.by_name


def test_a_conversation_is_idle_from_the_end_of_its_last_request_on() -> None:
    system = started(conversation_ttl_s=10.0)
    ask(system, 1, conversation="c")
    system.now_s = 5.0
    system.run()
    system.scheduler.tick(14.0)
    system.scheduler.release_conversation("c")
