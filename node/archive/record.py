"""The recorder keeps the archive of a run during the run. If the archive is full, the oldest segment goes; the rest can be
replayed.

The recorder writes payloads before the entry that names them, so an entry on the disk has its payloads. Refuses steps that
the archive has already: a peer that starts again continues at the end of its archive.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

import structlog

from node.archive import files
from node.archive.files import Segment
from node.donor.live import disk_for
from node.snapshot.pieces import open_manifest
from node.training.replica import Describe, Replica
from protos.disk import write_atomic, write_bytes, write_synced, writing
from protos.envelope import parse
from protos.errors import OperatorError, Refusal
from protos.limits import SNAPSHOT_PIECE_BYTES
from protos.log import SignedEntry
from protos.v1 import envelope_pb2, log_pb2

# A new segment begins once the payloads and the log of the last take a quarter of the room. A full archive uses at least 3/4.
SEGMENT_PART: Final = 4
STATES_MIN: Final = 2


class Recorder:
    """One peer's archive of one run. Only the keeper's thread calls `record` and `segment`; `begin` runs before that thread."""

    def __init__(self, folder: Path, bytes_max: int, genesis: bytes, replica: Replica) -> None:
        state_bytes = sum(4 * tensor.numel() for tensor in replica.state.values())
        if bytes_max < STATES_MIN * state_bytes:
            raise OperatorError(
                f"the archive may take {bytes_max / 1e9:g} GB: a segment begins with the model's state of "
                f"{state_bytes / 1e9:.3f} GB, and {STATES_MIN} states must fit; set disk_gb to at least "
                f"{disk_for(STATES_MIN * state_bytes):.3f}"
            )
        self._folder, self._state_bytes = folder, state_bytes
        self.limit(bytes_max)
        self._dropped_for = self._bytes_max
        self._log = structlog.get_logger("archive")
        self._files: tuple[BinaryIO, BinaryIO] | None = None
        self._head: int | None = None
        self._written = self._total = 0
        self._due = self._taken = False
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            layout = replica.demo.layout
            shapes = [(place.name, place.shape) for place in layout.places]
            write_bytes(folder / files.LAYOUT, files.layout_text(shapes, layout.kinds).encode())
            write_bytes(folder / files.GENESIS, genesis)
            self._open_last()

    def _open_last(self) -> None:
        """Continue with the newest segment."""
        for half in self._folder.glob(".*"):
            shutil.rmtree(half)
        found = files.segments(self._folder)
        if not found:
            return
        last = found[-1]
        try:
            files.cut_off(last.path(files.PAYLOADS), files.PAYLOAD_RECORD_BYTES_MAX)
            files.cut_off(last.path(files.LOG), files.ENTRY_RECORD_BYTES_MAX)
            self._head = head_of(last)
        except Refusal as refusal:
            self._log.warning("the archive goes on in a new segment, and the last one stays as it is", why=str(refusal))
            return
        self._written = sum(last.path(name).stat().st_size for name in (files.PAYLOADS, files.LOG))
        self._append_to(last)

    def _append_to(self, segment: Segment) -> None:
        self.close()
        self._files = segment.path(files.PAYLOADS).open("ab"), segment.path(files.LOG).open("ab")

    def limit(self, bytes_max: int) -> None:
        """Take at most so much from the next step on, but room for STATES_MIN states. From any thread."""
        self._bytes_max = max(bytes_max, STATES_MIN * self._state_bytes)
        self._segment_bytes_max = max(self._bytes_max // SEGMENT_PART, self._state_bytes)

    @property
    def total_bytes(self) -> int:
        """Of all segments. From any thread."""
        with suppress(FileNotFoundError):  # the keeper's thread has just deleted one
            self._total = sum(segment.total_bytes for segment in files.segments(self._folder))
        return self._total

    def close(self) -> None:
        """Close the files; they hold everything recorded."""
        for file in self._files or ():
            file.close()
        self._files = None

    def end(self, envelope: bytes) -> None:
        """Keep the signed end of the run. From any thread."""
        with writing(self._folder):
            write_bytes(self._folder / files.END, envelope)

    def begin(self, replica: Replica) -> None:
        """The peer follows the log from the replica's state: record the entries after it, in a new segment if needed."""
        if self._head is None or replica.step > self._head:
            if self._head is not None:
                gap = f"{self._head + 1} to {replica.step}"
                self._log.warning("the archive has a gap: this peer loaded a snapshot instead of the log", steps=gap)
            image = replica.image()
            pieces = partial(image.pieces, SNAPSHOT_PIECE_BYTES)
            self.segment(replica.step, image.total_bytes, pieces, replica.describer(image.total_bytes))

    def pop_due(self) -> bool:
        """Whether a new segment should begin with the present state: true once for each segment. From any thread."""
        due, self._due = self._due, False
        self._taken = self._taken or due
        return due

    def segment(self, step: int, total_bytes: int, pieces: Callable[[], Iterator[bytes]], describe: Describe) -> None:
        """Continue in a new segment, which begins with the state after `step`. `pieces` gives the state's file."""
        with writing(self._folder):
            self._drop(total_bytes + self._segment_bytes_max)
            fresh = self._folder / f".{files.segment_name(step)}"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            hashes: list[bytes] = []

            def write(file: BinaryIO) -> None:
                hashes.extend(hashlib.sha256(piece).digest() for piece in write_synced(file, pieces()))

            write_atomic(fresh / files.STATE, fresh / "state.new", write)
            for name, content in (
                (files.MANIFEST, describe(tuple(hashes)).encoded),
                (files.LOG, b""),
                (files.PAYLOADS, b""),
            ):
                write_bytes(fresh / name, content)
            segment = Segment(self._folder / files.segment_name(step))
            shutil.rmtree(segment.folder, ignore_errors=True)
            fresh.rename(segment.folder)
        self._head, self._written, self._taken = step, 0, False
        self._append_to(segment)

    def _drop(self, following_bytes: int) -> None:
        """Make room for the next segment: delete the oldest segments, but never the only one."""
        found = files.segments(self._folder)
        sizes = [segment.total_bytes for segment in found]
        while len(found) > 1 and sum(sizes) + following_bytes > self._bytes_max:
            self._log.info("the archive is full: deleting its oldest segment", now_from_step=found[1].step)
            shutil.rmtree(found.pop(0).folder)
            sizes.pop(0)

    def record(self, signed: SignedEntry, payloads: Sequence[bytes], announcements: Mapping[bytes, bytes]) -> None:
        """Keep the next applied entry, and its payloads in order of its contributions, or the sum of their votes."""
        assert self._files is not None, "begin first"
        assert self._head is not None
        entry = signed.entry
        if entry.step <= self._head:
            return
        assert entry.step == self._head + 1, f"entry {entry.step} after {self._head}"
        with writing(self._folder):
            self._append(signed, payloads, announcements)
            if self._dropped_for != self._bytes_max:  # the owner has changed the limit
                self._dropped_for = self._bytes_max
                self._drop(0)
            self._head = entry.step
            self._due = self._written > self._segment_bytes_max and not self._taken

    def _append(self, signed: SignedEntry, payloads: Sequence[bytes], announcements: Mapping[bytes, bytes]) -> None:
        assert self._files is not None
        to_payloads, to_log = self._files
        if signed.entry.aggregate is not None:
            self._written += files.append(
                to_payloads, files.payload_record(payloads[0], signed.entry.aggregate.sha256, b"")
            )
        else:
            for contribution, payload in zip(signed.entry.contributions, payloads, strict=True):
                word = announcements.get(contribution.public_key, b"")
                self._written += files.append(
                    to_payloads, files.payload_record(payload, contribution.payload_sha256, word)
                )
        to_payloads.flush()
        self._written += files.append(to_log, signed.envelope)
        to_log.flush()


def head_of(segment: Segment) -> int:
    """The last step of a segment's log."""
    last = None
    for last in files.records(segment.path(files.LOG), files.ENTRY_RECORD_BYTES_MAX):  # noqa: B007
        pass
    if last is None:
        return open_manifest(segment.path(files.MANIFEST).read_bytes()).step
    return parse(log_pb2.LogEntry, parse(envelope_pb2.SignedEnvelope, last).body).step
