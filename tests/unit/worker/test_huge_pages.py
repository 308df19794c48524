"""The weights and the KV pool lie in huge pages, where Linux has them, and the weights stay what they were."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from gpu_worker.cpu import huge_pages
from gpu_worker.cpu.huge_pages import use_huge_pages, whole_pages
from gpu_worker.kv.pool import allocate_pool

SIZE = 2 << 20


def at(*places: tuple[float, float]) -> list[tuple[int, int]]:
    """Begins and ends of ranges, in pages."""
    return [(int(begin * SIZE), int(end * SIZE)) for begin, end in places]


class Placed:
    """Stands for an array in a range of memory."""

    def __init__(self, place: tuple[int, int]) -> None:
        self.ctypes, self.nbytes = self, place[1] - place[0]
        self.data = place[0]


@pytest.mark.parametrize(
    ("arrays", "pages"),
    [
        ([], []),
        (at((1, 3)), at((1, 3))),
        (at((0.5, 2.5)), at((1, 2))),
        (at((0.5, 1.9)), at()),
        (at((0.5, 1.4), (1.4, 2.5)), at((1, 2))),
        (at((1.7, 2.5), (0.5, 1.4)), at((1, 2))),  # in any order, with a small gap
        (at((1, 2), (3, 4)), at((1, 2), (3, 4))),
        (at((1, 5), (2, 3), (5, 6)), at((1, 6))),
    ],
)
def test_arrays_side_by_side_share_whole_pages(arrays: list[tuple[int, int]], pages: list[tuple[int, int]]) -> None:
    assert whole_pages([Placed(place) for place in arrays], SIZE) == pages  # type: ignore[misc]


def has_huge_pages() -> bool:
    probe = np.ones(3 * SIZE, np.uint8)
    with capture_logs() as lines:
        use_huge_pages([probe])
    return bool(lines[0]["mib"])


needs_huge_pages = pytest.mark.skipif(not has_huge_pages(), reason="this system has no huge pages of 2 MiB")


def huge_kib(address: int) -> int:
    """How much of the mapping with this address lies in huge pages."""
    maps = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^AnonHugePages: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    (kib,) = [int(kib) for begin, end, kib in maps if int(begin, 16) <= address < int(end, 16)]
    return kib


@needs_huge_pages
def test_arrays_move_to_huge_pages_and_stay_what_they_were() -> None:
    memory = mmap.mmap(-1, 8 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.int64)
    array[:] = np.arange(len(array))
    with capture_logs() as lines:
        use_huge_pages([array])
    assert np.array_equal(array, np.arange(len(array)))
    (line,) = lines
    assert line["of"] == 16
    assert line["mib"] >= 14
    assert huge_kib(array.ctypes.data) >= 14 << 10


@needs_huge_pages
def test_pages_behind_one_that_cannot_move_do_move() -> None:
    memory = mmap.mmap(-1, 9 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8)
    begin = -array.ctypes.data % SIZE
    array[:] = 1
    memory.madvise(mmap.MADV_NOHUGEPAGE, begin + 2 * SIZE + SIZE // 2, SIZE)  # as between two other mappings
    with capture_logs() as lines:
        use_huge_pages([array[begin : begin + 8 * SIZE]])
    (line,) = lines
    assert (line["mib"], line["of"]) == (12, 16)
    assert huge_kib(array.ctypes.data + begin + 4 * SIZE) >= 8 << 10
    assert array.all()


@needs_huge_pages
def test_a_new_kv_pool_is_zero_and_lies_in_huge_pages() -> None:
    storage = allocate_pool(32767, 16, 1, 1, 64, torch.float32, torch.device("cpu")).storage
    assert storage.nbytes == 256 << 20
    assert not storage.count_nonzero()
    # malloc may have up to 64 MiB in small pages from before.
    assert huge_kib(storage.data_ptr() + SIZE) >= 128 << 10


@pytest.mark.parametrize(
    ("settings", "reason"), [({"enabled": "always madvise [never]"}, "says never"), ({}, "No such file")]
)
def test_without_huge_pages_the_log_says_why(
    settings: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in settings.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    array = np.ones(8 * SIZE, np.uint8)
    with capture_logs() as lines:
        use_huge_pages([array])
    (line,) = lines
    assert reason in line["reason_for_small_pages"]
    assert (line["mib"], line["of"]) == (0, 16)
    assert array.all()
