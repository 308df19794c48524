"""The election in virtual time: an etcd that keeps time by its own clock, a network that delays and loses."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.election import Election
from scheduler_svc.etcd import EtcdError, LeaderRecord
from tests.support import virtual_time

T = TypeVar("T")
TTL_S = 3
TIMEOUT_S = TTL_S / 4


def now_s() -> float:
    return asyncio.get_running_loop().time()


class FakeEtcd:
    """Leases end when their time is over, never before, and sometimes a little later."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.revision = 1
        self.leader: tuple[int, str] | None = None  # lease, address
        self.epoch = self.epoch_revision = 0
        self.leases: dict[int, float] = {}  # until when
        self.left = asyncio.Event()
        self._ids = itertools.count(100)

    def grant(self, ttl_s: int) -> tuple[int, float]:
        lease = next(self._ids)
        self._extend(lease, ttl_s)
        return lease, float(ttl_s)

    def renew(self, lease: int) -> float:
        if lease not in self.leases:
            return 0.0
        self._extend(lease, TTL_S)
        return float(TTL_S)

    def revoke(self, lease: int) -> None:
        if self.leases.pop(lease, None) is None:
            raise EtcdError("requested lease not found")
        if self.leader is not None and self.leader[0] == lease:
            self.delete()

    def delete(self) -> None:
        self.leader = None
        self.revision += 1
        self.left.set()
        self.left = asyncio.Event()

    def read_leader(self) -> LeaderRecord:
        lease, address = self.leader or (None, "")
        return LeaderRecord(self.revision, lease, address, self.epoch, self.epoch_revision)

    def claim(self, seen: LeaderRecord, lease: int, address: str, epoch: int) -> bool:
        if self.leader is not None or seen.epoch_revision != self.epoch_revision:
            return False
        if lease not in self.leases:
            raise EtcdError("requested lease not found")
        self.revision += 1
        self.leader, self.epoch, self.epoch_revision = (lease, address), epoch, self.revision
        return True

    def _extend(self, lease: int, ttl_s: float) -> None:
        self.leases[lease] = until_s = now_s() + ttl_s
        asyncio.get_running_loop().call_later(ttl_s + self.rng.uniform(0, 1), self._end, lease, until_s)

    def _end(self, lease: int, until_s: float) -> None:
        if self.leases.get(lease) == until_s:
            self.revoke(lease)


@dataclass
class Way:
    """One scheduler's connection to etcd. Questions and answers may come late, or never."""

    etcd: FakeEtcd
    rng: random.Random
    trouble: float = 0.0  # the probability that a message is lost, and the probability that it is late
    open_: bool = True
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def grant(self, ttl_s: int) -> tuple[int, float]:
        return await self._ask(lambda: self.etcd.grant(ttl_s))

    async def renew(self, lease: int) -> float:
        return await self._ask(lambda: self.etcd.renew(lease))

    async def revoke(self, lease: int) -> None:
        return await self._ask(lambda: self.etcd.revoke(lease))

    async def read_leader(self) -> LeaderRecord:
        return await self._ask(self.etcd.read_leader)

    async def claim(self, seen: LeaderRecord, lease: int, address: str, epoch: int) -> bool:
        return await self._ask(lambda: self.etcd.claim(seen, lease, address, epoch))

    async def wait_until_left(self, seen: LeaderRecord, at_most_s: float) -> None:
        if self.etcd.revision != seen.revision and self.etcd.leader is None:
            return
        try:
            async with asyncio.timeout(at_most_s):
                await self.etcd.left.wait()
                await self._travel()
        except TimeoutError:
            return

    async def close(self) -> None:
        return

    async def _ask(self, what: Callable[[], T]) -> T:
        async def there_and_back() -> T:
            await self._travel()
            answer = what()
            await self._travel()
            return answer

        # The exchange goes on when no caller waits for it any more.
        task = asyncio.create_task(there_and_back())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        done, _ = await asyncio.wait([task], timeout=TIMEOUT_S)
        if not done:
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            raise EtcdError("no answer")
        return task.result()

    async def _travel(self) -> None:
        if not self.open_ or self.rng.random() < self.trouble:
            await asyncio.sleep(1e6)
        late = self.rng.random() < self.trouble
        await asyncio.sleep(self.rng.uniform(0, 8) if late else self.rng.uniform(0.0005, 0.02))


