"""More memory than there is, is refused by what has it: machine, control groups of either version, in a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from tanghulu.errors import ConfigError, Overloaded
from tanghulu.runtime.limits import memory_bounds, refuse_too_much

GIB = 1 << 30
_MEMINFO = f"MemTotal:       {24 << 20} kB\nMemFree:  1 kB\nMemAvailable:   {20 << 20} kB\nHugePages_Total:       0\n"


def _write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    _write(tmp_path, {"proc/meminfo": _MEMINFO})
    return tmp_path


def test_a_machine_without_control_groups(root: Path) -> None:
    assert memory_bounds(root) == [("this machine", 24 * GIB, 20 * GIB)]
    refuse_too_much(20 * GIB, "--memory", root)
    with pytest.raises(Overloaded, match=r"--memory 21.0 GiB: this machine has 20.0 GiB free of 24.0 GiB"):
        refuse_too_much(21 * GIB, "--memory", root)
    with pytest.raises(ConfigError, match=r"--memory 999.0 GiB: this machine has 24.0 GiB; request less"):
        refuse_too_much(999 * GIB, "--memory", root)


def test_groups_of_version_two_and_those_above_them(root: Path) -> None:
    group = "sys/fs/cgroup/pods/mine"
    _write(
        root,
        {
            "proc/self/cgroup": "0::/pods/mine\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": 5 * GIB,
            f"{group}/memory.stat": "anon 1\ninactive_file 0\nactive_file 0\n",
            "sys/fs/cgroup/pods/memory.max": 8 * GIB,
            "sys/fs/cgroup/pods/memory.current": 7 * GIB,
            "sys/fs/cgroup/pods/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB}\nshmem 7\n",
        },
    )
    assert memory_bounds(root)[1:] == [("the control group /pods", 8 * GIB, 4 * GIB)]
    with pytest.raises(ConfigError, match=r"control group /pods has 8.0 GiB"):
        refuse_too_much(9 * GIB, "--memory", root)


def test_a_container_that_sees_its_group_as_the_uppermost(root: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    _write(
        root,
        {
            "proc/self/cgroup": "8:pids:/docker/abc\n4:cpu,memory:/docker/abc\n0::/\n",
            f"{folder}/memory.limit_in_bytes": 2 * GIB,
            f"{folder}/memory.usage_in_bytes": GIB,
            f"{folder}/memory.stat": f"cache 1\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0\n",
        },
    )
    assert memory_bounds(root)[1:] == [("the control group /", 2 * GIB, 3 * GIB // 2)]


def test_nothing_is_refused_where_nothing_is_known(tmp_path: Path) -> None:
    refuse_too_much(1 << 60, "--memory", tmp_path)


def test_this_machine_has_some() -> None:
    assert all(0 <= free <= total or total > 1 << 60 for _, total, free in memory_bounds())
    refuse_too_much(1 << 20, "--memory")
    with pytest.raises(ConfigError, match="request less"):
        refuse_too_much(1 << 60, "--memory")
