"""A coordinator's home in one file: the journal as it was at one moment, also while the coordinator serves, and the keys.

A restored journal may lack entries that peers have applied. A coordinator that went on without them would sign a second entry
for one step, and peers would stop. So a restored home is held: no step opens until the operator says that the log is whole.
ADR 2.
Refuses a home that is in use already, and files that no coordinator wrote. A shared database has backups of its own.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import sqlite3
import tarfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO
from urllib.parse import quote

from coordinator.store.checkpoint import FoldedRuns
from coordinator.store.database import of_file
from coordinator.store.journal import Journal
from protos.console import lock_home
from protos.disk import remove_left, replace_file, write_bytes, writing
from protos.errors import OperatorError, Refusal, SwarmentumError
from protos.identity import Identity
from protos.log import Chain
from protos.version import software_version

JOURNAL = "journal.sqlite3"
BESIDE = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside a file, and replays into it: also into another file that comes to be there."""
KEYS = ("identity.key", "tls.key", "tls.crt")
ABOUT = "backup.json"
HELD = "restored.json"
FORMAT = 1
ABOUT_BYTES_MAX = 1 << 20
KEY_BYTES_MAX = 1 << 16
PRIVATE = 0o600
ENTRIES_AT_ONCE = 1000


@dataclass(frozen=True)
class BackupSummary:
    """What a backup says of itself. `runs`: the newest step of each run, by run id."""

    format: int
    version: str
    seconds: float
    """When it was made, since 1970."""
    runs: dict[str, int]
    sha256: dict[str, str]
    """Of each other file, by name, in hex digits."""


class DamagedJournalError(SwarmentumError):
    """The backup is made, and in its journal a run cannot be read, or an entry is not what this coordinator signed."""


def make(home: Path, file: Path) -> BackupSummary:
    """Write a backup of `home` to `file`, which only its owner can read: it holds the coordinator's keys.

    Raises DamagedJournalError afterwards if a log in it does not hold: the coordinator reads none of it again while it serves.
    """
    for name in (*KEYS, JOURNAL):
        if not (home / name).is_file():
            raise OperatorError(
                f"{home / name}: is not there, so {home} is no home of a coordinator with a journal of its own"
            )
    if file.exists():
        raise OperatorError(f"{file}: is there already; give another name")
    copy = file.with_name(f".{file.name}.{os.getpid()}.journal")
    try:
        with writing(file):
            _copy(home / JOURNAL, copy)
            files = {**{name: home / name for name in KEYS}, JOURNAL: copy}
            identity = Identity.load_or_create(home / "identity.key")
            with closing(Journal(of_file(copy), identity)) as journal:
                heads, damage = _heads(journal)
            hashes = {name: _sha256(path) for name, path in files.items()}
            runs = {run_id.hex(): head for run_id, head in heads.items()}
            about = BackupSummary(FORMAT, software_version(), time.time(), runs, hashes)
            contents = json.dumps(asdict(about)).encode()
            replace_file(
                file,
                file.with_name(f".{file.name}.{os.getpid()}.new"),
                lambda opened: _pack(opened, contents, files),
                mode=PRIVATE,
            )
        with closing(Journal(of_file(copy), identity)) as journal:
            chains = [(Chain(run_id, identity.public_key), head) for run_id, head in heads.items()]
            damage += filter(None, (_damage(journal, chain, head) for chain, head in chains))
    finally:
        for left in (copy, *(copy.with_name(copy.name + end) for end in BESIDE)):
            remove_left(left)
    if damage:
        raise DamagedJournalError(
            f"{file} is written, and the journal in {home} is damaged: {'; '.join(damage)}. Keep the backups before this one: "
            "they may hold those entries"
        )
    return about


