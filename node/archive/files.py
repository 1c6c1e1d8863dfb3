"""The archive on the disk: segments, each a snapshot and the entries after it.

    genesis                 the run, as protobuf. The sha256 of this file is the run id.
    end                     the end of a run that its operator ended, as the coordinator signed it.
    layout.json             [name, shape] or [name, shape, kind] of every parameter, in the order of the layout.
    000000000000/           a segment. The segment begins with the state after the step that names it.
        manifest            the manifest of that state.
        state.safetensors   that state.
        log                 the signed entries after it.
        payloads            their payloads, each with its author's announcement.

`log` and `payloads` are records of a 4-byte big-endian length and that many bytes. The recorder only appends records, and
removes a record that a crash has cut. Archives may come from strangers: reads are bounded, and `replay` checks everything.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, TypeAlias

import zstandard

from protos.envelope import parse
from protos.errors import OperatorError, Reason, Refusal
from protos.limits import END_BYTES_MAX, ENTRY_BYTES_MAX, ENVELOPE_OVERHEAD_BYTES_MAX, PAYLOAD_BYTES_MAX
from protos.log import run_id_of
from protos.orders import End, open_end
from protos.run_config import RunConfig, config_from_json
from protos.run_sections import OperatorsConfig
from protos.start import StartingState, start_of
from protos.v1 import archive_pb2, log_pb2
from protos.version import own_misfit

if TYPE_CHECKING:
    from node.optim.layout import Layout

GENESIS: Final = "genesis"
END: Final = "end"
LAYOUT: Final = "layout.json"
MANIFEST: Final = "manifest"
STATE: Final = "state.safetensors"
LOG: Final = "log"
PAYLOADS: Final = "payloads"
STEP_DIGITS: Final = 13  # of protos.limits.STEP_MAX
LENGTH_BYTES: Final = 4
VARINT_BYTES_MAX: Final = 10
ENTRY_RECORD_BYTES_MAX: Final = ENTRY_BYTES_MAX + ENVELOPE_OVERHEAD_BYTES_MAX
# A frame of zstd, in an archive of before, may be a little longer than its content.
PAYLOAD_RECORD_BYTES_MAX: Final = PAYLOAD_BYTES_MAX + PAYLOAD_BYTES_MAX // 128 + 4096


@dataclass(frozen=True)
class Segment:
    """One folder of an archive."""

    folder: Path

    @property
    def step(self) -> int:
        """The segment begins with the state after this step."""
        return int(self.folder.name)

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def path(self, name: str) -> Path:
        return self.folder / name


def segments(folder: Path) -> list[Segment]:
    """All segments of an archive, oldest first."""
    found = (path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal())
    return [Segment(path) for path in sorted(found, key=lambda path: int(path.name))]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def segment_name(step: int) -> str:
    return f"{step:0{STEP_DIGITS}d}"


def find(run: Path) -> Path:
    """The archive that a person means by a folder: the folder itself, one in it, or the only one in a peer's home."""
    for folders in ([run], [run / "archive"], run.glob("runs/*/archive")):
        try:
            found = sorted(folder for folder in folders if (folder / GENESIS).is_file())
        except PermissionError as error:
            raise OperatorError(
                f"{error.filename}: this user may not read it; run this as the user who owns it"
            ) from error
        if len(found) > 1:
            raise OperatorError(f"{run} has archives of several runs; name one: {', '.join(map(str, found))}")
        if found:
            return found[0]
    raise OperatorError(
        f"{run} has no archive of a run; give the folder of `swarmentum demo --archive --output DIR`, "
        "or the home of a peer that joined with --set archive=true"
    )


def append(file: BinaryIO, record: bytes) -> int:
    """Write a record. Returns the number of bytes that the record takes."""
    file.write(len(record).to_bytes(LENGTH_BYTES, "big") + record)
    return LENGTH_BYTES + len(record)


def records(path: Path, bytes_max: int) -> Iterator[bytes]:
    """Every whole record. Raises Refusal for one that is longer than `bytes_max`, or than its own length: others follow it."""
    with path.open("rb") as file:
        yield from _records(file, bytes_max)


def _records(file: BinaryIO, bytes_max: int) -> Iterator[bytes]:
    while len(prefix := file.read(LENGTH_BYTES)) == LENGTH_BYTES:
        length = int.from_bytes(prefix, "big")
        if length > bytes_max:
            raise Refusal(Reason.TOO_LARGE, f"{file.name}: a record of {length} bytes, at most {bytes_max}")
        record = file.read(length)
        if len(record) < length and _goes_on(record):
            raise Refusal(
                Reason.MALFORMED, f"{file.name} is damaged: the length of a record reaches over those after it"
            )
        if len(record) < length or (not length and not any(file.peek())):  # type: ignore[attr-defined]
            return  # a crash cut it off, or left zeros
        yield record


