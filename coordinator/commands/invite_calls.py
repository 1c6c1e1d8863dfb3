"""Calls to the coordinators of an invite, behind the certificate that the invite pins."""

from __future__ import annotations

from typing import Any

import grpc

from protos.errors import NetworkError, RefusedError
from protos.grpc_errors import error_of
from protos.invite import Invite
from protos.log import run_id_of
from protos.pinned import fetch_certificate, pinned_channel, way_of
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc

CALL_SECONDS_MAX = 15.0


def call(invite: Invite, name: str, request: Any, stub: Any = rpc.CoordinatorServiceStub) -> Any:
    """The answer of the first of the invite's coordinators that gives one. NetworkError, RefusedError."""
    problems: list[str] = []
    for address in invite.coordinators:
        try:
            proxy = way_of(address)
            pem = fetch_certificate(address, invite.certificate_sha256, proxy=proxy)
            with pinned_channel(address, pem, proxy=proxy) as channel:
                return getattr(stub(channel), name)(request, timeout=CALL_SECONDS_MAX)
        except grpc.RpcError as error:
            found = error_of(error)
            if isinstance(found, RefusedError):
                raise found from error
            problems.append(str(found))
        except NetworkError as error:
            problems.append(str(error))
    raise NetworkError("; ".join(problems))


def facts_of(invite: Invite) -> pb.GetRunResponse:
    """The facts of the invite's run. RefusedError if the coordinator shows another one."""
    facts: pb.GetRunResponse = call(invite, "GetRun", pb.GetRunRequest(run_id=invite.run_id))
    genesis = facts.genesis
    if run_id_of(genesis) != invite.run_id or genesis.coordinator_public_key != invite.coordinator_public_key:
        raise RefusedError("the coordinator's run is not the one that the invite names; ask for a new invite")
    return facts
