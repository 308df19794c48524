"""The memory that is left: the machine's, or that of the control groups around this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.runtime.memory.available import GIB, AvailableMemory, available_memory, oom_kills


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {32 * 2**20} kB\nMemAvailable: {20 * 2**20} kB\n"}
V2 = "sys/fs/cgroup/kubepods/pod1"
V1 = "sys/fs/cgroup/memory/docker/abc"


def test_without_control_groups_the_limit_is_the_machines_memory(tmp_path: Path) -> None:
    assert available_memory(system(tmp_path, MEMINFO)) == AvailableMemory(20 * GIB, "the machine's memory")


def test_the_memory_of_a_system_without_such_files_is_unknown(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    assert oom_kills(tmp_path) is None


@pytest.mark.parametrize("at", [f"{V2}/box", V2])
def test_a_cgroup_v2_limit_on_any_level_counts_and_file_cache_is_no_usage(tmp_path: Path, at: str) -> None:
    files = {
        **MEMINFO,
        "proc/self/cgroup": "0::/kubepods/pod1/box\n",
        f"{V2}/memory.max": "max\n",
        f"{V2}/memory.current": "1\n",
        f"{V2}/box/memory.max": "max\n",
        f"{V2}/box/memory.current": "1\n",
        f"{at}/memory.max": f"{8 * GIB}\n",
        f"{at}/memory.current": f"{6 * GIB}\n",
        f"{at}/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        f"{V2}/box/memory.events": "low 0\noom 4\noom_kill 3\n",
    }
    root = system(tmp_path, files)
    assert available_memory(root) == AvailableMemory(3 * GIB, "a cgroup limit of 8.0 GiB")
    assert oom_kills(root) == 3


def test_version_1_limits_count(tmp_path: Path) -> None:
    files = {
        **MEMINFO,
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        f"{V1}/memory.limit_in_bytes": f"{4 * GIB}\n",
        f"{V1}/memory.usage_in_bytes": f"{GIB}\n",
        f"{V1}/memory.stat": "total_inactive_file 0\n",
        f"{V1}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    }
    root = system(tmp_path, files)
    assert available_memory(root) == AvailableMemory(3 * GIB, "a cgroup limit of 4.0 GiB")
    assert oom_kills(root) == 1


def test_a_cgroup_v1_without_a_limit_does_not_count(tmp_path: Path) -> None:
    files = {
        **MEMINFO,
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
    }
    assert available_memory(system(tmp_path, files)) == AvailableMemory(20 * GIB, "the machine's memory")


def test_a_container_that_sees_the_path_of_its_host_finds_its_own_mount(tmp_path: Path) -> None:
    files = {
        **MEMINFO,
        "proc/self/cgroup": "0::/system.slice/docker-abc.scope\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
    }
    assert available_memory(system(tmp_path, files)) == AvailableMemory(GIB, "a cgroup limit of 2.0 GiB")


def test_without_a_control_group_the_machines_own_count_of_kills_is_read(tmp_path: Path) -> None:
    assert oom_kills(system(tmp_path, {"proc/vmstat": "nr_free_pages 1\noom_kill 7\n"})) == 7
