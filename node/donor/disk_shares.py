"""How the owner's limit of the disk is shared between what a peer keeps. Pure.

The archive comes first, then the votes that joiners need, then training text from the web. So text gives way first, and then
the oldest votes: another machine has both. The archive gives way last, oldest part first. Snapshots have a limit of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

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
