"""How much memory this process may have: the machine's, its control groups', its own limits.

A process that exceeds its group's limit is killed without a word, so the limit has to be known
before memory is given away. Groups lie in each other, and each bounds all that is in it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Where the groups are, and how a limit and what is used of it are called there: version 2, then 1.
_VERSIONS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current"),
    "hybrid": ("sys/fs/cgroup/unified", "memory.max", "memory.current"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def machine_memory(root: Path = Path("/")) -> int:
    """RAM in bytes that this process may have: the machine's, or its groups' if less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *(limit for limit, _ in _group_limits(root))])


def reserve(memory: int) -> int:
    """What is left of so much RAM to whatever else runs on the machine; bytes."""
    return min(max(2 << 30, memory // 8), memory // 2)


def free_memory(root: Path = Path("/")) -> int:
    """RAM in bytes that the machine could give away now; all of it where it does not say."""
    free = [limit - used for limit, used in _group_limits(root)]
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):  # not Linux
        pass
    return max(min(free, default=machine_memory(root)), 0)


def own_memory(root: Path = Path("/")) -> int:
    """RAM in bytes that this process has now; 0 where the system does not say."""
    return _statm(root)[1]


def address_room(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still map (RLIMIT_AS); None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else max(limit - _statm(root)[0], 0)


def _statm(root: Path) -> tuple[int, int]:
    """Bytes of addresses and of RAM."""
    try:
        addresses, resident = (root / "proc/self/statm").read_text().split()[:2]
    except (OSError, ValueError):  # not Linux
        return 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return int(addresses) * page, int(resident) * page


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limit and the use of each group that this process is in and that has a limit."""
    for name, group in _groups(root):
        folder, limit, used = _VERSIONS[name]
        for part in (group, *group.parents):
            place = root / folder / str(part).lstrip("/")
            try:
                yield int((place / limit).read_text()), int((place / used).read_text())
            except (OSError, ValueError):  # not there, or `max`
                continue


def _groups(root: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """The groups of this process (cgroups(7)). In a container the top one is its own."""
    top = PurePosixPath("/")
    groups = dict.fromkeys(_VERSIONS, top)
    try:
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if not names:
                groups[""] = groups["hybrid"] = PurePosixPath(path)
            elif "memory" in names.split(","):
                groups["memory"] = PurePosixPath(path)
    except (OSError, ValueError):
        pass
    yield from groups.items()
