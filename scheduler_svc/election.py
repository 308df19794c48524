"""One leader among several schedulers, by a lease in etcd. simulator/network/election.py does the same with events.

If etcd has no leader key, a scheduler writes the key (under a lease) and an epoch above all earlier epochs, in one
transaction. The scheduler with the transaction that succeeds is the leader. If it fails to renew the lease, etcd
deletes the key, and another scheduler takes it.

A leader's time ends before its lease, even if the network fails (core/lease.py). The leader checks the clock before
every action (`holds`), so a frozen leader that wakes up does nothing more. By the epoch, receivers refuse messages that
it sent before the freeze (services/runtime/fence.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from scheduler_svc.core.lease import RENEWALS, LeaseClock, next_epoch
from scheduler_svc.etcd import Etcd, EtcdError, LeaderRecord
from services.runtime.logs import get_logger

log = get_logger(__name__)

RETRY_S = 0.1
REMIND_S = 15.0  # between two log lines about an etcd that stays unreachable


class Election:
    """`campaign()` until elected, `lead()` until it is over, `close()` so that another scheduler can take over at once.

    `address`: the leader's address that other processes see. `clock` gives monotonic seconds, `wall_ms` Unix time in
    milliseconds. `offered_secret`: the cache secret if etcd has none yet; empty: the schedulers share none through
    etcd.
    """

    def __init__(
        self,
        etcd: Etcd,
        address: str,
        ttl_s: int,
        clock: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        offered_secret: bytes = b"",
    ) -> None:
        self.epoch = 0  # of our leadership; 0 before
        self.leader = ""  # address, as last heard
        self.cache_secret = b""  # known before the election is won, if the schedulers share one
        self._offered_secret = offered_secret
        self._etcd = etcd
        self._address = address
        self._ttl_s = ttl_s
        self._clock = clock
        self._wall_ms = wall_ms
        self._lease = 0
        self._lease_clock = LeaseClock()
        self._trouble = ""  # reason of the last failed renewal

    @property
    def holds(self) -> bool:
        """Whether no other scheduler can have been elected by now."""
        return self._lease_clock.holds(self._clock())

    @property
    def why_not(self) -> str:
        """Why we do not hold the lease any more, as far as known."""
        asked_s = self._lease_clock.asked_s
        silent_s, counted_s = self._clock() - asked_s, self._lease_clock.ends_s - asked_s
        trouble = self._trouble or "this process did not run"
        return f"the lease was last renewed {silent_s:.1f} s ago, for {counted_s:.1f} s ({trouble})"

    async def campaign(self) -> int:
        """Stand by until elected. Returns the epoch."""
        reminded_s = float("-inf")
        while True:
            try:
                if self._offered_secret and not self.cache_secret:
                    self.cache_secret = await self._etcd.shared_secret(self._offered_secret)
                record = await self._etcd.read_leader()
                if record.lease is None:
                    if await self._claim(record):
                        return self.epoch
                    continue
                if record.address != self.leader:
                    log.info("standing by", leader=record.address, epoch=record.epoch)
                self.leader = record.address
                # A silent connection would never report anything: look again from time to time.
                await self._etcd.wait_until_left(record, self._ttl_s)
            except EtcdError as error:
                if self._clock() - reminded_s >= REMIND_S:
                    log.warning("etcd does not say which scheduler is the leader, retrying", reason=str(error))
                    reminded_s = self._clock()
                await asyncio.sleep(RETRY_S)

    async def lead(self) -> str:
        """Keep the lease. Returns why we are not the leader any more."""
        tasks = [asyncio.create_task(self._renew()), asyncio.create_task(self._watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._lease_clock.end()
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Give the lease back, so that another scheduler takes over at once. Call it when nothing more is sent."""
        if self.epoch:
            await self._give_back()
        await self._etcd.close()

    async def _give_back(self) -> None:
        self._lease_clock.end()
        try:
            await self._etcd.revoke(self._lease)
        except EtcdError as error:
            log.warning("the lease cannot be given back and has to run out", reason=str(error))

    async def _claim(self, record: LeaderRecord) -> bool:
        asked_s = self._clock()
        self._lease, ttl_s = await self._etcd.grant(self._ttl_s)
        epoch = next_epoch(record.epoch, self._wall_ms())
        won = False
        try:
            won = await self._etcd.claim(record, self._lease, self._address, epoch)
            if won:
                self._lease_clock.extend(asked_s, ttl_s)
                won = self.holds
        finally:
            # Without an answer we may hold the key. If we kept it, no scheduler would lead until the lease expires.
            if not won:
                await self._give_back()
        if won:
            self.epoch, self.leader = epoch, self._address
        return won

    async def _renew(self) -> str:
        while True:
            pause_s = RETRY_S if self._trouble else self._ttl_s / RENEWALS
            await asyncio.sleep(min(pause_s, max(self._lease_clock.ends_s - self._clock(), 0)))
            asked_s = self._clock()
            if not self.holds:
                return self.why_not
            try:
                async with asyncio.timeout(self._lease_clock.ends_s - asked_s):
                    ttl_s = await self._etcd.renew(self._lease)
            except EtcdError as error:
                self._trouble = str(error)
            except TimeoutError:
                self._trouble = "no answer"
            else:
                if not ttl_s:
                    return "etcd has ended the lease"
                self._lease_clock.extend(asked_s, ttl_s)
                self._trouble = ""

    async def _watch(self) -> str:
        """Watch the key: an operator may delete it, to have another leader."""
        while True:
            try:
                record = await self._etcd.read_leader()
                if record.lease != self._lease:
                    return "the key in etcd is not ours any more"
                await self._etcd.wait_until_left(record, self._ttl_s)
            except EtcdError:  # if etcd stays unreachable, _renew ends the leadership
                await asyncio.sleep(RETRY_S)
