"""The errors behind gRPC statuses, on the side of the caller: one table for peers, the watch and the operator's commands.

The coordinator's side of the table is `STATUS` in coordinator/serving/calls.py. Refuses to guess: a status that is not in the
table is a fault of the network or of the server, and may pass.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import grpc

from protos.errors import NetworkError, RefusedError


class SessionLostError(NetworkError):
    """The coordinator does not know this session, for example because it restarted: join again."""


class BusyError(NetworkError):
    """The coordinator has too much to do for our network address: ask again in a second."""


class BehindError(NetworkError):
    """The coordinator's log is shorter than the part of it that this peer has: its journal has lost its end."""


_MEANINGS: dict[Any, tuple[type[NetworkError] | type[RefusedError], str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (RefusedError, "the coordinator refused"),
    grpc.StatusCode.PERMISSION_DENIED: (RefusedError, "the coordinator refused"),
    grpc.StatusCode.NOT_FOUND: (RefusedError, "the coordinator refused"),
    grpc.StatusCode.FAILED_PRECONDITION: (RefusedError, "the coordinator refused"),
    grpc.StatusCode.UNAUTHENTICATED: (SessionLostError, "the coordinator does not know this session"),
    grpc.StatusCode.OUT_OF_RANGE: (BehindError, "the coordinator has less of the log than this peer"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (BusyError, "the coordinator is busy"),
}
_LAST_ERROR = re.compile(r"last error: [A-Z_]+: (?:ipv[46]:)?(.*)", re.DOTALL)
_NO_ANSWER = NetworkError, "the coordinator does not answer"


def error_of(error: Any) -> NetworkError | RefusedError:
    """The error that a failed gRPC call (`grpc.RpcError`) means. RefusedError: to ask again changes nothing."""
    kind, text = _MEANINGS.get(error.code(), _NO_ANSWER)
    return kind(f"{text}: {_last(error.details() or '')}")


def _last(details: str) -> str:
    """What gRPC says, without its words around the last failure: the address, and the system's reason."""
    found = _LAST_ERROR.search(details)
    return unquote(found[1]) if found else details
