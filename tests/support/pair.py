"""A stack with two schedulers and an etcd that elects one of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.support.etcd import EtcdProcess, start_cluster
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.stack import Stack

SCHEDULERS = ("scheduler", "scheduler-2")
IS_MASTER, EPOCH = "paceline_scheduler_is_master", "paceline_scheduler_epoch"


@dataclass
class Pair(Stack):
    """`up()` makes "scheduler" the leader and "scheduler-2" the standby. Only the first start of "scheduler" runs
    `scheduler_module`.

    `to_etcd`: each scheduler's proxy to etcd. With `num_members` > 1 the schedulers ask all members directly; `members`
    has etcd's own leader first."""

    num_members: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.metrics_ports["scheduler-2"] = free_port()
        self.scheduler_ports = {"scheduler": self.scheduler_port, "scheduler-2": free_port()}
        self.etcd = EtcdProcess(self.folder)
        self.members: list[EtcdProcess] = []
        self.to_etcd = {name: Proxy(self.etcd.port) for name in SCHEDULERS}

    def flags(self, name: str) -> list[str]:
        if name in SCHEDULERS:
            ports = ["--port", str(self.scheduler_ports[name]), "--metrics-port", str(self.metrics_ports[name])]
            urls = [member.url for member in self.members] or [f"http://127.0.0.1:{self.to_etcd[name].port}"]
            return [*ports, "--etcd", ",".join(urls), "--cache", f"127.0.0.1:{self.cache_port}", *self.scheduler_flags]
        return super().flags(name)

    def dialled(self, name: str) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.scheduler_ports.values())

    def up(self, workers: int = 1) -> Pair:
        if self.num_members > 1:
            self.members = start_cluster(self.folder, self.num_members)
            self.members.sort(key=lambda member: not member.is_leader)
        else:
            self.etcd.start()
        # The services that start slowly come first. If they started beside a leader, they could take so much CPU time
        # that the leader would not renew its lease in time, and would end.
        for name in ("cache", *(f"worker-{i + 1}" for i in range(workers)), "gateway"):
            self.start(name)
        self._wait(lambda: (self.metric("paceline_worker_kv_blocks", "worker-1") or 0) > 0, "model loaded")
        self.start("scheduler")
        self.wait_metric(IS_MASTER, 1)
        self.scheduler_module = "services.cli"
        self.start("scheduler-2")
        self.wait_ready()
        self.wait_metric("paceline_scheduler_num_workers", workers)
        self.wait_metric(IS_MASTER, 0, of="scheduler-2")
        return self

    async def ended(self, name: str) -> int:
        """Wait until a scheduler ends by itself; its status. It is not started again."""
        return await asyncio.to_thread(self.processes.pop(name).wait, 200)

    def down(self) -> None:
        super().down()
        for member in (self.etcd, *self.members):
            member.stop()
        for link in self.to_etcd.values():
            link.close()
