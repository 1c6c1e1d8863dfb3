"""Both sides of a call agree about its errors: the status that the coordinator answers means the same to its caller."""

import asyncio
import re
import socket

import grpc
import pytest

from coordinator.serving.doors import STATUS, DeclinedError, NoSessionError, NotAdmittedError, StandsByError, status_of
from coordinator.serving.doors import UnknownRunError as UnknownRun
from coordinator.serving.following import FullError, NotJoinedError
from coordinator.serving.following import PeerAheadError as Behind
from coordinator.serving.following import ReadersBusyError as TooMany
from coordinator.store.journal import FencedError, JournalError
from protos.calls import BehindError, BusyError, SessionLostError, error_of, fetch_certificate
from protos.errors import NetworkError, Reason, Refusal, RefusedError, SwarmentumError, in_words

MEANINGS: dict[type[SwarmentumError], type[SwarmentumError]] = {
    Refusal: RefusedError,
    UnknownRun: RefusedError,
    NotAdmittedError: RefusedError,
    FullError: RefusedError,
    DeclinedError: RefusedError,
    NoSessionError: SessionLostError,
    NotJoinedError: SessionLostError,
    Behind: BehindError,
    TooMany: BusyError,
    StandsByError: NetworkError,
    JournalError: NetworkError,
}


class Failed(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, code: grpc.StatusCode, details: str = "because") -> None:
        super().__init__()
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize("kind", STATUS, ids=lambda kind: kind.__name__)
def test_a_status_means_to_the_caller_what_the_coordinator_meant(kind: type[SwarmentumError]) -> None:
    found = error_of(Failed(STATUS[kind]))
    assert type(found) is MEANINGS[kind]
    assert str(found).endswith(": because")


@pytest.mark.parametrize(
    ("details", "told"),
    [
        ("ipv4:127.0.0.1:7790: Failed to connect to remote host: Connection refused",
         "127.0.0.1:7790: Failed to connect to remote host: Connection refused"),
        ("ipv6:%5B::1%5D:7790: Failed to connect", "[::1]:7790: Failed to connect"),
    ],
)  # fmt: skip
def test_a_person_is_told_the_address_and_the_reason_alone(details: str, told: str) -> None:
    whole = f"failed to connect to all addresses; last error: UNKNOWN: {details}"
    found = error_of(Failed(grpc.StatusCode.UNAVAILABLE, whole))
    assert str(found) == f"the coordinator does not answer: {told}"


async def test_a_status_of_a_proxy_is_no_refusal_of_the_coordinator() -> None:
    """Peers ended, as excluded ones do, while nginx was set up anew before the coordinator."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0\0\0\x04\0\0\0\0\0")  # HTTP/2: settings, and headers once the call's are here
        await reader.readexactly(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
        kind = 0
        while kind != 1:
            head = await reader.readexactly(9)
            kind = head[3]
            await reader.readexactly(int.from_bytes(head[:3]))
        writer.write(b"\0\0\x05\x01\x05\0\0\0\x01\x48\x03403")
        await told.wait()
        writer.close()
        await writer.wait_closed()
        gone.set()

    told, gone = asyncio.Event(), asyncio.Event()
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
        host, port = proxy.sockets[0].getsockname()
        async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
            with pytest.raises(grpc.RpcError) as failed:
                await channel.unary_unary("/a/b")(b"", timeout=60)
            told.set()
            await gone.wait()
    assert failed.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert type(error_of(failed.value)) is NetworkError
    assert str(error_of(failed.value)) == "a proxy before the coordinator answers for it: HTTP status 403"


def test_a_name_without_an_address_is_said_in_words() -> None:
    with pytest.raises(NetworkError) as found:
        fetch_certificate("nobody.invalid:7700", bytes(32))
    with grpc.insecure_channel("nobody.invalid:7700") as channel, pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary("/a/b")(b"", timeout=10)
    for said in (str(found.value), str(error_of(failed.value))):
        assert re.search(
            r"answers? at nobody.invalid:7700: this machine finds no|answer: this machine finds no address of nobody",
            said,
        )
        assert "Errno" not in said


def test_a_servers_words_about_a_name_cost_little() -> None:
    """They cost the square of their length."""
    for words in (2_000_000 * "a" + "::", 2_000_000 * " " + "]]", 1_000_000 * ": " + "::"):
        details = f"DNS resolution failed for x: {words}"
        assert str(error_of(Failed(grpc.StatusCode.UNAVAILABLE, details))).endswith(words)


def test_an_error_of_the_network_has_no_number() -> None:
    with pytest.raises(ConnectionRefusedError) as failed:
        asyncio.run(asyncio.open_connection("127.0.0.1", 1))
    assert in_words(failed.value) == "Connection refused ('127.0.0.1', 1)"
    number = "9" * 30
    assert in_words(OSError(f"[Errno {number}] Connect call failed x")), (
        "a stranger's words are no number of this system"
    )


def test_an_error_of_a_dial_says_what_failed_at_each_address() -> None:
    said = (
        "all dials failed\n  * [/ip4/1.2.3.4/tcp/1] connection refused\n  * [/ip4/1.2.3.4/udp/1/quic-v1] timeout\nmore"
    )
    told = "all dials failed; [/ip4/1.2.3.4/tcp/1] connection refused; [/ip4/1.2.3.4/udp/1/quic-v1] timeout"
    assert in_words(OSError(said)) == told


def test_an_error_that_replaces_a_failed_look_up_keeps_its_own_words() -> None:
    error = OSError("the proxy answered 403")
    error.__context__ = socket.gaierror(-2, "Name or service not known")
    assert in_words(error).startswith("this machine finds no address")
    error.__suppress_context__ = True  # by `from None`
    assert in_words(error) == "the proxy answered 403"


def test_every_error_of_a_call_has_a_meaning() -> None:
    assert STATUS.keys() == MEANINGS.keys()


def test_a_subclass_has_the_status_of_its_parent() -> None:
    assert status_of(FencedError("x")) == grpc.StatusCode.UNAVAILABLE
    assert status_of(Refusal(Reason.MALFORMED, "x")) == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_a_status_that_no_error_has_may_pass(code: grpc.StatusCode) -> None:
    assert type(error_of(Failed(code))) is NetworkError
