"""How many cores this process may use: those of the machine, of its affinity, and of its container's quota of CPU time.

A container with a quota of two cores sees all of the machine's. With a thread for each of them, it computes for a moment and
then stands still until the next period. Refuses nothing: a file that is not there sets no limit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

GROUPS: Final = Path("/proc/self/cgroup")
ROOT: Final = Path("/sys/fs/cgroup")
MOUNTS_OF_CPU: Final = ("cpu,cpuacct", "cpu", "cpuacct,cpu", "unified", "")
"""Folders of the CPU controller below ROOT: version 1 has one of its own, version 2 has none."""


def usable_cores(groups: Path = GROUPS, root: Path = ROOT) -> int:
    """At least 1. A quota of one and a half cores counts as two."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _quotas(groups, root)]
    return max(min([here, *quotas]), 1)


def _quotas(groups: Path, root: Path) -> Iterator[float]:
    """In cores: of the process's group, and of all groups around it, in both versions of cgroup."""
    for path in {path for controllers, path in _paths(groups) if controllers in ("", "cpu")}:
        for mount in MOUNTS_OF_CPU:
            folder = root / mount
            # a container sees its own group as the root, or its path on the host, which is not there
            for group in _outwards(path):
                yield from _of_group(folder / group)


def _paths(groups: Path) -> Iterator[tuple[str, str]]:
    """Controllers (empty: version 2) and path of each group that this process is in."""
    yield "", ""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        yield "cpu" if "cpu" in controllers.split(",") else controllers, path.strip("/")


def _outwards(path: str) -> Iterator[str]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield "/".join(parts[:length])


def _of_group(folder: Path) -> Iterator[float]:
    most, period = _words(folder / "cpu.max", 2)  # version 2
    if not most:
        [most], [period] = _words(folder / "cpu.cfs_quota_us", 1), _words(folder / "cpu.cfs_period_us", 1)
    if most.isdigit() and period.isdigit() and int(most) and int(period):
        yield int(most) / int(period)


def _words(file: Path, number: int) -> list[str]:
    """So many first words of a file; empty ones if it has fewer, or is not there."""
    try:
        words = file.read_text().split()
    except (OSError, UnicodeDecodeError):
        words = []
    return [*words, *[""] * number][:number]
