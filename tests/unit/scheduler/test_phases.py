"""The table of phases: complete, as documented, and the only way from one phase to another."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_svc.core.requests.phases import TRANSITIONS, Event, Phase, table

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"


def test_the_docs_show_the_table_of_the_code() -> None:
    """Print it with: python -c 'from scheduler_svc.core.requests.phases import table; print(table())'"""
    assert table() in PAGE.read_text(encoding="utf-8")


def test_every_phase_can_be_reached_and_only_the_phase_ended_has_no_exit() -> None:
    assert set(TRANSITIONS.values()) | {Phase.WAITING} == set(Phase)
    assert {phase for phase, _ in TRANSITIONS} == set(Phase) - {Phase.ENDED}
    assert {event for _, event in TRANSITIONS} == set(Event)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[3] / "scheduler_svc").rglob("*.py")), ids=lambda path: path.name
)
def test_no_module_sets_a_phase_by_itself(path: Path) -> None:
    changes = [line for line in path.read_text(encoding="utf-8").splitlines() if ".phase = " in line]
    assert changes == (["        self.phase = TRANSITIONS[self.phase, event]"] if path.name == "request.py" else [])
