"""The caps of an owner: how the limit of the disk is shared between what a peer keeps, and the bytes of the local month.

The archive comes first, then the votes that joiners need, then training text from the web. So text gives way first, and then
the oldest votes: another machine has both. The archive gives way last, oldest part first. Snapshots have a limit of their
own.

Bytes of payloads and snapshots are counted across restarts in a file of the home. Refuses to guess: a damaged file counts as
an empty month, and the log says so. A kill loses the bytes of the last look. A clock that is wrong for a while, as at the
start of a machine without a battery for it, empties no month: each has its own count.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.disk import replace_bytes, writing
from protos.limits import PAYLOADS_GB

BYTES_A_GB = 10**9
ARCHIVE_GB, TEXT_GB = 20.0, 10.0


@dataclass(frozen=True)
class Kept:
    """Bytes of the archive, of others' votes and of training text from the web: in use, or allowed."""

    archive: int = 0
    payloads: int = 0
    text: int = 0

    @property
    def total(self) -> int:
        """All three."""
        return self.archive + self.payloads + self.text


def _most(disk_gb: float | None) -> Kept:
    """What each may take alone. Without a limit, and up to 50 GB, they are 20, 20 and 10 GB. What an owner gives beyond goes to
    whichever needs it, and the other two keep theirs."""
    beyond = 0.0 if disk_gb is None else max(disk_gb - ARCHIVE_GB - PAYLOADS_GB - TEXT_GB, 0)
    return Kept(*(int((gb + beyond) * BYTES_A_GB) for gb in (ARCHIVE_GB, PAYLOADS_GB, TEXT_GB)))


def disk_for(archive_bytes: int) -> float:
    """The `disk_gb` that an archive of this size needs."""
    gb = archive_bytes / BYTES_A_GB
    return gb if gb <= ARCHIVE_GB else gb + PAYLOADS_GB + TEXT_GB


def allowed(disk_gb: float | None, used: Kept) -> Kept:
    """What each may take now, if `used` is on the disk."""
    most = _most(disk_gb)
    if disk_gb is None:
        return most
    room = int(disk_gb * BYTES_A_GB)
    archive = min(most.archive, room)
    payloads = min(most.payloads, max(room - min(used.archive, archive), 0))
    text = min(most.text, max(room - min(used.archive, archive) - min(used.payloads, payloads), 0))
    return Kept(archive, payloads, text)


MONTH_FILE = "month.json"
MONTHS_KEPT = 6
"""That the clock has shown before; the last ones."""


class Month:
    """One home's. A single thread counts; others read."""

    def __init__(self, home: Path, log: Any) -> None:
        self._path = home / MONTH_FILE
        self._totals = 0, 0
        self.name, self.up, self.down = "", 0, 0
        self._others: dict[str, tuple[int, int]] = {}
        try:
            told = json.loads(self._path.read_text())
            name, up, down = str(told["month"]), int(told["up"]), int(told["down"])
            others = {str(other): (int(up), int(down)) for other, (up, down) in dict(told.get("others", {})).items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning(f"{self._path}: cannot be read, so this month's traffic counts from now on", why=str(error))
            return
        self.name, self.up, self.down, self._others = name, max(up, 0), max(down, 0), others

    def of(self, month: str) -> tuple[int, int]:
        """Bytes up and down of a month."""
        return (self.up, self.down) if month == self.name else self._others.get(month, (0, 0))

    def count(self, month: str, up_total: int, down_total: int) -> None:
        """Add what came since the last count, of totals since the start. `month` such as 2026-11. Raises DiskError."""
        up, down = up_total - self._totals[0], down_total - self._totals[1]
        if month == self.name and not up and not down:
            return
        if month != self.name:
            known = {**self._others, self.name: (self.up, self.down)} if self.name else {}
            self.name, (self.up, self.down) = month, known.pop(month, (0, 0))
            self._others = dict(list(known.items())[-MONTHS_KEPT:])
        self._totals = up_total, down_total
        self.up, self.down = self.up + up, self.down + down
        with writing(self._path):
            told = {"month": self.name, "up": self.up, "down": self.down, "others": self._others}
            replace_bytes(self._path, json.dumps(told).encode() + b"\n", synced=False)
