"""Code that the calls of both services share: the run of a call, its envelope, and the gRPC status of an error.

A method raises an error; `answered` turns the error into a status. Refuses to guess: any other exception is a bug of this
program, and gRPC answers it with UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, TypeAlias, TypeVar

import grpc

from coordinator.serving.event_loop import RunRuntime
from coordinator.serving.event_streams import FullError, NotJoinedError, PeerAheadError
from coordinator.serving.hub import Hub
from coordinator.serving.reading import ReadersBusyError
from coordinator.serving.sessions import Sessions
from coordinator.store.journal import JournalError
from protos.envelope import NO_RUN, Kind, VerifiedEnvelope, check
from protos.errors import Reason, Refusal, SwarmentumError
from protos.v1 import envelope_pb2

Context: TypeAlias = Any  # grpc.aio.ServicerContext; grpcio ships no types
_S = TypeVar("_S", bound="Calls")
_Q = TypeVar("_Q")
_A = TypeVar("_A")


class StandsByError(SwarmentumError):
    """This coordinator does not act: the caller asks another one, or asks again."""


class UnknownRunError(SwarmentumError):
    """This coordinator has no run of this id."""


class NotAdmittedError(SwarmentumError):
    """The run does not admit this peer. To ask again changes nothing."""


class NoSessionError(SwarmentumError):
    """The request names a session that this coordinator does not know: the peer joins again."""


class DeclinedError(SwarmentumError):
    """The request is well formed, and the state of the run does not allow it."""


STATUS: dict[type[SwarmentumError], grpc.StatusCode] = {
    Refusal: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownRunError: grpc.StatusCode.NOT_FOUND,
    NotAdmittedError: grpc.StatusCode.PERMISSION_DENIED,
    FullError: grpc.StatusCode.PERMISSION_DENIED,
    NoSessionError: grpc.StatusCode.UNAUTHENTICATED,
    NotJoinedError: grpc.StatusCode.UNAUTHENTICATED,
    PeerAheadError: grpc.StatusCode.OUT_OF_RANGE,
    DeclinedError: grpc.StatusCode.FAILED_PRECONDITION,
    ReadersBusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StandsByError: grpc.StatusCode.UNAVAILABLE,
    JournalError: grpc.StatusCode.UNAVAILABLE,
}
"""The gRPC status of each error of a call. `protos.pinned.error_of` is the other side of this table."""


def status_of(error: SwarmentumError) -> grpc.StatusCode:
    """The status of an error in STATUS, or of a subclass of one."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def answered(
    call: Callable[[_S, _Q, Context], Awaitable[_A]],
) -> Callable[[_S, _Q, Context], Coroutine[Any, Any, _A]]:
    """The same method of a service; an error in STATUS ends the call with its status and its text."""

    @wraps(call)
    async def answering(service: _S, request: _Q, context: Context) -> _A:
        try:
            return await call(service, request, context)
        except tuple(STATUS) as error:
            if isinstance(error, Refusal):
                service.hub.metrics.refused.labels(error.reason.value).inc()
            await context.abort(status_of(error), str(error))
            raise AssertionError("abort returned") from error

    return answering


class Calls:
    """The base of both services."""

    def __init__(self, hub: Hub, sessions: Sessions) -> None:
        self.hub = hub
        self.sessions = sessions

    def check_acts(self) -> None:
        """Only the coordinator that holds the lease answers. Raises StandsByError."""
        if self.hub.stands_by is not None:
            raise StandsByError(self.hub.stands_by)

    def runtime(self, run_id: bytes, *, archived: bool = False) -> RunRuntime:
        """The run of this id; `archived`: also an archived one. Raises StandsByError or UnknownRunError."""
        self.check_acts()
        runtime = self.hub.runs.get(run_id)
        if runtime is not None and (archived or not runtime.run.archived):
            return runtime
        self.hub.metrics.refused.labels(Reason.WRONG_RUN.value).inc()
        name = run_id.hex()[:16] or "(empty)"
        if runtime is not None:
            raise UnknownRunError(
                f"run {name} is finished, and its operator has archived it: it is not served any more"
            )
        if run_id in self.hub.deleted:
            raise UnknownRunError(f"run {name} was deleted by its operator")
        raise UnknownRunError(f"no run {name} here; ask its operator for a new invite")

    def opened(
        self, envelope: envelope_pb2.SignedEnvelope, kind: int, signer: bytes | None = None, *, signed: bool = True
    ) -> VerifiedEnvelope:
        """A verified envelope of this kind. Raises Refusal. Envelopes of the operator belong to no run.

        `signed`: False if the caller knows from the stream whose envelope this is.
        """
        run_id = NO_RUN if kind == Kind.KIND_ADMIN else envelope.run_id
        return check(envelope, kind=kind, run_id=run_id, signer=signer, signed=signed)
