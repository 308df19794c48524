"""Ids of events: what they say, and what is refused."""

from __future__ import annotations

import pytest

from services.gateway.errors import ApiError
from services.gateway.openai.event_ids import MAX_CHOICES, ChoicePosition, StreamProgress, parse_event_id

LIMITS = [10, 20, 30]


def id_of(line: bytes) -> str:
    text = line.decode()
    assert text.startswith("id: ")
    assert text.endswith("\n")
    return text[4:-1]


def test_an_id_says_how_far_every_choice_is() -> None:
    progress = StreamProgress(0x68E7A1B2, 3)
    progress.read(0, [5, 6])
    first = progress.line(0)
    progress.read(2, [9])  # read, not shown
    assert id_of(progress.first_line(1)).endswith(".2,0,")
    progress.read(0, [7])
    progress.line(2)
    line = progress.line(0, ended=True)
    found = parse_event_id(id_of(line), LIMITS, has_usage=False)
    assert found.positions == (ChoicePosition(3, True), ChoicePosition(0), ChoicePosition(1))
    assert (found.created_s, found.after, found.checksum) == (0x68E7A1B2, "", progress.checksum)
    positions = parse_event_id(id_of(first), LIMITS, has_usage=False).positions
    assert positions == (ChoicePosition(2), ChoicePosition(), ChoicePosition())


def test_the_checksum_depends_on_the_tokens_and_not_on_how_they_are_chunked() -> None:
    def checksum(*reads: tuple[int, list[int]]) -> int:
        progress = StreamProgress(1, 2)
        for index, tokens in reads:
            progress.read(index, tokens)
        for index in (1, 0):
            progress.line(index)
        return progress.checksum

    right = checksum((0, [1, 2, 3]), (1, [4]))
    assert right == checksum((0, [1]), (1, [4]), (0, [2, 3]))
    assert right != checksum((0, [4]), (1, [1, 2, 3]))
    assert right != checksum((0, [1, 2, 5]), (1, [4]))
    assert checksum((0, [1]), (1, [1])) != checksum((0, [2]), (1, [2]))


def test_an_event_id_after_the_choices_names_usage_or_done() -> None:
    progress = StreamProgress(7, 1)
    progress.read(0, [1])
    progress.line(0, ended=True)
    for after in ("u", "d"):
        found = parse_event_id(id_of(progress.end_line(after)), [1], has_usage=True)
        assert (found.positions, found.after) == ((ChoicePosition(1, True),), after)


def test_a_stream_of_too_many_choices_has_no_ids() -> None:
    progress = StreamProgress(7, MAX_CHOICES + 1)
    progress.read(0, [1])
    assert (progress.line(0), progress.first_line(1), progress.end_line("d")) == (b"", b"", b"")


@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_stream_has_no_ids_unless_the_request_asks_for_them(num_choices: int) -> None:
    progress = StreamProgress(7, num_choices, wanted=False)
    progress.read(0, [1])
    lines = progress.first_line(0), progress.line(0), progress.line(0, ended=True), progress.end_line("d")
    assert lines == (b"",) * 4


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "x.0000ffff.1,2,3",
        "1.ffff.1,2,3",
        "1.0000ffff.1,2",
        "1.0000ffff.1,2,3,4",
        "1.0000ffff.1,-2,3",
        "1.0000ffff.1,,31",
        "1.0000ffff.1,21e,3",
        "1.0000ffff.1,2,3.x",
        "1.0000ffff.1e,2e,3.d",
        "1.0000ffff.1e,2e,3e.u",
        "1.0000ffff.1e2,2,3",
        "1.0000FFFF.1,2,3",
        "1.0000ffff.99999999999999999999,2,3",
        "é" * 500,
        "1.0000ffff." + "1," * 5000,
    ],
)
def test_an_event_id_that_the_stream_cannot_have_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match="Last-Event-ID: ") as refused:
        parse_event_id(text, LIMITS, has_usage=False)
    assert (refused.value.status, refused.value.param) == (400, "Last-Event-ID")
    assert len(refused.value.message) < 200
