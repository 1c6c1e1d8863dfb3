"""Reads an agreed snapshot from mirrors: its manifest by the root, and pieces in a row, each checked by its hash.

Nobody has to trust a mirror. One that errs is asked again later, and after FAILURES_MAX it is left out. Refuses nothing to the
caller: a mirror that gives nothing is a line in the log, and the peers have the same pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, Final

from node.data.download import one_line
from node.mirror.mirror_places import Place, place_at
from node.snapshot.pieces import SnapshotManifest, check_piece
from protos.errors import NetworkError, OperatorError, Refusal
from protos.start import RUN_DIGITS_SHOWN

FAILURES_MAX: Final = 3
"""Of one mirror, for one snapshot."""
MANIFEST: Final = ".manifest"
STATE: Final = ".state"


def file_name(step: int, root: bytes, kind: str) -> str:
    """Of the snapshot that the run knows by this root. The names are in the order of the steps."""
    return f"{step:012d}-{root.hex()}{kind}"


def folder_of_run(run_id: bytes) -> str:
    """The folder of a run in each mirror."""
    return run_id.hex()[:RUN_DIGITS_SHOWN]


@dataclass
class _Asked:
    place: Place
    failures: int = 0
    wrong: set[int] = field(default_factory=set)
    """Pieces of which it had other bytes."""


class MirrorReader:
    """The mirrors of a run, for one download. `paced(bytes)` counts bytes that came, and waits as the owner's caps ask."""

    def __init__(self, places: Sequence[Place], log: Any, paced: Callable[[int], None]) -> None:
        self._asked = [_Asked(place) for place in places]
        self._log, self._paced = log, paced
        self.received = 0
        self.failures = 0

    @property
    def usable(self) -> bool:
        """Whether a mirror is left to ask."""
        return bool(self._asked)

    @property
    def wrong(self) -> set[int]:
        """Pieces that no mirror gives: each had other bytes."""
        return set.intersection(*(asked.wrong for asked in self._asked)) if self._asked else set()

    def manifest(self, step: int, root: bytes, most: int) -> bytes | None:
        """The manifest's bytes, whose hash is the root; None if no mirror has it."""
        while self._asked:
            asked = self._asked[0]
            try:
                name = file_name(step, root, MANIFEST)
                data = b"".join(self._counted(asked.place.read(name, 0, most, exactly=False)))
                if hashlib.sha256(data).digest() == root:
                    return data
                self._failed(asked, "its manifest is another one")
            except Exception as error:  # noqa: BLE001 - each library of a place has errors of its own
                self._failed(asked, one_line(error))
        return None

    def pieces(
        self, step: int, root: bytes, manifest: SnapshotManifest, wanted: range, goes_on: Callable[[int], bool]
    ) -> Iterator[tuple[int, bytes]]:
        """Pieces in a row, from the first of `wanted` on, for as long as `goes_on(index)` says so before each. Ends early if
        the mirror gives no more. `manifest` is verified."""
        asked = next((asked for asked in self._asked if wanted.start not in asked.wrong), None)
        if asked is None or not goes_on(wanted.start):
            return
        first, size = wanted.start * manifest.piece_bytes, sum(map(manifest.piece_length, wanted))
        index, held = wanted.start, bytearray()
        try:
            blocks = asked.place.read(file_name(step, root, STATE), first, size, exactly=True)
            for block in self._counted(blocks):
                held += block
                while index in wanted and len(held) >= (length := manifest.piece_length(index)):
                    piece = bytes(held[:length])
                    del held[:length]
                    check_piece(manifest, index, piece)
                    yield index, piece
                    index += 1
                    if index in wanted and not goes_on(index):
                        return
            if index in wanted:
                self._failed(asked, f"it ends before piece {index} is whole")
            else:
                asked.failures = 0
        except Refusal as refusal:
            asked.wrong.add(index)
            self._failed(asked, refusal.detail)
        except Exception as error:  # noqa: BLE001 - each library of a place has errors of its own
            self._failed(asked, one_line(error))

    def tell(self, step: int) -> None:
        """The download of a snapshot is over: the log says what came from mirrors."""
        if self.received:
            self._log.info("mirror: bytes came from there", step=step, bytes=self.received)

    def _counted(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self.received += len(block)
            try:
                self._paced(len(block))
            except (CancelledError, RuntimeError) as error:  # the peer ends, and so does its network side
                raise NetworkError("the peer ends") from error
            yield block

    def _failed(self, asked: _Asked, why: str) -> None:
        """A mirror erred: the others come before it now."""
        self._asked.remove(asked)
        asked.failures += 1
        self.failures += 1
        left_out = asked.failures >= FAILURES_MAX
        if not left_out:
            self._asked.append(asked)
        self._log.warning("mirror: a failure", mirror=asked.place.address, why=why, left_out=left_out)


def reader_of(
    addresses: Sequence[str], own: str | None, run_id: bytes, log: Any, paced: Callable[[int], None], *, trusted: bool
) -> MirrorReader | None:
    """The mirrors that this peer may read: its `own`, and those of the run. None if there are none."""
    places = list[Place]()
    named = [(own, True)] if own is not None else []
    for address, allowed in (*named, *((address, trusted) for address in addresses)):
        try:
            places.append(place_at(address, folder_of_run(run_id), trusted=allowed))
        except OperatorError as error:
            log.warning("mirror: not used", mirror=address, why=str(error))
    return MirrorReader(places, log, paced) if places else None
