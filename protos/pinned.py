"""The TLS certificate of a coordinator, which an invite pins by its hash. Refuses any other certificate; asks no authority."""

from __future__ import annotations

import hashlib
import socket
import ssl

from protos.errors import NetworkError, RefusedError

TLS_NAME = "swarmentum-coordinator"
"""The name in every coordinator's certificate: the hash identifies it, not the name."""
CALL_SECONDS_MAX = 15.0


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
