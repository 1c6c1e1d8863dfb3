"""The addresses of a run's coordinators: from the invite, and later from the coordinator that acts.

So an invite that is older than a coordinator is enough. The peer keeps the addresses in the run's folder for its next life. An
address proves nothing: a server there must show the invite's certificate. The number of addresses is bounded.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path

import structlog

from protos.calls import fetch_certificate, way_of
from protos.disk import DiskError, write_bytes, writing
from protos.http_proxy import HttpProxy
from protos.invite import COORDINATORS_MAX
from protos.limits import ADDRESS_BYTES_MAX

_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}")


class Coordinators:
    """`addresses`, the last named ones first. Without a `file` the peer keeps nothing for its next life."""

    def __init__(self, invited: tuple[str, ...], file: Path | None = None) -> None:
        self._invited, self._file = invited, file
        self._named = () if file is None else _read(file)

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port each, without repetition."""
        return tuple(dict.fromkeys([*self._named, *self._invited]))

    def learn(self, named: Sequence[str]) -> None:
        """Take the addresses that the acting coordinator names. A coordinator without others names none."""
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


class CoordinatorWays:
    """Whether each coordinator is called directly or through an HTTP proxy; looked for once, until `forget`."""

    def __init__(self, certificate_sha256: bytes) -> None:
        self._sha256 = certificate_sha256
        self._proxies: dict[str, HttpProxy | None] = {}

    async def to(self, address: str) -> HttpProxy | None:
        """The proxy that leads there; None: the direct way."""
        if address not in self._proxies:
            self._proxies[address] = await asyncio.to_thread(way_of, address)
        return self._proxies[address]

    async def certificate(self, address: str, seconds_max: float) -> bytes:
        return await asyncio.to_thread(fetch_certificate, address, self._sha256, seconds_max, await self.to(address))

    def known(self, address: str) -> HttpProxy | None:
        """As `to`, without looking."""
        return self._proxies.get(address)

    def forget(self) -> None:
        """Look again: this machine may be in another network."""
        self._proxies.clear()


def _usable(named: Sequence[str]) -> tuple[str, ...]:
    """The texts that can be addresses, at most COORDINATORS_MAX."""
    fine = (text for text in named if len(text) <= ADDRESS_BYTES_MAX and _HOST_PORT.fullmatch(text))
    return tuple(dict.fromkeys(fine))[:COORDINATORS_MAX]


def _read(file: Path) -> tuple[str, ...]:
    """The addresses that an earlier life wrote; none without a file, or if the file is damaged."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the last: [[[[[ without end
        return ()
    return _usable([text for text in values if isinstance(text, str)]) if isinstance(values, list) else ()


def _write(file: Path, addresses: tuple[str, ...]) -> None:
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, json.dumps(addresses).encode())
