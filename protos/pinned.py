"""The TLS certificate of a coordinator, which an invite pins by its hash. Refuses any other certificate; asks no authority."""

from __future__ import annotations

import hashlib
import socket
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import grpc
import grpc.aio
from cryptography import x509

from protos.errors import NetworkError, RefusedError

TLS_NAME = "swarmentum-coordinator"
"""The name in every coordinator's certificate: the hash identifies it, not the name."""
CALL_SECONDS_MAX = 15.0
_ALWAYS = {
    "grpc.ssl_target_name_override": TLS_NAME,
    # The certificate is fetched without a proxy, and its pin decides. gRPC would take the proxy of https_proxy, and then name
    # the proxy's address as if it were the coordinator's.
    "grpc.enable_http_proxy": 0,
}


def pinned_channel(address: str, pem: bytes, options: Mapping[str, Any] | None = None) -> grpc.Channel:
    """A channel to the server with this certificate, without a proxy. NetworkError if this machine's clock forbids it."""
    return grpc.secure_channel(address, _credentials(address, pem), options=_options(options))


def pinned_aio_channel(address: str, pem: bytes, options: Mapping[str, Any] | None = None) -> grpc.aio.Channel:
    """As `pinned_channel`, for asyncio."""
    return grpc.aio.secure_channel(address, _credentials(address, pem), options=_options(options))


def _options(more: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    return list((_ALWAYS | dict(more or {})).items())


def _credentials(address: str, pem: bytes) -> grpc.ChannelCredentials:
    if why := out_of_date(pem, datetime.now(UTC)):
        raise NetworkError(f"no secure connection to the coordinator at {address}: {why}")
    return grpc.ssl_channel_credentials(pem)


def out_of_date(pem: bytes, now: datetime) -> str:
    """Why TLS would refuse this certificate at this time, and what to do; empty if it would not.

    Certificates hold at any time (ADR 15). Those of older versions hold for ten years.
    """
    certificate = x509.load_pem_x509_certificate(pem)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if first <= now <= last:
        return ""
    return (
        f"this machine's clock says {now:%Y-%m-%d}, and the coordinator's certificate holds from {first:%Y-%m-%d} to "
        f"{last:%Y-%m-%d}. If the clock is wrong, set it (for example `timedatectl set-ntp true`). If it is right, ask the "
        "run's operator for a new invite"
    )


def fetch_certificate(address: str, sha256: bytes, seconds_max: float = CALL_SECONDS_MAX) -> bytes:
    """PEM of the server's certificate if its sha256 is the pinned one. Blocks at most `seconds_max`.

    Raises NetworkError if no server answers, RefusedError if a server answers with another certificate.
    """
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the code below checks the pin on the certificate itself
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=seconds_max) as plain,
            context.wrap_socket(plain, server_hostname=TLS_NAME) as secure,
        ):
            certificate = secure.getpeercert(binary_form=True) or b""
    except (OSError, ValueError) as error:
        raise NetworkError(f"no coordinator answers at {address}: {error}") from error
    if hashlib.sha256(certificate).digest() != sha256:
        raise RefusedError(
            f"the server at {address} is not the invite's coordinator: the server has another TLS certificate; "
            "ask the run's operator for a new invite"
        )
    return ssl.DER_cert_to_PEM_cert(certificate).encode()
