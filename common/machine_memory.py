"""Determines how much memory this process may use.

The machine, control groups and the process itself have limits. The kernel kills a process that
exceeds the limit of its group, without an error, so the limit must be known in advance. Groups are
nested, and each limits all groups inside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# For each kind of cgroup hierarchy: its folder, and the files with a group's limit, use and events.
_V2 = ("memory.max", "memory.current", "memory.events")
_VERSIONS = {
    "": ("sys/fs/cgroup", *_V2),
    "hybrid": ("sys/fs/cgroup/unified", *_V2),
    "memory": (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "memory.oom_control",
    ),
}
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h


def machine_memory(root: Path = Path("/")) -> int:
    """Return the bytes of RAM for this process: of the machine, or a smaller limit of a group."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *(limit for limit, _ in _group_limits(root))])


def reserve(memory: int) -> int:
    """Return the bytes of RAM that other programs need on a machine with `memory` bytes."""
    return min(max(2 << 30, memory // 8), memory // 2)


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes of RAM that are available now; all RAM if the system does not report it."""
    free = [limit - used for limit, used in _group_limits(root)]
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):  # not Linux
        pass
    return max(min(free, default=machine_memory(root)), 0)


def own_memory(root: Path = Path("/")) -> int:
    """Return the bytes of RAM that this process uses; 0 if the system does not report it."""
    return _statm(root)[1]


def kills_for_memory(root: Path = Path("/")) -> int:
    """Return how many processes of this process's group the kernel has killed to free memory.

    Returns 0 if the system does not count them.
    """
    for name, group in _groups(root):
        folder, *_, events = _VERSIONS[name]
        for part in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError, KeyError):
                lines = (root / folder / str(part).lstrip("/") / events).read_text().splitlines()
                return int(dict(line.split() for line in lines)["oom_kill"])
    return 0


def free_addresses(root: Path = Path("/")) -> int | None:
    """Return the unused bytes of this process's address space; None without a limit (RLIMIT_AS)."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else max(limit - _statm(root)[0], 0)


def return_large_blocks() -> None:
    """Make glibc return blocks of 4 MiB or more to the system when they are freed.

    By default, this threshold rises to the size of freed blocks, up to 32 MiB, so requests of
    10 MiB would fragment the heap.
    """
    with contextlib.suppress(AttributeError, OSError):  # other C libraries
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 4 << 20)


def return_freed_memory() -> None:
    """Make glibc return all freed blocks to the system, except blocks between used blocks."""
    with contextlib.suppress(AttributeError, OSError):  # other C libraries
        ctypes.CDLL(None).malloc_trim(0)


def _statm(root: Path) -> tuple[int, int]:
    """Return this process's bytes of address space and of RAM."""
    try:
        addresses, resident = (root / "proc/self/statm").read_text().split()[:2]
    except (OSError, ValueError):  # not Linux
        return 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return int(addresses) * page, int(resident) * page


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the used bytes of each group with a limit that contains this process."""
    for name, group in _groups(root):
        folder, limit, used, _ = _VERSIONS[name]
        for part in (group, *group.parents):
            place = root / folder / str(part).lstrip("/")
            try:
                yield int((place / limit).read_text()), int((place / used).read_text())
            except (OSError, ValueError):  # not there, or `max`
                continue


def _groups(root: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """Yield the groups of this process (cgroups(7)), the container's included."""
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
