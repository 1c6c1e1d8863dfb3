"""A stream of reports to the coordinator, and its answers, which may come later.

A report that wants no answer is written and no more. The coordinator answers it all the same if a part of it was not taken.
Refuses to send a report again: the caller hears that the stream has ended, and what it has not heard of may be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from protos.calls import error_of
from protos.errors import NetworkError, SwarmentumError
from protos.v1 import coordinator_pb2 as pb

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
