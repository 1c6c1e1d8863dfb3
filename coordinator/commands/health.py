"""`swarmentum-coordinator health`: whether the coordinator of a home folder answers, for probes of containers and services.

It checks over gRPC and TLS as peers do. A plain gRPC probe of Kubernetes cannot: it speaks no TLS.
"""

from __future__ import annotations

from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.commands.options import Home, Json, settings
from coordinator.serving.served_coordinator import Serving
from coordinator.serving.tls import load_or_create
from protos.errors import NetworkError
from protos.json_line import as_line
from protos.pinned import pinned_channel

CALL_SECONDS_MAX = 5.0


def health(
    live: Annotated[
        bool, typer.Option("--live", help="A coordinator that stands by is fine, too: it answers, and does not act.")
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Ask the coordinator of --home whether it acts. Exit code 0: yes; 1: it stands by; 3: no answer."""
    folder = settings(home=home).home
    serving = Serving.read(folder)
    address = f"{serving.host}:{serving.port}"
    with pinned_channel(address, load_or_create(folder).certificate_pem) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS_MAX)
        except grpc.RpcError as error:
            raise NetworkError(f"the coordinator at {address} does not answer: {error.details()}") from error
    acts = answer.status == health_pb2.HealthCheckResponse.SERVING
    print(as_line({"address": address, "acts": acts}) if as_json else f"{address} {'acts' if acts else 'stands by'}")
    raise typer.Exit(0 if acts or live else 1)
