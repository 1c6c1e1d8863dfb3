"""Of an address with too many connections the idle ones end, and nobody else's."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from coordinator.serving import gate
from coordinator.serving.gate import Bounded, Connection, far_end, parse, surplus
from tests.unit.coordinator.serving import eventually, peers, served
from tests.unit.coordinator.test_service import WAITS

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
V4 = "   1: 0100007F:1E14 {host}:{port:04X} {state} 00000000:00000000 00:00000000 00000000  0 0 {inode} 1 0 20 4 30 10 -1"


def row(host: str, port: int, inode: int, state: str = "01") -> str:
    return V4.format(host=host, port=port, inode=inode, state=state)


@pytest.mark.skipif(socket.ntohs(1) == 1, reason="the rows are those of a little-endian machine")
def test_rows_of_the_kernel_are_read() -> None:
    mapped = row("0000000000000000FFFF00000A000002", 7, 13)
    v6 = row("B80D0120000000000000000001000000", 8, 14)
    rows = [HEADER, row("0A0000C0", 5, 11), row("0A0000C0", 6, 12, state="0A"), mapped, v6, "torn"]
    expected = [Connection(11, "192.0.0.10", 5), Connection(13, "2.0.0.10", 7), Connection(14, "2001:db8::1", 8)]
    assert parse(rows, 0x1E14) == expected
    assert parse(rows, 0x1E15) == []


def test_grpcs_names_are_the_same_ends() -> None:
    assert far_end("ipv4:192.0.2.1:50000") == ("192.0.2.1", 50000)
    assert far_end("ipv6:%5B2001:db8::1%5D:7") == ("2001:db8::1", 7)
    assert far_end("ipv6:%5B::ffff:192.0.2.1%5D:8") == ("192.0.2.1", 8)


def test_the_newest_idle_ones_of_a_crowded_address_go() -> None:
    crowd = [Connection(number, "192.0.2.1", number) for number in range(10)]
    others = [Connection(100 + number, f"198.51.100.{number}", 1) for number in range(10)]
    here = [Connection(200 + number, "127.0.0.1", number) for number in range(4)]
    busy = {("192.0.2.1", 9), ("192.0.2.1", 8)}
    assert surplus([*crowd, *others, *here], busy, 6, 4) == [crowd[7], crowd[6], crowd[5], crowd[4]]
    assert surplus(crowd, {c.far for c in crowd}, 6, 4) == [], "calls are bounded elsewhere"


def test_addresses_of_one_ipv6_site_count_as_one() -> None:
    crowd = [Connection(number, f"2001:db8::{number:x}", 1) for number in range(1, 5)]
    assert surplus(crowd, (), 3, 3) == [crowd[3]]


@contextmanager
def accepting() -> Iterator[tuple[socket.socket, list[socket.socket]]]:
    with ExitStack() as stack:
        listener = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        accepted: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    accepted.append(stack.enter_context(listener.accept()[0]))
                except OSError:
                    return

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener, accepted
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="there is no /proc/self/net/tcp")
async def test_sockets_of_this_process_are_shut_down_and_no_others() -> None:
    with accepting() as (listener, accepted), ExitStack() as stack:
        port = listener.getsockname()[1]
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(6)]
        await eventually(lambda: len(accepted) == 6)
        bounded = Bounded(port, list, site_max=4, loopback_max=4)
        busy = {clients[5].getsockname()}
        assert bounded.look(busy) == 2
        for client in clients:
            client.setblocking(False)
        ended = [number for number, client in enumerate(clients) if _is_at_end(client)]
        assert len(ended) == 2
        assert 5 not in ended
        assert bounded.look(busy) == 0


def _is_at_end(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="there is no /proc/self/net/tcp")
async def test_a_coordinator_ends_idle_connections_and_answers_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "LOOK_EVERY_S", 0.05)
    async with served(tmp_path, WAITS) as here, peers(here, 2) as swarm, AsyncExitStack() as stack:
        for peer in swarm:
            await peer.join()
        bounded = Bounded(here.port, here.gate.under_way.keys, loopback_max=4, site_max=4)
        watching = asyncio.ensure_future(bounded.run())
        ended = asyncio.Event()

        async def hold() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            stack.push_async_callback(writer.wait_closed)
            stack.callback(writer.close)
            await reader.read()
            ended.set()

        holding = [asyncio.ensure_future(hold()) for _ in range(8)]
        await asyncio.wait_for(ended.wait(), 240)  # the handshake would have 5 s
        await eventually(lambda: bounded.ended >= 6)
        for peer in swarm:
            await peer.ready()
        for peer in swarm:  # the streams that were there before
            await peer.until("tick")
        watching.cancel()
        for task in holding:
            task.cancel()
        await asyncio.gather(watching, *holding, return_exceptions=True)