def _copy(source: Path, target: Path) -> None:
    """SQLite's own online backup: a state between two transactions, whatever is written meanwhile.

    It is one read transaction. With a write-ahead log no writer waits for it. A copy in several steps would begin again after
    each write of the coordinator, perhaps for ever.
    """
    target.unlink(missing_ok=True)
    target.touch(PRIVATE)
    try:
        with (
            closing(sqlite3.connect(f"file:{quote(str(source))}?mode=ro", uri=True)) as here,
            closing(sqlite3.connect(target)) as there,
        ):
            here.backup(there, pages=-1)
    except sqlite3.Error as error:
        what = "nothing that was there is lost"
        if os.statvfs(source.parent).f_flag & os.ST_RDONLY:
            what = "the home's disk is read-only: copy the whole folder to another disk, and name the copy with --home"
        raise OperatorError(f"{source} cannot be copied to {target}: {error}; {what}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _heads(journal: Journal) -> tuple[dict[bytes, int], list[str]]:
    """The newest step of each run by its id, and why others cannot be read."""
    folds = FoldedRuns(journal)
    folds.catch_up()
    heads = {folded.run.run_id: folded.at(0).head_step for folded in folds.runs()}
    return heads, [f"run {run_id.hex()[:16]} cannot be read ({why})" for run_id, why in folds.left_out.items()]


def _damage(journal: Journal, chain: Chain, head: int) -> str:
    """Why a log is not the chain of signed entries up to its head; empty if it is."""
    try:
        while chain.step < head and (page := journal.entries(chain.run_id, chain.step + 1, ENTRIES_AT_ONCE)):
            for data in page:
                chain.extend(data)
    except Refusal as refusal:
        return f"entry {chain.step + 1} of run {chain.run_id.hex()[:16]} does not hold ({refusal})"
    return "" if chain.step >= head else f"entry {chain.step + 1} of run {chain.run_id.hex()[:16]} is missing"


def _pack(opened: IO[bytes], about: bytes, files: dict[str, Path]) -> None:
    with tarfile.open(fileobj=opened, mode="w") as archive:
        member = tarfile.TarInfo(ABOUT)
        member.size = len(about)
        archive.addfile(member, io.BytesIO(about))
        for name, path in files.items():
            archive.add(path, name)


def restore(file: Path, home: Path) -> BackupSummary:
    """Write the home that `file` holds. The home is held from then on. If this fails half-way, it can be called again."""
    try:
        with tarfile.open(file) as archive:
            about = _about(_read(archive, ABOUT, ABOUT_BYTES_MAX))
            keys = {name: _read(archive, name, KEY_BYTES_MAX) for name in KEYS}
            with writing(home):
                home.mkdir(parents=True, exist_ok=True, mode=0o700)
            with lock_home(home, "coordinator"), writing(home):
                _check_empty(home)
                # The mark comes first: a home whose journal is there, and not held, could make a second log. The journal
                # comes last: a home that is held without one is half restored.
                write_bytes(home / HELD, json.dumps({"from": str(file), **asdict(about)}).encode())
                for name, data in keys.items():
                    _write(home / name, io.BytesIO(data), about.sha256.get(name))
                _write(home / JOURNAL, _member(archive, JOURNAL), about.sha256.get(JOURNAL))
    except OSError as error:
        raise OperatorError(f"{file}: cannot be read as a backup: {error.strerror or error}") from error
    except tarfile.TarError as error:  # it has a line for each way to read a file
        why = str(error).partition("\n")[0].rstrip(":")
        raise OperatorError(f"{file}: cannot be read as a backup, so it is none, or not whole: {why}") from error
    return about


def _check_empty(home: Path) -> None:
    """OperatorError if a coordinator was here. Of a killed one the -wal may be all that is left."""
    names = [JOURNAL + end for end in BESIDE]
    if not is_half_restored(home):
        names += [*KEYS, JOURNAL]
    if there := next((name for name in names if (home / name).exists()), None):
        raise OperatorError(f"{home}: holds a coordinator already ({there}); give an empty folder with --home")


def _write(path: Path, source: IO[bytes], sha256: str | None) -> None:
    def copy(opened: IO[bytes]) -> None:
        hashed = hashlib.sha256()
        while piece := source.read(1 << 20):
            hashed.update(piece)
            opened.write(piece)
        if hashed.hexdigest() != sha256:
            raise OperatorError(f"{path.name} in this backup is damaged: its SHA-256 is not the one that {ABOUT} names")

    replace_file(path, path.with_name(f".{path.name}.new"), copy, mode=PRIVATE)


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    try:
        found = archive.extractfile(name)
    except KeyError:
        found = None
    if found is None:
        raise OperatorError(f"{archive.name!s}: holds no {name}, so `swarmentum-coordinator backup` did not write it")
    return found


def _read(archive: tarfile.TarFile, name: str, most: int) -> bytes:
    data = _member(archive, name).read(most + 1)
    if len(data) > most:
        raise OperatorError(f"{archive.name!s}: {name} has more than {most} bytes, so no coordinator wrote it")
    return data


def _about(data: bytes) -> BackupSummary:
    try:
        values = dict(json.loads(data))
        if values["format"] != FORMAT:  # its other values may have other names
            raise OperatorError(
                f"this backup has format {values['format']}, and this version reads {FORMAT}: "
                f"run swarmentum {values['version']}"
            )
        return BackupSummary(**values)
    except (KeyError, ValueError, TypeError) as error:
        raise OperatorError(f"{ABOUT} of this backup cannot be read: {error}") from error


def is_held(home: Path) -> bool:
    """Whether this home comes from a backup, and no step may open."""
    return (home / HELD).exists()


def is_half_restored(home: Path) -> bool:
    """Whether `restore` began to write this home, and did not end."""
    return is_held(home) and not (home / JOURNAL).exists()


def check_whole(home: Path) -> None:
    """OperatorError if `restore` began to write this home, and did not end."""
    if is_half_restored(home):
        raise OperatorError(
            f"{home}: is half restored, and has no journal; run `restore FILE --home {shlex.quote(str(home))}` again"
        )


def go_on(home: Path) -> None:
    """The log is whole, as the operator knows: steps open again after the next start. OperatorError if nothing holds them."""
    check_whole(home)
    try:
        (home / HELD).unlink()
    except FileNotFoundError as error:
        raise OperatorError(f"{home}: is not held; nothing keeps its steps from opening") from error
