"""Requests with idempotency keys: which connection reads them, how long they wait, what is kept."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.engine import request_store
from services.gateway.engine.idempotency import RequestKey
from services.gateway.engine.request import RequestBuilder
from services.gateway.engine.request_store import Reading, RequestStore
from services.gateway.errors import ApiError
from tests.support.fake_session import ERROR, LENGTH, UNSPECIFIED, FakeSession
from tests.unit.gateway.test_request import builder, make_job

__all__ = ["builder"]


class Rig:
    def __init__(self, builder: RequestBuilder, **options: Any) -> None:
        self.now_s = 100.0
        self.session = FakeSession()
        self.builder = builder
        self.store = RequestStore(**{"grace_s": 10.0, "keep_s": 60.0, "clock": lambda: self.now_s, **options})

    def open(
        self,
        key: str = "k",
        fingerprint: bytes = b"same",
        tenant: str = "",
        n: int = 1,
        owner: str = "",
        **choices: Any,
    ) -> Reading:
        jobs = [make_job(self.builder, **choices) for _ in range(n)]
        name = RequestKey(tenant, key, fingerprint, "Idempotency-Key", owner)
        return self.store.open(name, lambda: self.session.run(jobs))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.store.tick()

    @property
    def num_live(self) -> int:
        return self.session.metrics.live_requests


@pytest.fixture
async def rig(builder: RequestBuilder) -> Rig:
    return Rig(builder)


async def test_a_request_waits_for_its_client_and_then_ends(rig: Rig) -> None:
    rig.open().close()
    rig.wait(9.9)
    assert (rig.store.num_waiting, rig.session.live[0].cancelled, rig.num_live) == (1, False, 1)
    rig.wait(0.2)
    assert (rig.store.num_waiting, rig.session.live[0].cancelled, rig.num_live) == (0, True, 0)
    rig.open()
    assert len(rig.session.live) == 2


async def test_a_client_that_comes_back_reads_from_the_beginning(rig: Rig) -> None:
    first = rig.open(ignore_eos=True)
    rig.session.give(rig.session.live[0], 50, 60)
    await first.generations[0].next()
    first.close()
    rig.session.give(rig.session.live[0], 70)
    rig.wait(9)
    second = rig.open(ignore_eos=True)
    rig.wait(1000)  # it is being read: nothing expires
    await second.generations[0].next()
    assert second.generations[0].token_ids == [50, 60, 70]
    assert rig.session.metrics.generation_tokens == 3
    assert second.created_s == first.created_s
    assert rig.store.num_taken_up == 1


async def test_only_the_newest_connection_reads_the_answer(rig: Rig) -> None:
    first, second = rig.open(), rig.open()
    rig.session.give(rig.session.live[0], 50)
    with pytest.raises(ApiError, match="another connection") as replaced:
        await first.generations[0].next()
    assert replaced.value.status == 409
    first.close()  # late, and without effect
    assert rig.store.num_waiting == 0
    await second.generations[0].next()
    rig.session.give(rig.session.live[0], 60)
    await second.generations[0].next()
    assert second.generations[0].token_ids == [60]
    second.close()
    assert rig.store.num_waiting == 1


async def test_a_finished_request_is_kept_for_a_while(rig: Rig) -> None:
    reading = rig.open(n=2)
    for live in rig.session.live:
        rig.session.give(live, 50)
    rig.session.end(rig.session.live[0])
    reading.close()
    assert (rig.store.num_waiting, rig.store.num_finished) == (1, 0)
    rig.session.end(rig.session.live[1])
    rig.wait(1)
    assert (rig.store.num_waiting, rig.store.num_finished, rig.num_live) == (0, 1, 0)
    assert rig.session.metrics.requests["test", "length"] == 2
    rig.wait(59)
    again = rig.open(n=2)
    assert len(rig.session.live) == 2
    for generation in again.generations:
        await generation.next()
        assert (generation.token_ids, generation.finish_reason) == ([50], LENGTH)
    again.close()
    rig.wait(60)
    assert rig.store.num_finished == 0
    rig.open()
    assert len(rig.session.live) == 3
    assert rig.session.metrics.requests["test", "length"] == 2


async def test_a_failed_request_is_run_again(rig: Rig) -> None:
    for _ in range(2):
        reading = rig.open()
        rig.session.end(rig.session.live[-1], UNSPECIFIED, code=14)
        with pytest.raises(ApiError):
            await reading.generations[0].next()
        reading.close()
    # Also while a reader has not seen the failure yet.
    reading = rig.open()
    rig.session.end(rig.session.live[-1], UNSPECIFIED, code=14)
    rig.open()
    reading.close()
    assert len(rig.session.live) == 4
    assert (rig.store.num_waiting, rig.store.num_finished, rig.num_live) == (0, 0, 1)


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_request_that_failed_by_itself_is_not_run_again(rig: Rig, failing: int) -> None:
    """Such a request might kill a worker at each attempt. One failed sample out of several is enough."""
    for attempt in range(3):
        reading = rig.open(n=2)
        rig.session.end(rig.session.live[failing], ERROR, code=13)
        with pytest.raises(ApiError) as failed:
            await reading.generations[failing if attempt == 0 else 0].next()
        assert (failed.value.status, failed.value.headers) == (500, {"x-should-retry": "false"})
        if attempt == 0:
            rig.open(n=2)  # while the first reader has not seen the failure yet
        reading.close()
    rig.wait(59)
    assert len(rig.session.live) == 2
    assert (rig.store.num_waiting, rig.store.num_finished, rig.num_live) == (0, 1, 0)
    rig.wait(2)
    assert rig.store.num_finished == 0


async def test_a_stop_string_also_ends_the_answer_of_the_next_reader(rig: Rig) -> None:
    tokens = rig.builder.encode_word("one two three")
    reading = rig.open(stop=["two"])
    rig.session.give(rig.session.live[0], *tokens)
    text = await reading.generations[0].next()
    reading.close()
    assert rig.session.live[0].cancelled
    assert rig.store.num_finished == 1
    again = rig.open(stop=["two"])
    assert await again.generations[0].next() == text == "one "
    assert again.generations[0].num_tokens == reading.generations[0].num_tokens
    assert rig.session.metrics.requests["test", "stop"] == 1


async def test_a_key_is_one_request_of_one_tenant(rig: Rig) -> None:
    rig.open()
    with pytest.raises(ApiError, match="Idempotency-Key") as refused:
        rig.open(fingerprint=b"other")
    assert (refused.value.status, refused.value.param) == (422, "Idempotency-Key")
    rig.open(fingerprint=b"other", tenant="t")
    rig.open(key="l")
    assert len(rig.session.live) == 3


async def test_a_submit_that_fails_leaves_no_key_behind(rig: Rig) -> None:
    def refuse() -> Any:
        raise ApiError(429, "full")

    with pytest.raises(ApiError, match="full"):
        rig.store.open(RequestKey("", "k", b"", "Idempotency-Key", ""), refuse)
    rig.open(fingerprint=b"other")


async def test_memory_is_bounded(builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(builder, max_bytes=40 * 250)  # room for two answers of 94 tokens each

    def finish(key: str) -> None:
        reading = rig.open(key)
        rig.session.give(rig.session.live[-1], *[50] * 94)
        rig.session.end(rig.session.live[-1])
        reading.close()

    for key in "abc":
        finish(key)
    assert rig.store.num_finished == 2
    rig.open("a")
    assert len(rig.session.live) == 4  # the oldest was forgotten
    rig.open("c").close()
    assert len(rig.session.live) == 4
    finish("d")
    assert rig.store.num_finished == 2
    monkeypatch.setattr(request_store, "MAX_FINISHED", 1)
    finish("e")
    assert rig.store.num_finished == 1


async def test_the_number_of_waiting_requests_is_limited(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_store, "MAX_WAITING", 2)
    for key in "abc":
        rig.open(key).close()
    assert (rig.store.num_waiting, rig.num_live) == (2, 2)
    assert [live.cancelled for live in rig.session.live] == [True, False, False]


async def test_while_the_server_drains_nothing_waits(rig: Rig) -> None:
    rig.open("a").close()
    reading = rig.open("b")
    rig.store.drain()
    assert (rig.store.num_waiting, rig.num_live) == (0, 1)
    reading.close()
    assert rig.num_live == 0


async def test_requests_belong_to_the_api_key_that_made_them(rig: Rig) -> None:
    """Another API key with the same Idempotency-Key gets neither the answer nor an error."""
    first = rig.open(owner="a", tenant="t", fingerprint=b"one")
    second = rig.open(owner="b", tenant="t", fingerprint=b"other")
    again = rig.open(owner="b", tenant="t", fingerprint=b"other")
    assert len(rig.session.live) == 2
    assert again.generations[0].job is second.generations[0].job
    assert rig.store.num_taken_up == 1
    assert not rig.store.has(RequestKey("t", "k", b"one", "Idempotency-Key", "c"))
    first.close()
    again.close()


async def test_no_owner_displaces_the_kept_requests_of_another(
    builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_store, "MAX_WAITING", 8)
    monkeypatch.setattr(request_store, "MAX_FINISHED", 6)
    rig = Rig(builder)
    rig.open("mine", owner="ann").close()
    rig.open("old", owner="bob").close()
    for number in range(40):
        rig.open(f"k{number}", owner="bob", tenant=f"t{number}").close()
    assert rig.store.num_waiting == 8
    assert rig.store.has(RequestKey("", "mine", b"", "", "ann"))
    assert not rig.store.has(RequestKey("", "old", b"", "", "bob"))
    for live in rig.session.live:
        if not live.cancelled:
            rig.session.end(live, LENGTH)
    rig.store.tick()
    assert rig.store.num_finished == 6
    assert rig.store.has(RequestKey("", "mine", b"", "", "ann"))


async def test_the_owner_with_the_most_bytes_makes_room(builder: RequestBuilder) -> None:
    rig = Rig(builder, max_bytes=3000)
    for owner, key in (("ann", "mine"), *(("bob", f"k{number}") for number in range(20))):
        rig.open(key, owner=owner).close()
        rig.session.give(rig.session.live[-1], *range(6, 14))
        rig.session.end(rig.session.live[-1], LENGTH)
        rig.store.tick()
    assert rig.store.has(RequestKey("", "mine", b"", "", "ann"))
    assert 1 < rig.store.num_finished < 21
    assert rig.store.has(RequestKey("", "k19", b"", "", "bob"))