class World:
    """Schedulers that stand by, lead, and stand by again when they have lost the lease."""

    def __init__(self, seed: int, count: int, trouble: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.etcd = FakeEtcd(self.rng)
        self.ways = [Way(self.etcd, self.rng, trouble) for _ in range(count)]
        self.elections: dict[int, Election] = {}
        self.epochs: list[int] = []
        self.reasons: list[str] = []
        self._runs = [asyncio.create_task(self._run(i)) for i in range(count)]

    @property
    def leaders(self) -> list[int]:
        return [i for i, election in self.elections.items() if election.holds]

    async def _run(self, i: int) -> None:
        while True:
            # Wall clocks go wrong by hours, forward and back.
            election = Election(
                self.ways[i],  # type: ignore[arg-type]
                f"scheduler-{i}",
                TTL_S,
                clock=now_s,
                wall_ms=lambda: 10_000_000 + self.rng.randrange(8_000_000),
            )
            self.elections[i] = election
            self.epochs.append(await election.campaign())
            # A second leader could appear only at such a moment.
            assert self.leaders == [i], f"at {now_s():.3f} s all of {self.leaders} believe that they lead"
            self.reasons.append(await election.lead())
            assert not election.holds
            await asyncio.sleep(self.rng.uniform(0.1, 2))

    async def pass_time(self, seconds: float) -> None:
        steps = int(seconds / 0.1) + 1
        for _ in range(steps):
            await asyncio.sleep(seconds / steps)
            assert len(self.leaders) <= 1, f"at {now_s():.3f} s all of {self.leaders} believe that they lead"
            for run in self._runs:
                assert not run.done(), run.result()

    async def until_elected(self, at_most_s: float) -> int:
        for _ in range(int(at_most_s / 0.02)):
            if self.leaders:
                return self.leaders[0]
            await self.pass_time(0.02)
        raise AssertionError(f"no scheduler was elected in {at_most_s} s")

    async def restart(self, i: int, resign: bool) -> None:
        """Restart a scheduler. `resign`: it returns its lease first, as after SIGTERM; else as after SIGKILL."""
        self._runs[i].cancel()
        await asyncio.gather(self._runs[i], return_exceptions=True)
        election = self.elections.pop(i)
        if resign:
            await election.close()
            assert not election.holds
        self._runs[i] = asyncio.create_task(self._run(i))

    async def end(self) -> None:
        tasks = [*self._runs, *(task for way in self.ways for task in way.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(2, 4), trouble=st.sampled_from([0.0, 0.05, 0.2, 0.5]))
def test_never_two_leaders_and_epochs_only_rise(seed: int, count: int, trouble: float) -> None:
    async def play() -> None:
        world = World(seed, count, trouble)
        for _ in range(12):
            await world.pass_time(world.rng.uniform(0, 6))
            i = world.rng.randrange(count)
            match world.rng.choice(["cut", "heal", "kill", "resign", "delete"]):
                case "cut":
                    world.ways[i].open_ = False
                case "heal":
                    world.ways[i].open_ = True
                case "kill":
                    await world.restart(i, resign=False)
                case "resign":
                    await world.restart(i, resign=True)
                case "delete" if world.etcd.leader is not None and not world.leaders:
                    world.etcd.delete()
        for way in world.ways:
            way.trouble, way.open_ = 0.0, True
        await world.pass_time(8)  # delayed messages arrive
        leader = await world.until_elected(2 * TTL_S)
        await world.pass_time(3 * TTL_S)
        assert world.leaders == [leader]
        assert world.epochs == sorted(set(world.epochs))
        await world.end()

    virtual_time.run(play())


def scenario(play: Callable[[World], Any], count: int = 2) -> None:
    async def main() -> None:
        world = World(7, count)
        await world.until_elected(1)
        await play(world)
        await world.end()

    virtual_time.run(main())


def test_a_killed_leader_has_a_successor_when_its_lease_is_over() -> None:
    async def play(world: World) -> None:
        leader = world.leaders[0]
        await world.restart(leader, resign=False)
        began_s = now_s()
        await world.until_elected(10)
        assert TTL_S * 3 / 4 - 0.1 < now_s() - began_s < TTL_S + 1.2
        assert len(world.epochs) == 2

    scenario(play)


def test_a_leader_that_resigns_has_a_successor_at_once() -> None:
    async def play(world: World) -> None:
        leader = world.leaders[0]
        await world.restart(leader, resign=True)
        began_s = now_s()
        await world.until_elected(1)
        assert now_s() - began_s < 0.3
        assert len(world.epochs) == 2

    scenario(play)


def test_a_leader_without_a_connection_ends_before_the_next_leader_begins() -> None:
    async def play(world: World) -> None:
        leader = world.leaders[0]
        world.ways[leader].open_ = False
        began_s = now_s()
        while world.leaders:
            await world.pass_time(0.02)
        assert now_s() - began_s < TTL_S * 5 / 6
        assert await world.until_elected(TTL_S) != leader
        (reason,) = world.reasons
        assert reason == "the lease was last renewed 2.5 s ago, for 2.5 s (no answer)"

    scenario(play)


def test_without_etcd_there_is_no_leader_until_etcd_is_back() -> None:
    async def play(world: World) -> None:
        for way in world.ways:
            way.open_ = False
        await world.pass_time(TTL_S)
        assert world.leaders == []
        for way in world.ways:
            way.open_ = True
        await world.until_elected(TTL_S + 1)

    scenario(play)


def test_a_short_absence_of_etcd_changes_nothing() -> None:
    async def play(world: World) -> None:
        before = world.leaders
        for way in world.ways:
            way.open_ = False
        await world.pass_time(1.0)
        for way in world.ways:
            way.open_ = True
        await world.pass_time(2 * TTL_S)
        assert world.leaders == before
        assert world.reasons == []

    scenario(play)


def test_deleting_the_key_by_hand_makes_another_leader() -> None:
    async def play(world: World) -> None:
        world.etcd.delete()
        # The other scheduler may lead before this scheduler knows. Fences cover this case.
        world.ways[1 - world.leaders[0]].open_ = False
        await world.pass_time(0.1)
        assert world.leaders == []
        for way in world.ways:
            way.open_ = True
        await world.pass_time(3 * TTL_S)
        assert world.reasons == ["the key in etcd is not ours any more"]
        assert len(world.epochs) == 2

    scenario(play)


def test_a_lease_that_arrives_when_it_is_over_is_not_used() -> None:
    async def play() -> None:
        rng = random.Random(1)
        way = Way(FakeEtcd(rng), rng)
        slow_s = 0.0

        def clock() -> float:
            nonlocal slow_s
            slow_s += TTL_S  # as if this process had been frozen between any two looks at the clock
            return slow_s

        election = Election(way, "a", TTL_S, clock=clock)  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await election.campaign()
        assert election.epoch == 0
        assert way.etcd.leader is None

    virtual_time.run(play())
