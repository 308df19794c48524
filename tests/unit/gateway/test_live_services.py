"""Which services the live view shows as up, and how it counts their restarts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from paceline.v1 import cache_pb2, live_pb2
from services.gateway.live_view import services
from services.gateway.live_view.services import ServiceStates
from services.gateway.openai.gateway import Gateway

UNIX_S = 1_800_000_000.0
EPOCH = int(UNIX_S * 1000)


@dataclass
class Session:
    connected: bool = True
    epoch: int | None = EPOCH
    num_epochs: int = 1


@dataclass
class Stub:
    """The parts of a gateway that the states are made from."""

    draining: bool = False
    session: Session = field(default_factory=Session)


class View:
    """A gateway that is looked at again and again."""

    def __init__(self) -> None:
        self.gateway = Stub()
        self.states = ServiceStates(cast(Gateway, self.gateway))
        self.now_s = 100.0

    def take(
        self,
        workers: dict[str, str] | None,
        cache: int | None = 5,
        epoch: int = EPOCH,
        draining: bool = False,
        after_s: float = 1.0,
        watches_cache: bool = True,
    ) -> dict[str, tuple[str, int | None]]:
        """`workers`: incarnations by name; None without a scheduler. Returns state and restarts by name."""
        self.now_s += after_s
        scheduler = None
        if workers is not None:
            live = [
                live_pb2.LiveWorker(worker=n, name=name, incarnation=run, linked_s=2.5, draining=draining)
                for n, (name, run) in enumerate(workers.items(), 1)
            ]
            scheduler = live_pb2.WatchResponse(epoch=epoch, workers=live, cache_connected=True)
        blocks = cache_pb2.WatchBlocksResponse(started_us=cache) if cache is not None else None
        unix_s = UNIX_S + self.now_s
        self.shown = self.states.take(scheduler, blocks, watches_cache=watches_cache, now_s=self.now_s, unix_s=unix_s)
        return {one.name: (one.state, one.num_restarts) for one in self.shown}


def test_all_services_are_named() -> None:
    view = View()
    assert view.take({"w": "a"}) == {
        "gateway": ("ready", None),
        "scheduler": ("ready", 0),
        "cache": ("ready", 0),
        "w": ("ready", 0),
    }
    up_s = {one.name: one.up_s for one in view.shown}
    assert up_s["scheduler"] == pytest.approx(view.now_s)
    assert up_s["w"] == 2.5
    view.gateway.draining = True
    assert view.take({"w": "a"}, draining=True)["gateway"] == ("draining", None)
    assert view.take({"w": "a"}, draining=True)["w"] == ("draining", 0)


def test_a_killed_worker_is_down_and_comes_back() -> None:
    view = View()
    view.take({"w": "a", "v": "x"})
    found = view.take({"v": "x"})
    assert (found["w"], found["v"]) == (("down", 0), ("ready", 0))
    assert next(one.up_s for one in view.shown if one.name == "w") is None
    assert view.take({"w": "b", "v": "x"})["w"] == ("ready", 1)
    assert view.take({"w": "b", "v": "x"})["w"] == ("ready", 1)


def test_a_worker_that_links_again_has_not_restarted() -> None:
    view = View()
    view.take({"w": "a"})
    view.take({})
    assert view.take({"w": "a"})["w"] == ("ready", 0)


def test_a_killed_scheduler_takes_its_workers_along_for_a_while() -> None:
    view = View()
    view.take({"w": "a", "v": "x"})
    view.gateway.session = Session(connected=False)
    found = view.take(None)
    assert (found["scheduler"], found["w"]) == (("down", 0), ("starting", 0))
    view.gateway.session = Session(epoch=EPOCH + 10, num_epochs=2)
    found = view.take({"w": "a"}, epoch=EPOCH + 10)
    assert (found["scheduler"], found["w"], found["v"]) == (("ready", 1), ("ready", 0), ("starting", 0))
    found = view.take({"w": "a"}, epoch=EPOCH + 10, after_s=services.SETTLING_S)
    assert found["v"] == ("down", 0)


def test_a_killed_cache_comes_back() -> None:
    view = View()
    assert view.take({}, cache=None)["cache"] == ("starting", 0)
    assert view.take({}, cache=5)["cache"] == ("ready", 0)
    assert view.take({}, cache=None)["cache"] == ("down", 0)
    assert view.take({}, cache=6)["cache"] == ("ready", 1)


def test_without_a_connection_to_the_cache_the_scheduler_tells() -> None:
    view = View()
    assert view.take({}, cache=None, watches_cache=False)["cache"] == ("ready", None)
    assert "cache" not in view.take(None, cache=None, watches_cache=False)


def test_gone_workers_are_forgotten() -> None:
    view = View()
    view.take({"w": "a"})
    assert "w" in view.take({}, after_s=services.GONE_SHOWN_S - 1)
    assert "w" not in view.take({}, after_s=2.0)
    view.take({"drained": "a"}, draining=True)
    assert "drained" not in view.take({})
    for number in range(3 * services.MAX_GONE):
        view.take({f"w{number}": "a"})
    found: dict[str, Any] = view.take({})
    assert len(found) == 3 + services.MAX_GONE
    assert f"w{3 * services.MAX_GONE - 1}" in found


def test_workers_of_one_name_are_not_told_apart() -> None:
    view = View()
    live = [live_pb2.LiveWorker(worker=n, name="w", incarnation=f"{n}") for n in (1, 2)]
    for _ in range(2):
        shown = view.states.take(
            live_pb2.WatchResponse(workers=live), None, watches_cache=False, now_s=1.0, unix_s=UNIX_S
        )
    assert [one.num_restarts for one in shown if one.kind == "worker"] == [None, None]
