"""A run's coordinators: their addresses, from the invite and later from the one that acts; and the stream of reports to that
one.

So an invite that is older than a coordinator is enough. The peer keeps the addresses in the run's folder for its next life. An
address proves nothing: a server there must show the invite's certificate. The number of addresses is bounded.

A report that wants no answer is written and no more. The coordinator answers it all the same if a part of it was not taken.
Refuses to send a report again: the caller hears that the stream has ended, and what it has not heard of may be lost.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import structlog

from protos.calls import error_of, fetch_certificate, way_of
from protos.disk import DiskError, write_bytes, writing
from protos.errors import NetworkError, RefusedError, SwarmentumError
from protos.http_proxy import HttpProxy
from protos.invite import COORDINATORS_MAX
from protos.limits import ADDRESS_BYTES_MAX
from protos.v1 import coordinator_pb2 as pb

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


LOOK_SECONDS_MAX = 5.0


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

    async def explained(self, error: NetworkError, address: str) -> NetworkError:
        """The error of a call; or that the server has another certificate now, which gRPC says in words of its own.

        It is no RefusedError: a network on the way may have its own certificate there, for a while.
        """
        if "handshake failed" not in str(error).lower():
            return error
        try:
            await self.certificate(address, LOOK_SECONDS_MAX)
        except RefusedError as another:
            return NetworkError(str(another))
        except NetworkError:
            pass
        return error

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


MOVED = "this peer has moved to another coordinator, and sends the report there"
LAST_WORD_SECONDS_MAX = 1.0


class Telling:
    """One stream, the call `Tell`. `late` gets each answer that nobody waits for, and None when the stream has ended."""

    def __init__(self, call: Any, late: Callable[[pb.ReportResponse | None], None]) -> None:
        self._call, self._late = call, late
        self._asked: dict[int, asyncio.Future[pb.ReportResponse]] = {}
        self._writing: asyncio.Future[Any] | None = None
        self.signed = False
        """Whether a report with a signature was sent, so that later ones need none."""
        self.ended: SwarmentumError | None = None
        self._reading = asyncio.ensure_future(self._read())

    async def ask(self, request: pb.ReportRequest, sequence: int, seconds_max: float) -> pb.ReportResponse:
        """Send a report and wait for its answer. Raises NetworkError, or the error that the coordinator answered."""
        answer: asyncio.Future[pb.ReportResponse] = asyncio.get_running_loop().create_future()
        self._asked[sequence] = answer
        try:
            async with asyncio.timeout(seconds_max):
                await self._write(request)
                return await answer
        except TimeoutError as error:
            raise NetworkError("the coordinator does not answer a report: timeout") from error
        finally:
            del self._asked[sequence]
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # the stream's end came while the report was written: `_write` has told it

    async def tell(self, request: pb.ReportRequest, seconds_max: float) -> None:
        """Send a report that wants no answer. Raises as `ask`."""
        try:
            async with asyncio.timeout(seconds_max):
                await self._write(request)
        except TimeoutError as error:
            raise NetworkError("the coordinator reads no reports: timeout") from error

    def close(self, why: str = MOVED) -> None:
        """End the stream; who waits for an answer gets a NetworkError."""
        self._end(NetworkError(why))
        for waiting in (self._writing, self._reading, self._call):
            if waiting is not None:
                waiting.cancel()

    async def _write(self, request: pb.ReportRequest) -> None:
        """In a task of its own: a write on a call that never connects does not notice that the call is cancelled."""
        if self.ended is not None:
            raise self.ended
        self._writing = asyncio.ensure_future(self._call.write(request))
        try:
            await self._writing
        except asyncio.CancelledError:
            task, why = asyncio.current_task(), self._why_ended()
            if why is not None and task is not None and not task.cancelling():
                raise why from None
            self._writing.cancel()
            raise
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            await asyncio.wait([self._reading], timeout=LAST_WORD_SECONDS_MAX)  # the coordinator's last word
            raise self._why_ended() or NetworkError(f"the coordinator takes no report: {error}") from error
        self.signed = True

    def _why_ended(self) -> SwarmentumError | None:
        return self.ended  # it may have changed while this task waited

    async def _read(self) -> None:
        error: SwarmentumError = NetworkError("the coordinator ended the stream of reports")
        try:
            while isinstance(answer := await self._call.read(), pb.ReportResponse):
                asked = self._asked.get(answer.sequence)
                if asked is None:
                    self._late(answer)
                elif not asked.done():
                    asked.set_result(answer)
        except grpc.RpcError as found:
            error = error_of(found)
        except asyncio.InvalidStateError as found:
            error = NetworkError(f"the coordinator does not answer a report: {found}")
        finally:
            self._end(error)

    def _end(self, error: SwarmentumError) -> None:
        if self.ended is not None:
            return
        self.ended = error
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(error)
        self._late(None)
