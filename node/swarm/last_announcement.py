"""The last announcement that this peer signed is on its disk before another peer gets it: one payload a step in every case.

A peer that is killed and comes back, or that re-syncs, computes other votes for a step that is still open. The log excludes an
author of two announcements of one step, so the peer re-sends its first announcement. If the announced payload is lost, the
peer sits the step out. ADR 19.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protos.announcement import open_announcement
from protos.disk import check_no_folder, write_bytes
from protos.errors import OperatorError, Refusal

NAME = "announced"


@dataclass(frozen=True)
class SignedAnnouncement:
    """A signed announcement: its step, its payload's hash, and its envelope."""

    step: int
    payload_sha256: bytes
    envelope: bytes


class LastAnnouncement:
    """One file in the folder of a peer's run. Raises OperatorError if the file is not this peer's announcement of this run."""

    def __init__(self, folder: Path, run_id: bytes, author: bytes) -> None:
        self._path = folder / NAME
        self.value: SignedAnnouncement | None = None
        check_no_folder(self._path)
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        try:
            _, body = open_announcement(data, run_id=run_id, author=author)
        except Refusal as refusal:
            raise OperatorError(
                f"{self._path} is not this peer's last announcement of this run ({refusal}). Without it the peer may announce "
                "two payloads for a step, and be excluded for that. Wait until the run is a step further, then delete the file"
            ) from refusal
        self.value = SignedAnnouncement(body.step, body.payload_sha256, data)

    def keep(self, signed: SignedAnnouncement) -> None:
        """Durable on return: a power cut does not undo it. Raises DiskError."""
        write_bytes(self._path, signed.envelope)
        self.value = signed
