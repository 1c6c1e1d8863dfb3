"""The owner's settings in force: as they are now, the shares of the disk that follow, and the bytes of the local month.

One rule: a value that `swarmentum set` changed wins over flags, environment and swarmentum.toml, also after a restart, until
`swarmentum set KEY default` forgets it. A file in the home keeps it. Refuses a value that the machine does not take, before it
is kept. ADR 35.

Of the disk the archive comes first, then the votes that joiners need, then training text from the web. So text gives way first,
and then the oldest votes: another machine has both. The archive gives way last, oldest part first. Snapshots have a limit of
their own.

Bytes of payloads and snapshots are counted across restarts in a file of the home. Refuses to guess: a damaged file counts as
an empty month, and the log says so. A kill loses the bytes of the last look. A clock that is wrong for a while, as at the
start of a machine without a battery for it, empties no month: each has its own count.
"""

from __future__ import annotations

import json
import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel

from node.donor.owner_settings import DEFAULT, GONE, KEYS, LiveSettings, expected, live_part, meaning, with_value
from protos import toml_file
from protos.disk import replace_bytes, write_bytes, writing
from protos.errors import OperatorError
from protos.limits import PAYLOADS_GB
from protos.toml_file import OFF

KEPT_FILE = "set.toml"
HEADING = """\
# `swarmentum set` writes this file. Its values win over flags, environment and swarmentum.toml.
# `swarmentum set KEY default` takes a line away again.
"""
Applies = Callable[[Any], str]
"""Applies a new value at once. Returns what the owner should know, or nothing. ValueError: the machine does not take it."""


class Live:
    """Of the peer with this home. The values are one frozen object, swapped whole: a reader needs no lock.

    `start`: the settings without the file. `applies`: what a new value needs at once. `fixed`: why a setting of this peer
    cannot change while it runs.
    """

    def __init__(
        self,
        home: Path,
        start: BaseModel,
        applies: Mapping[str, Applies] | None = None,
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        self._path, self._start = home / KEPT_FILE, live_part(start)
        self._applies, self._fixed = dict(applies or {}), dict(fixed or {})
        self._lock = threading.Lock()
        self.changed = threading.Event()
        self._kept = _read(self._path)
        self.values = _over(self._start, self._kept, self._path)

    def apply(self) -> list[str]:
        """Apply the values of the start. Returns what the owner should know. OperatorError: the machine does not take one."""
        notes = []
        for key, apply in self._applies.items():
            value = getattr(self.values, key)
            if value is not None:
                try:
                    notes.append(apply(value))
                except ValueError as error:
                    mend = (
                        f" (`swarmentum set` kept it: take its line out of {self._path})" if key in self._kept else ""
                    )
                    raise OperatorError(f"{key} = {shown(value)}: {error}{mend}") from error
        return [note for note in notes if note]

    def overruled(self) -> list[str]:
        """For the log of the start: what the file says otherwise than flags, environment and swarmentum.toml."""
        return [
            f"{key} is {shown(getattr(self.values, key))}, as `swarmentum set` kept it in {self._path}"
            for key in self._kept
            if getattr(self.values, key) != getattr(self._start, key)
        ]

    def change(self, key: str, text: str) -> tuple[dict[str, Any], str]:
        """Change a setting, and keep it. Returns its row, and what the owner should know. ValueError: a wrong value."""
        if key in self._fixed:
            raise ValueError(f"{key}: {self._fixed[key]}")
        with self._lock:
            kept = {name: value for name, value in self._kept.items() if name != key}
            given = getattr(self._start, key, None) if text.strip().lower() == DEFAULT else text
            values = with_value(self.values, key, given)
            value = getattr(values, key)
            if given is text:
                kept[key] = OFF if value is None else value
            try:
                note = self._applies[key](value) if key in self._applies else ""
            except ValueError as error:
                raise ValueError(f"{key} = {shown(value)}: {error}") from error
            write_bytes(self._path, _written(kept))
            self._kept, self.values = kept, values
        self.changed.set()
        return self.row(key), note

    def row(self, key: str) -> dict[str, Any]:
        """A setting for people and programs."""
        value = getattr(self.values, key)
        return {
            "key": key,
            "value": value,
            "shown": shown(value),
            "kept": key in self._kept,
            "expected": expected(key),
            "meaning": meaning(key),
        }

    def rows(self) -> list[dict[str, Any]]:
        """All of them."""
        return [self.row(key) for key in KEYS]


def shown(value: object) -> str:
    """A value as `set` takes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return OFF if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _read(path: Path) -> dict[str, Any]:
    """OperatorError if the file cannot be read."""
    try:
        kept = tomllib.loads(path.read_text(encoding=toml_file.WRITTEN))
        for key in sorted(GONE.keys() & kept.keys()):
            del kept[key]
            log = structlog.get_logger("peer").bind(step="-", file=str(path))
            log.info("a key is no setting any more, and is left out", key=key, why=GONE[key])
        return kept
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise OperatorError(f"{path}: cannot be read: {error}; correct the file, or remove it") from error


def _over(start: LiveSettings, kept: Mapping[str, Any], path: Path) -> LiveSettings:
    """OperatorError with the line of a wrong value."""
    values = start
    for key, given in kept.items():
        try:
            values = with_value(values, key, given)
        except ValueError as error:
            line = toml_file.line_of(path.read_text(encoding=toml_file.WRITTEN), (key,))
            raise OperatorError(f"{path}:{line}: {error}; correct the line, or remove it") from error
    return values


def _written(kept: Mapping[str, Any]) -> bytes:
    """TOML: text as JSON writes it, other values as they are."""
    return (
        HEADING + "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in sorted(kept.items()))
    ).encode()


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
            log.warning(
                "this month's traffic counts from now on: its file cannot be read", file=str(self._path), why=str(error)
            )
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
