"""How the owner's limit of the disk is shared between what a peer keeps. Pure.

The archive comes first, then the votes that joiners need, then training text from the web. So text gives way first, and then
the oldest votes: another machine has both. The archive gives way last, oldest part first. Snapshots have a limit of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_A_GB = 10**9


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


def allowed(disk_gb: float | None, used: Kept, most: Kept) -> Kept:
    """What each may take now, if `used` is on the disk. `most`: the limits of each alone (`archive_gb`, ...)."""
    if disk_gb is None:
        return most
    room = int(disk_gb * BYTES_A_GB)
    archive = min(most.archive, room)
    payloads = min(most.payloads, max(room - min(used.archive, archive), 0))
    text = min(most.text, max(room - min(used.archive, archive) - min(used.payloads, payloads), 0))
    return Kept(archive, payloads, text)
