"""The one walker over folders of text: regular files below a folder, in an order that is the same on every machine.

Each entry that is not given back is told to the tally. Refuses: hidden files, what systems and editors put beside text, links
out of the folder. A text is given back once, however many links lead to it. The layout of the hub's cache is known: `blobs` are
read through `snapshots`.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from node.data.tally import LeftOutReason, Tally
from protos.errors import DataError

RUBBISH_NAMES: Final = frozenset(
    {"__macosx", "__pycache__", "thumbs.db", "desktop.ini", "ehthumbs.db", "$recycle.bin", "system volume information",
     "lost+found", "@eadir", "icon\r", "_success"}
)  # fmt: skip
RUBBISH_PATTERNS: Final = (
    "*~",
    "#*#",
    "*.swp",
    "*.swo",
    "*.bak",
    "*.orig",
    "*.lock",
    "*.crc",
    "cache-*.arrow",
    "tmp*.arrow",
)
PARTIAL_PATTERNS: Final = ("*.incomplete", "*.part", "*.partial", "*.crdownload", "*.download", "*.aria2", "*.tmp")
FILES_MAX: Final = 10_000_000
BLOBS, REFS, SNAPSHOTS, NO_EXIST = "blobs", "refs", "snapshots", ".no_exist"
MANIFEST_FILE: Final = "manifest.json"
STATE_FILE: Final = "building.json"
"""Beside the shards of a build that is not through."""
FIRST_SHARD: Final = "000000.bin"


def walk(root: Path, tally: Tally, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """The files below `root`, sorted. `skipped`: names of folders that are not meant. Raises DataError."""
    files, links = list[Path](), list[Path]()

    def unreadable(error: OSError) -> None:
        tally.leave(LeftOutReason.UNREADABLE, f"{error.filename}: {error.strerror}")

    for folder, below, names in os.walk(root, onerror=unreadable):
        here = Path(folder)
        if here != root and is_set(here):
            below.clear()
            tally.leave(LeftOutReason.OWN, here)
            continue
        names += [name for name in below if is_link(here / name)]
        below[:] = [name for name in _folders(here, below, tally) if name not in skipped]
        for name in sorted(names):
            path = here / name
            if (why := reason_of_name(name)) is not None:
                tally.leave(why, path, file_size(path))
            else:
                (links if is_link(path) else files).append(path)
        if len(files) + len(links) > FILES_MAX:
            raise DataError(f"data: {root} has more than {FILES_MAX:,} files; name a folder that has the text alone")
    found = [*_regular(files, tally), *_linked(root, files, links, tally)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def reason_of_name(name: str) -> LeftOutReason | None:
    """Why a file or folder of this name is left out; None if it is not."""
    low = name.lower()
    if low in RUBBISH_NAMES or any(fnmatch.fnmatchcase(low, pattern) for pattern in RUBBISH_PATTERNS):
        return LeftOutReason.RUBBISH
    if name.startswith("."):
        return LeftOutReason.HIDDEN
    if any(fnmatch.fnmatchcase(low, pattern) for pattern in PARTIAL_PATTERNS):
        return LeftOutReason.PARTIAL
    return None


def is_set(folder: Path) -> bool:
    """Whether a folder has token shards, whole or being built."""
    there = [stat.S_ISREG(mode_of(folder / name)) for name in (STATE_FILE, MANIFEST_FILE, FIRST_SHARD)]
    return there[0] or (there[1] and there[2])


def _folders(here: Path, below: list[str], tally: Tally) -> Iterator[str]:
    """The folders to look into."""
    of_cache = BLOBS in below and SNAPSHOTS in below
    revision = (
        _revision(here.parent, below, tally)
        if here.name == SNAPSHOTS and stat.S_ISDIR(mode_of(here.parent / BLOBS))
        else None
    )
    for name in sorted(below):
        if is_link(here / name) or (of_cache and name in (BLOBS, REFS, NO_EXIST)):
            continue
        if revision not in (None, name):
            tally.leave(LeftOutReason.REVISION, here / name)
        elif (why := reason_of_name(name)) is not None:
            tally.leave(why, here / name)
        else:
            yield name


def _revision(cache: Path, revisions: list[str], tally: Tally) -> str | None:
    """The snapshot of the hub's cache that is meant. Raises DataError if several could be."""
    if len(revisions) < 2:
        return None
    try:
        named = (cache / REFS / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        named = ""
    if named in revisions:
        return named
    raise DataError(
        f"data: {cache} has {len(revisions)} revisions, and refs/main names none of them: name one of "
        f"{cache / SNAPSHOTS}, such as {sorted(revisions)[0]}"
    )


def _regular(files: list[Path], tally: Tally) -> Iterator[Path]:
    for path in files:
        try:
            mode = path.lstat().st_mode
        except OSError as error:
            tally.leave(LeftOutReason.UNREADABLE, f"{path}: {error.strerror}")
            continue
        if stat.S_ISREG(mode):
            yield path
        else:
            tally.leave(LeftOutReason.SPECIAL, path)


def _linked(root: Path, files: list[Path], links: list[Path], tally: Tally) -> Iterator[Path]:
    """Links to files that nothing else leads to."""
    homes = [root.resolve(), *_blobs_of(root)]
    known = {path.resolve() for path in files}
    for path in sorted(links):
        target = Path(os.path.realpath(path))
        if not target.exists():
            pointer = LeftOutReason.POINTER if ".git/annex/" in os.fspath(path.readlink()) else LeftOutReason.DANGLING
            tally.leave(pointer, f"{path} -> {path.readlink()}")
        elif target in known or (target.is_dir() and target.is_relative_to(homes[0])):
            tally.leave(LeftOutReason.LINK, path)
        elif not any(target.is_relative_to(home) for home in homes):
            tally.leave(LeftOutReason.OUTSIDE, f"{path} -> {target}", file_size(target))
        elif not target.is_file():
            tally.leave(LeftOutReason.SPECIAL, path)
        else:
            known.add(target)
            yield path


def _blobs_of(root: Path) -> list[Path]:
    """Where the links of a snapshot of the hub's cache lead to."""
    real = root.resolve()
    snapshots = [folder for folder in (real, *real.parents) if folder.name == SNAPSHOTS]
    return [blobs for folder in snapshots if (blobs := folder.parent / BLOBS).is_dir()]


def mode_of(path: Path) -> int:
    """The kind of what is at a place; 0 for nothing, or for what this process may not see."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


def is_link(path: Path) -> bool:
    """Whether a link is there."""
    try:
        return stat.S_ISLNK(path.lstat().st_mode)
    except OSError:
        return False


def file_size(path: Path) -> int:
    """Bytes of a file; 0 for one that is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
