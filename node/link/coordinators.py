"""Where a run's coordinators are: as the invite says, and as the one that acts has said since.

So an invite that is older than a coordinator is enough. What was said is kept in the run's folder for the peer's next life.
An address proves nothing: whoever answers there must show the invite's certificate. Bounded, whoever says what.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import structlog

from protos.disk import DiskError, write_bytes, writing
from protos.invite import COORDINATORS_MAX
from protos.limits import ADDRESS_BYTES_MAX

_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}")


class Coordinators:
    """`addresses`, those that were named last first. Without a `file` nothing is kept."""

    def __init__(self, invited: tuple[str, ...], file: Path | None = None) -> None:
        self._invited, self._file = invited, file
        self._named = () if file is None else _read(file)

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port each, without repetition."""
        return tuple(dict.fromkeys([*self._named, *self._invited]))

    def learn(self, named: Sequence[str]) -> None:
        """What the coordinator that acts says; nothing is said by one that is alone."""
        told = _usable(named)
        if not told or told == self._named:
            return
        log, new = structlog.get_logger("swarm"), set(told) - set(self.addresses)
        self._named = told
        if new:
            log.info("coordinators", addresses=list(self.addresses))
        if self._file is not None:
            try:
                _write(self._file, told)
            except DiskError as error:  # after a restart, this peer asks the invite's coordinators
                log.warning("the coordinators' addresses are not saved", file=str(self._file), why=str(error))


def _usable(named: Sequence[str]) -> tuple[str, ...]:
    """Those that can be addresses, at most COORDINATORS_MAX."""
    fine = (text for text in named if len(text) <= ADDRESS_BYTES_MAX and _HOST_PORT.fullmatch(text))
    return tuple(dict.fromkeys(fine))[:COORDINATORS_MAX]


def _read(file: Path) -> tuple[str, ...]:
    """What an earlier life wrote; nothing if there is none, or it is damaged."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the last: [[[[[ without end
        return ()
    return _usable([text for text in values if isinstance(text, str)]) if isinstance(values, list) else ()


def _write(file: Path, addresses: tuple[str, ...]) -> None:
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, json.dumps(addresses).encode())
