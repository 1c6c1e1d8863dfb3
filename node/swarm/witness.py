"""The newest entries that this peer follows, to detect a coordinator that signs two entries for one step.

Takes verified entries only. Writes two entries that exclude each other to a file, as a proof for anyone.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from protos.disk import replace_bytes
from protos.errors import DivergedError
from protos.limits import ENTRIES_PAGE_MAX
from protos.log import SignedEntry

ENTRIES_KEPT_MAX = 1024
ENTRIES_KEPT_BYTES_MAX = 16 << 20


@dataclass(frozen=True)
class FollowedEntry:
    """An entry that this peer follows. Of the entry that this peer started after, it may know the hash alone."""

    step: int
    hash: bytes
    envelope: bytes = b""


class Witness:
    """The newest entries by step, bounded in number and bytes. Not thread-safe."""

    def __init__(self, run_id: bytes, coordinator: bytes, folder: Path) -> None:
        self._run_id, self._coordinator, self._folder = run_id, coordinator, folder
        self._told: OrderedDict[int, FollowedEntry] = OrderedDict()
        self._bytes = 0

    def start(self, step: int, head: bytes) -> None:
        """The log continues after this step, whose entry has this hash (step 0: the run id)."""
        if step not in self._told:
            self._keep(FollowedEntry(step, head))

    def saw(self, signed: SignedEntry) -> None:
        """This peer follows this entry."""
        before = self._told.pop(signed.entry.step, None)
        self._bytes -= len(before.envelope) if before else 0
        self._keep(FollowedEntry(signed.entry.step, signed.hash, signed.envelope))

    def _keep(self, told: FollowedEntry) -> None:
        self._told[told.step] = told
        self._bytes += len(told.envelope)
        while len(self._told) > ENTRIES_KEPT_MAX or (self._bytes > ENTRIES_KEPT_BYTES_MAX and len(self._told) > 2):
            self._bytes -= len(self._told.popitem(last=False)[1].envelope)

    def after(self, step: int, bytes_max: int) -> list[bytes]:
        """The kept entries after a step, without gaps: at most a page, and at most `bytes_max`, except for the first."""
        found: list[bytes] = []
        while len(found) < ENTRIES_PAGE_MAX and (told := self._told.get(step + len(found) + 1)) and told.envelope:
            bytes_max -= len(told.envelope)
            if found and bytes_max < 0:
                break
            found.append(told.envelope)
        return found

    def entry(self, step: int) -> bytes:
        """The entry of a step; empty if it is not kept."""
        told = self._told.get(step)
        return b"" if told is None else told.envelope

    def contradiction(self, signed: SignedEntry) -> FollowedEntry | None:
        """The entry that this peer follows and that cannot be in one log with `signed`; None if there is none."""
        step = signed.entry.step
        same, before = self._told.get(step), self._told.get(step - 1)
        if same is not None and same.hash != signed.hash:
            return same
        if before is not None and before.hash != signed.entry.parent_hash:
            return before
        return None

    def accuse(self, told: FollowedEntry, signed: SignedEntry) -> DivergedError:
        """Keep both entries as evidence. Returns the error that stops this peer."""
        step = signed.entry.step
        what = (
            f"two entries for step {step}"
            if told.step == step
            else f"an entry {step} that does not follow its {told.step}"
        )
        path = self._folder / f"equivocation-{step}.json"
        evidence = {
            "run": self._run_id.hex(),
            "coordinator": self._coordinator.hex(),
            "what": f"the coordinator signed {what}",
            "entries": [
                {"step": told.step, "hash": told.hash.hex(), "envelope": told.envelope.hex()},
                {"step": step, "hash": signed.hash.hex(), "envelope": signed.envelope.hex()},
            ],
        }
        try:
            replace_bytes(path, (json.dumps(evidence, indent=1) + "\n").encode())
            kept = f"both, signed by the coordinator, are in {path}"
        except OSError as error:
            kept = f"the evidence could not be written to {path}: {error.strerror}"
        return DivergedError(
            f"the coordinator signed {what}, so this run has two logs, and this peer cannot tell which one counts; {kept}. "
            "Show it to the run's operator: two coordinators with one key on two databases, or a restored backup, do this"
        )
