"""The port of a worker's /metrics when no setting names one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpu_worker import server
from gpu_worker.settings import WorkerSettings


class Asked(Exception):
    pass


@pytest.mark.parametrize(("chosen", "wanted"), [({}, (9103, True)), ({"metrics_port": 9103}, (9103, False))])
async def test_only_the_default_port_is_replaced_by_a_free_one(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any], wanted: tuple[int, bool]
) -> None:
    """A second worker on a machine starts on a free port. If a setting names a port that is taken, the start fails."""

    def start(host: str, port: int, *, or_free: bool) -> None:
        raise Asked(port, or_free)

    monkeypatch.setattr(server, "start_metrics_server", start)
    with pytest.raises(Asked) as asked:
        await server.run_worker(WorkerSettings(**chosen), asyncio.Event())
    assert asked.value.args == wanted
