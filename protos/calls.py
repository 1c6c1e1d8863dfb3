"""Calls to a coordinator: its TLS certificate, which an invite pins by its hash; messages as zstd frames; the errors of calls.

Refuses any other certificate; asks no authority.

A frame is compressed against the message before it. A step's log entry and tick name each peer by 32 bytes, as those of the
step before do. So a frame has a third of the bytes of its message in a swarm of 500 (ADR 57). Refuses a frame that is too
large, is damaged, or belongs after another message.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import unquote

import grpc
import grpc.aio
import zstandard
from cryptography import x509

from protos.errors import NetworkError, Reason, Refusal, RefusedError, in_words, no_name
from protos.http_proxy import HttpProxy, way_to

TLS_NAME = "swarmentum-coordinator"
"""The name in every coordinator's certificate: the hash identifies it, not the name."""
CALL_SECONDS_MAX = 15.0
_ALWAYS = {
    "grpc.ssl_target_name_override": TLS_NAME,
}
_Options = Mapping[str, Any] | None


def way_of(address: str) -> HttpProxy | None:
    """The proxy that leads to a coordinator that does not answer directly; None: directly. Blocks 3 s for each address of its
    name at most."""
    host, _, port = address.rpartition(":")
    return way_to(host.strip("[]"), int(port)) if port.isdigit() else None


def pinned_channel(address: str, pem: bytes, options: _Options = None, proxy: HttpProxy | None = None) -> grpc.Channel:
    """A channel to the server with this certificate. NetworkError if this machine's clock forbids it."""
    return grpc.secure_channel(address, _credentials(address, pem), options=_options(options, proxy))


def pinned_aio_channel(
    address: str, pem: bytes, options: _Options = None, proxy: HttpProxy | None = None
) -> grpc.aio.Channel:
    """As `pinned_channel`, for asyncio."""
    return grpc.aio.secure_channel(address, _credentials(address, pem), options=_options(options, proxy))


def _options(more: _Options, proxy: HttpProxy | None) -> list[tuple[str, Any]]:
    # By itself gRPC would take the proxy of https_proxy also where the direct way works.
    by = {"grpc.enable_http_proxy": 0} if proxy is None else {"grpc.http_proxy": proxy.url}
    return list((_ALWAYS | by | dict(more or {})).items())


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


NO_TLS_REASONS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")
"""Of OpenSSL 3.0, 3.2 and 1.0, for an answer in clear text."""
NO_TLS: Final = "what is there is another program, or this network's login page: open a browser, and log in"


def fetch_certificate(
    address: str, sha256: bytes, seconds_max: float = CALL_SECONDS_MAX, proxy: HttpProxy | None = None
) -> bytes:
    """PEM of the server's certificate if its sha256 is the pinned one. Blocks at most `seconds_max`.

    Raises NetworkError if no server answers, RefusedError if a server answers with another certificate.
    """
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the code below checks the pin on the certificate itself
    context.set_alpn_protocols(["h2"])
    context.sslsocket_class = _Secure
    try:
        with (
            _connected(host.strip("[]"), int(port), seconds_max, proxy) as plain,
            context.wrap_socket(plain, server_hostname=TLS_NAME) as secure,
        ):
            certificate = secure.getpeercert(binary_form=True) or b""
    except (OSError, ValueError) as error:
        why = NO_TLS if getattr(error, "reason", "") in NO_TLS_REASONS else in_words(error)
        by = "" if proxy is None else f", and not through the proxy {proxy.at} either"
        raise NetworkError(f"no coordinator answers at {address}{by}: {why}") from error
    if hashlib.sha256(certificate).digest() != sha256:
        by = perhaps = ""
        if proxy is not None:
            by = f", reached through the proxy {proxy.at},"
            perhaps = (
                "a proxy that opens TLS has its own: ask who runs this network to pass this address on unopened; or "
            )
        raise RefusedError(
            f"the server at {address}{by} is not the invite's coordinator: the server has another TLS certificate; {perhaps}"
            "ask the run's operator for a new invite"
        )
    return ssl.DER_cert_to_PEM_cert(certificate).encode()


class _Secure(ssl.SSLSocket):
    """`wrap_socket` asks for the peer's name first, and where the server has gone it leaves the socket open: not so here."""

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError as error:
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from error


def _connected(host: str, port: int, seconds_max: float, proxy: HttpProxy | None) -> socket.socket:
    if proxy is None:
        return socket.create_connection((host, port), timeout=seconds_max)
    opened = proxy.connect(host, port, seconds_max)
    opened.settimeout(seconds_max)
    return opened


# The errors behind gRPC statuses, on the side of the caller: one table for peers, the watch and the operator's commands.
#
# The coordinator's side of the table is `STATUS` in coordinator/serving/doors.py. Refuses to guess: a status that is not in the
# table is a fault of the network or of the server, and may pass.


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
_NO_NAME = re.compile(
    r"(?:errors resolving|DNS resolution failed for) (\S+): (?:.*:)?\s*([^:\]\s][^:\]]*)\]?$", re.DOTALL
)
_BY_A_PROXY = re.compile(r"Received http2 header with status: (\d+)")
"""gRPC's words for an answer that no gRPC server gave; it makes PERMISSION_DENIED of 403, for example."""
_NO_ANSWER = NetworkError, "the coordinator does not answer"


def error_of(error: Any) -> NetworkError | RefusedError:
    """The error that a failed gRPC call (`grpc.RpcError`) means. RefusedError: to ask again changes nothing."""
    if answered := _BY_A_PROXY.match(error.details() or ""):
        return NetworkError(f"a proxy before the coordinator answers for it: HTTP status {answered[1]}")
    kind, text = _MEANINGS.get(error.code(), _NO_ANSWER)
    return kind(f"{text}: {details_of(error)}")


def details_of(error: Any) -> str:
    """What gRPC says, without its words around the last failure: the address, and the system's reason."""
    details = error.details() or ""
    if unknown := _NO_NAME.match(details):
        return no_name(*unknown.groups())
    found = _LAST_ERROR.search(details)
    return unquote(found[1]) if found else details


LEVEL: Final = 2
"""A higher level saves no byte here, because what does not repeat are hashes. Level 1 finds a third less with 2,000 peers."""
BYTES_MIN: Final = 2048
"""A smaller message travels as it is: the frame would save little."""


def pack(data: bytes, before: bytes) -> bytes:
    """The frame of `data`, for a reader that has `before`. The frame has a checksum of `data`."""
    # Without the sizes zstd forgets the start of a large message.
    sizes = {"source_size": len(data), "dict_size": len(before)}
    parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, **sizes, write_checksum=True)
    return zstandard.ZstdCompressor(compression_params=parameters, dict_data=_dictionary(before)).compress(data)


def unpack(frame: bytes, before: bytes, bytes_max: int) -> bytes:
    """The message of a frame. Raises Refusal MALFORMED or TOO_LARGE. `before`: what `pack` was given, byte for byte."""
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= bytes_max:
            raise Refusal(Reason.TOO_LARGE, f"a packed message of {size} bytes, at most {bytes_max}")
        return zstandard.ZstdDecompressor(dict_data=_dictionary(before)).decompress(frame, max_output_size=size)
    except zstandard.ZstdError as error:
        raise Refusal(Reason.MALFORMED, f"a packed message cannot be unpacked: {error}") from error


def _dictionary(before: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(before, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
