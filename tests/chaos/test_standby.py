"""Two schedulers; a real etcd elects the leader. The leader gets faults under running streams: then the other scheduler
takes over, and every stream continues token for token.

The tests print how long that took (`pytest -s`), but do not assert it: other processes may use the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from scheduler_svc.standby import LOST_STATUS
from tests.support import load
from tests.support.etcd import needs_etcd
from tests.support.pair import EPOCH, IS_MASTER, SCHEDULERS, Pair

VOCAB, NUM_WORKERS = 900, 2
# A stream of many tokens lasts longer than a leader continues without etcd (4.2 s).
FEW_TOKENS, MANY_TOKENS = 300, 1400
RUNNING, WORKERS = "paceline_scheduler_num_requests_running", "paceline_scheduler_num_workers"
Fault = Callable[[Pair, str, str], Coroutine[Any, Any, None]]

# On a busy machine each fault takes a minute.
pytestmark = [needs_etcd, pytest.mark.timeout(900)]


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("standby"))
    try:
        yield pair
    finally:
        pair.down()


async def elected(pair: Pair, name: str) -> None:
    await asyncio.to_thread(pair.wait_metric, IS_MASTER, 1, of=name)


async def killed(pair: Pair, leader: str, standby: str) -> None:
    pair.kill(leader)
    await elected(pair, standby)


async def terminated(pair: Pair, leader: str, standby: str) -> None:
    process = pair.processes[leader]
    await asyncio.to_thread(pair.kill, leader, signal.SIGTERM)
    assert process.returncode == 0
    await elected(pair, standby)


async def frozen_and_woken(pair: Pair, leader: str, standby: str) -> None:
    """The old leader wakes up with messages of workers and gateways in its inbox, after a new leader was elected."""
    pair.processes[leader].send_signal(signal.SIGSTOP)
    await elected(pair, standby)
    began_s = time.monotonic()
    pair.processes[leader].send_signal(signal.SIGCONT)
    assert await pair.ended(leader) == LOST_STATUS
    print(f"    the zombie ended {time.monotonic() - began_s:.2f} s after it woke")


async def frozen_for_long(pair: Pair, leader: str, standby: str) -> None:
    """The old leader wakes up long after all peers have left it."""
    pair.processes[leader].send_signal(signal.SIGSTOP)
    await elected(pair, standby)
    await asyncio.to_thread(pair.wait_metric, WORKERS, NUM_WORKERS, of=standby)
    pair.processes[leader].send_signal(signal.SIGCONT)
    assert await pair.ended(leader) == LOST_STATUS


async def cut_off_from_etcd(pair: Pair, leader: str, standby: str) -> None:
    pair.to_etcd[leader].cut()
    assert await pair.ended(leader) == LOST_STATUS
    await elected(pair, standby)
    pair.to_etcd[leader].heal()


async def silent_way_to_etcd(pair: Pair, leader: str, standby: str) -> None:
    pair.to_etcd[leader].silence()
    assert await pair.ended(leader) == LOST_STATUS
    await elected(pair, standby)
    pair.to_etcd[leader].heal()


async def etcd_killed(pair: Pair, leader: str, standby: str) -> None:
    """No scheduler is the leader until etcd is back."""
    pair.etcd.stop()
    assert await pair.ended(leader) == LOST_STATUS
    await asyncio.sleep(2)
    assert pair.metric(IS_MASTER, standby) == 0
    await asyncio.to_thread(pair.etcd.start)
    began_s = time.monotonic()
    await elected(pair, standby)
    print(f"    etcd was back {time.monotonic() - began_s:.2f} s before there was a leader")


@asynccontextmanager
async def undisturbed(pair: Pair, num_tokens: int) -> AsyncIterator[Callable[[str, str, Fault], Awaitable[None]]]:
    """Streams, and their tokens in an undisturbed run. Gives a function that plays a fault under them."""
    prompts = load.random_prompts(9, 3, VOCAB)
    greedy, seeded = ([load.Wanted(prompt, num_tokens) for prompt in part] for part in (prompts[:6], prompts[6:]))

    async def ask() -> list[load.Got]:
        answers = await asyncio.gather(
            load.stream_all(pair.url, greedy), load.stream_all(pair.url, seeded, temperature=1.0, seed=5)
        )
        return [got for part in answers for got in part]

    right = await ask()

    async def play(leader: str, standby: str, fault: Fault) -> None:
        epoch = pair.metric(EPOCH, leader)
        serving = asyncio.create_task(ask())
        await asyncio.to_thread(pair.wait_metric, RUNNING, len(prompts), of=leader)
        began_s = time.monotonic()
        happening = asyncio.create_task(fault(pair, leader, standby))
        await elected(pair, standby)
        new_leader_s = time.monotonic() - began_s
        assert not serving.done()  # what the fault does after this may take longer than the streams do
        await happening
        await asyncio.to_thread(pair.wait_metric, WORKERS, NUM_WORKERS, of=standby)
        workers_s = time.monotonic() - began_s
        got = await serving
        pause_s = max(one.longest_pause_s for one in got)
        print(
            f"{fault.__name__}: new leader after {new_leader_s:.2f} s, all workers after {workers_s:.2f} s, "
            f"longest pause of a stream {pause_s:.2f} s"
        )
        assert [(one.errors, one.text) for one in got] == [([], one.text) for one in right], pair.logs()
        assert (pair.metric(EPOCH, standby) or 0) > (epoch or 0)
        await asyncio.to_thread(pair.wait_metric, RUNNING, 0, of=standby)
        await asyncio.to_thread(pair.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0, of=standby)
        assert_epochs_rise(pair)

    yield play


def assert_epochs_rise(pair: Pair) -> None:
    """The epochs of the schedulers rise in the log of each worker and gateway."""
    for name in ("worker-1", "worker-2", "gateway"):
        lines = [json.loads(line) for line in (pair.folder / f"{name}.log").read_text().splitlines()]
        epochs = [line["epoch"] for line in lines if line["message"] in ("registered", "session open")]
        assert epochs == sorted(epochs)


async def play_all(pair: Pair, faults: list[Fault], num_tokens: int) -> None:
    """One after the other; the leader of one fault is the standby of the next."""
    await asyncio.to_thread(pair.up, NUM_WORKERS)
    async with undisturbed(pair, num_tokens) as play:
        leader, standby = SCHEDULERS
        for i, fault in enumerate(faults):
            if i:
                await asyncio.to_thread(pair.start, standby)
                await asyncio.to_thread(pair.wait_metric, IS_MASTER, 0, of=standby)
            await play(leader, standby, fault)
            leader, standby = standby, leader


async def test_the_standby_takes_over_from_a_zombie(pair: Pair) -> None:
    # While other tests run, a leader may get no CPU time for 4 s, and then it ends.
    pair.scheduler_flags = ["--etcd-ttl-s", "12"]
    await play_all(pair, [frozen_and_woken], FEW_TOKENS)


@pytest.mark.skipif("PACELINE_CHAOS" not in os.environ, reason="takes two minutes: run by make chaos")
async def test_the_standby_takes_over_whatever_happens(pair: Pair) -> None:
    faults: list[Fault] = [
        terminated,
        killed,
        frozen_and_woken,
        frozen_for_long,
        cut_off_from_etcd,
        silent_way_to_etcd,
        etcd_killed,
    ]
    await play_all(pair, faults, MANY_TOKENS)


@pytest.mark.skipif("PACELINE_CHAOS" not in os.environ, reason="run by make chaos")
async def test_a_short_absence_of_etcd_is_not_noticed(pair: Pair) -> None:
    await asyncio.to_thread(pair.up, NUM_WORKERS)
    epoch = pair.metric(EPOCH)
    wanted = [load.Wanted(prompt, MANY_TOKENS) for prompt in load.random_prompts(8, 3, VOCAB)]
    serving = asyncio.create_task(load.stream_all(pair.url, wanted))
    await asyncio.to_thread(pair.wait_metric, RUNNING, len(wanted))
    assert pair.etcd.process is not None
    pair.etcd.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(1.5)
    pair.etcd.process.send_signal(signal.SIGCONT)
    assert not [got.errors for got in await serving if got.errors]
    await asyncio.sleep(5)  # a lease's time
    assert pair.metric(EPOCH) == epoch
    assert pair.metric(IS_MASTER, "scheduler-2") == 0


@pytest.mark.skipif("PACELINE_CHAOS" not in os.environ, reason="run by make chaos")
async def test_one_of_three_members_of_etcd_may_die(pair: Pair) -> None:
    """The etcd member that both schedulers ask first dies: the leader stays, and a standby can still be elected."""
    pair.num_members = 3
    await asyncio.to_thread(pair.up, NUM_WORKERS)
    async with undisturbed(pair, MANY_TOKENS) as play:
        epoch = pair.metric(EPOCH)
        wanted = [load.Wanted(prompt, MANY_TOKENS) for prompt in load.random_prompts(8, 3, VOCAB)]
        serving = asyncio.create_task(load.stream_all(pair.url, wanted))
        await asyncio.to_thread(pair.wait_metric, RUNNING, len(wanted))
        pair.members[0].stop()
        assert not [got.errors for got in await serving if got.errors]
        await asyncio.sleep(6)  # a lease's time, and a second
        assert pair.metric(EPOCH) == epoch
        assert pair.metric(IS_MASTER, "scheduler-2") == 0
        await play(*SCHEDULERS, killed)


@pytest.mark.skipif("PACELINE_CHAOS" not in os.environ, reason="run by make chaos")
async def test_a_leader_that_ignores_its_lease_is_refused(pair: Pair) -> None:
    """Only the epochs help here: the cache follows the next leader, and the old leader ends."""
    pair.scheduler_module = "tests.support.zombie_scheduler"
    await play_all(pair, [cut_off_from_etcd], MANY_TOKENS)
    assert "the cache says: a scheduler of epoch" in (pair.folder / "scheduler.log").read_text()