def _goes_on(rest: bytes) -> bool:
    """Whether what may be the beginning of a record, which is protobuf, has more behind its end: a length begins with zeros,
    and no field does. What a loss of power left is zeros to the end."""
    at = 0
    while at < len(rest):
        start = at
        tag, at = _varint(rest, at)
        if tag >> 3 == 0:
            return any(rest[start:])
        match tag & 7:
            case 0:
                _, at = _varint(rest, at)
            case 2:
                size, at = _varint(rest, at)
                at += size
            case _:
                return False  # of no message here
    return False


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number of protobuf that begins at `at`, and where it ends."""
    value = shift = 0
    for end, byte in enumerate(data[at : at + VARINT_BYTES_MAX], at + 1):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, end
    return value, len(data)


def cut_off(path: Path, bytes_max: int) -> None:
    """Remove the end that a crash left unfinished."""
    whole = sum(LENGTH_BYTES + len(record) for record in records(path, bytes_max))
    if whole < path.stat().st_size:
        os.truncate(path, whole)


def payload_record(payload: bytes, sha256: bytes, announcement: bytes) -> bytes:
    """The record of a payload. It is not compressed: signs do not shrink, and the paper's values by 6 %."""
    return archive_pb2.ArchivedPayload(
        payload_sha256=sha256, payload=payload, announcement=announcement
    ).SerializeToString(deterministic=True)


def payload_of(record: archive_pb2.ArchivedPayload) -> bytes:
    """The payload of a record. Raises Refusal for a frame that is damaged, or that grows beyond a payload's limit."""
    frame = record.payload_zstd
    if record.payload or not frame:
        return record.payload
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= PAYLOAD_BYTES_MAX:
            raise Refusal(Reason.TOO_LARGE, f"a frame of {size} bytes, at most {PAYLOAD_BYTES_MAX}")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=PAYLOAD_BYTES_MAX)
    except zstandard.ZstdError as error:
        raise Refusal(Reason.MALFORMED, f"not a zstd frame: {error}") from error


Shapes: TypeAlias = list[tuple[str, tuple[int, ...]]]


def layout_text(shapes: Shapes, kinds: Mapping[str, str]) -> str:
    """Name and shape of every parameter, and its kind if it has one (`node.optim.layout.KINDS`)."""
    rows = [[name, list(shape), *([kinds[name]] if name in kinds else [])] for name, shape in shapes]
    return json.dumps(rows) + "\n"


def layout_shapes(text: str) -> tuple[Shapes, dict[str, str]]:
    """Inverse of `layout_text`. Raises Refusal for anything else."""
    from node.optim.layout import KINDS  # with torch, which a reader of a log does not need

    try:
        values = json.loads(text)
        shapes = [(name, tuple(shape)) for name, shape, *_ in values]
        kinds = {name: kind for name, _, kind in (value for value in values if len(value) != 2)}
    except (ValueError, TypeError) as error:
        raise Refusal(Reason.MALFORMED, f"{LAYOUT} is not a list of names and shapes: {error}") from error
    whole = all(isinstance(name, str) and all(type(n) is int and n >= 0 for n in shape) for name, shape in shapes)
    if not whole or not all(kind in KINDS for kind in kinds.values()):
        raise Refusal(
            Reason.MALFORMED, f"{LAYOUT} is not a list of names and shapes, with {' or '.join(KINDS)} behind some"
        )
    return shapes, kinds


# The definition of a run, from an archive's own files. Refuses files that contradict each other.


@dataclass(frozen=True)
class Genesis:
    """The definition of a run, from an archive's own files."""

    run_id: bytes
    config: RunConfig
    coordinator: bytes
    layout: Layout
    start: StartingState | None = None
    end: End | None = None
    layout_named: bool = False
    """Whether the genesis itself names the layout. `layout` is then that one."""

    @classmethod
    def read(cls, folder: Path) -> Genesis:
        """Read it from the archive `folder`.

        Raises Refusal for files that hold no genesis, OperatorError for a run of a format that this program does not speak.
        """
        from node.optim.layout import Layout  # with torch, as above

        genesis = parse(log_pb2.Genesis, (folder / GENESIS).read_bytes())

        layout = Layout.of_shapes(*layout_shapes((folder / LAYOUT).read_text()))
        if why := own_misfit(genesis):
            raise OperatorError(why)
        config = config_from_json(genesis.config_json)
        run_id, coordinator = run_id_of(genesis), genesis.coordinator_public_key
        named = genesis.layout_digest
        if named and named != layout.digest():
            raise Refusal(
                Reason.WRONG_LAYOUT,
                f"{LAYOUT} is layout {layout.digest().hex()[:16]}; the genesis names {named.hex()[:16]}",
            )
        end = _end_of(folder, run_id, coordinator, config.operators)
        return cls(run_id, config, coordinator, layout, start_of(genesis), end, bool(named))


def _end_of(folder: Path, run_id: bytes, coordinator: bytes, operators: OperatorsConfig) -> End | None:
    """The signed end of the run, if the archive has one. Raises Refusal for one that the coordinator did not sign, or that the
    run's operators did not order."""
    path, most = folder / END, END_BYTES_MAX + ENVELOPE_OVERHEAD_BYTES_MAX
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return open_end(file.read(most + 1), run_id=run_id, coordinator=coordinator, operators=operators)
