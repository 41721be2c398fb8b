"""The memory that a process may have is the smallest of all limits on it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backend.engine.units import MIB
from common.machine_memory import free_memory, machine_memory

WHOLE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V2 = ("sys/fs/cgroup", "memory.max", "memory.current")
HYBRID = ("sys/fs/cgroup/unified", "memory.max", "memory.current")
Version = tuple[str, str, str]
V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")


def limit(root: Path, version: Version, group: str, most: str, used: int = 0) -> None:
    folder, limit_name, used_name = version
    place = root / folder / group
    place.mkdir(parents=True, exist_ok=True)
    (place / limit_name).write_text(f"{most}\n")
    (place / used_name).write_text(f"{used}\n")


def belongs(root: Path, lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)


def test_without_limits_it_is_the_machines_memory(tmp_path: Path) -> None:
    assert machine_memory(tmp_path) == WHOLE
    belongs(tmp_path, "0::/\n")
    limit(tmp_path, V2, "", "max")
    assert machine_memory(tmp_path) == WHOLE


@pytest.mark.parametrize("version", [V2, V1])
def test_in_a_container_its_own_group_is_the_root(tmp_path: Path, version: Version) -> None:
    belongs(tmp_path, "4:memory:/outside/it\n0::/outside/it\n")
    limit(tmp_path, version, "", str(100 * MIB), 30 * MIB)
    assert machine_memory(tmp_path) == 100 * MIB
    assert free_memory(tmp_path) == 70 * MIB


@pytest.mark.parametrize(
    ("version", "line"),
    [(V2, "0::/a/b"), (HYBRID, "0::/a/b"), (V1, "4:cpu,memory:/a/b")],
)
def test_every_group_around_the_process_limits_it(
    tmp_path: Path, version: Version, line: str
) -> None:
    belongs(tmp_path, f"9:name=systemd:/x\n{line}\n")
    limit(tmp_path, version, "a/b", str(300 * MIB), 50 * MIB)
    assert machine_memory(tmp_path) == 300 * MIB
    limit(tmp_path, version, "a", str(200 * MIB), 190 * MIB)
    assert machine_memory(tmp_path) == 200 * MIB
    assert free_memory(tmp_path) == 10 * MIB
    limit(tmp_path, version, "a/c", str(1 * MIB))
    assert machine_memory(tmp_path) == 200 * MIB
