"""The cores that a process may use, and the threads that a worker chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.runtime import processes
from services.runtime.processes import LARGE_WEIGHTS_BYTES, core_quota, default_threads


@pytest.mark.parametrize(
    ("cores", "weights_bytes", "workers", "threads"),
    [
        (1, LARGE_WEIGHTS_BYTES, 1, 1),
        (2, LARGE_WEIGHTS_BYTES - 1, 1, 1),
        (2, LARGE_WEIGHTS_BYTES, 1, 2),
        (2, LARGE_WEIGHTS_BYTES, 2, 1),
        (3, LARGE_WEIGHTS_BYTES, 1, 2),
        (8, 0, 1, 7),
        (8, LARGE_WEIGHTS_BYTES, 2, 4),
        (8, 0, 3, 2),
        (2, 0, 5, 1),
    ],
)
def test_a_worker_leaves_a_core_to_others_except_with_a_large_model_on_two_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, weights_bytes: int, workers: int, threads: int
) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: cores)
    monkeypatch.setattr(processes, "core_quota", lambda: None)
    assert default_threads(weights_bytes, workers) == threads


@pytest.mark.parametrize(("quota", "threads"), [(4.5, 3), (2.0, 2), (0.5, 1), (100.0, 63)])
def test_a_worker_counts_the_cores_of_its_control_group(
    monkeypatch: pytest.MonkeyPatch, quota: float, threads: int
) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 64)
    monkeypatch.setattr(processes, "core_quota", lambda: quota)
    assert default_threads(LARGE_WEIGHTS_BYTES) == threads


def test_the_smallest_limit_of_the_control_groups_counts(tmp_path: Path) -> None:
    assert core_quota(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"\nno group\n0::/\xff\n0::/a/b\n")
    for name, limit in (("a/b", "max 100000"), ("a", "150000 100000"), ("", "400000 100000")):
        (tmp_path / "sys/fs/cgroup" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / name / "cpu.max").write_text(limit)
    assert core_quota(tmp_path) == 1.5
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/x\n5:memory:/\n")
    folder = tmp_path / "sys/fs/cgroup/cpu"
    folder.mkdir()
    (folder / "cpu.cfs_period_us").write_text("100000")
    (folder / "cpu.cfs_quota_us").write_text("-1")
    assert core_quota(tmp_path) is None
    (folder / "cpu.cfs_quota_us").write_text("200000")
    assert core_quota(tmp_path) == 2.0
