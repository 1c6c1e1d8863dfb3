"""The overlay process of `swarmentum watch`: py-libp2p on trio, one topic, bytes out. Run as `python -m node.watch.net`.

A malformed frame from any peer can end py-libp2p's whole trio tree (docs/overlay.md). This is therefore a process of its own,
and the watcher starts it again. The process dials and never listens; it checks nothing and keeps nothing. The process reads
JSON lines on stdin: first {"topic": ...}, then {"dial": [multiaddress, ...]} as often as there is news. The process ends when
stdin ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from node.watch.frames import MESSAGE, OVERSIZED, STATUS, frame
from protos.limits import ADDRESSES_MAX, GOSSIP_MESSAGE_BYTES_MAX
from protos.text import printable

EXIT_NO_LIBP2P = 64
DIAL_SECONDS_MAX = 10.0
REDIAL_SECONDS = 2.0
STATUS_SECONDS = 1.0
SUBSCRIBE_SECONDS_MAX = 10.0
PIPE_SECONDS_MAX = 5.0
LINE_BYTES_MAX = 1 << 20
ADDRESSES_KEPT_MAX = 32 * ADDRESSES_MAX
PEERS_CONNECTED_MAX = 16
DIALS_MAX = 8
CHUNK_BYTES = 1 << 16

# The degrees are from the GossipSub specification; the other values interoperate with go-libp2p (docs/overlay.md).
MESH_DEGREE, MESH_DEGREE_LOW, MESH_DEGREE_HIGH = 6, 4, 12
HEARTBEAT_SECONDS = 1


def main() -> None:
    """Serve the parent until the parent closes this process's stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and closes this process's stdin
    pipe = os.dup(1)
    os.dup2(2, 1)  # a library's prints must not come between the frames
    try:
        import libp2p  # noqa: F401
        import trio
    except ImportError as error:
        print(f"py-libp2p cannot be imported: {error}", file=sys.stderr)
        raise SystemExit(EXIT_NO_LIBP2P) from error
    try:
        trio.run(_Overlay(pipe).run)
    except Exception as error:
        print(f"py-libp2p ended: {_leaf(error)!r}", file=sys.stderr)
        raise SystemExit(1) from error


def _leaf(error: BaseException) -> BaseException:
    """The first error, from under trio's groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def tcp_only(address: str) -> bool:
    """Whether this is a plain TCP multiaddress that ends in a peer id: py-libp2p dials such addresses well."""
    parts = address.split("/")
    return (
        len(parts) == 7
        and parts[1] in ("ip4", "ip6", "dns", "dns4", "dns6")
        and parts[3] == "tcp"
        and parts[5] == "p2p"
    )


class _Overlay:
    """One py-libp2p host on one topic."""

    def __init__(self, pipe: int) -> None:
        import trio

        self._out = trio.lowlevel.FdStream(pipe)
        self._in = trio.lowlevel.FdStream(os.dup(0))
        self._lock = trio.Lock()
        self._addresses: dict[str, None] = {}
        self._news = trio.Event()
        self._host, self._pubsub, self._router = _make_host()

    async def run(self) -> None:
        import trio
        from libp2p.tools.anyio_service import background_trio_service

        async with trio.open_nursery() as nursery:
            topic = json.loads(await self._line(b""))["topic"]
            async with (
                self._host.run(listen_addrs=[]),
                background_trio_service(self._pubsub),
                background_trio_service(self._router),
            ):
                with trio.fail_after(SUBSCRIBE_SECONDS_MAX):
                    await self._pubsub.wait_until_ready()
                    subscription = await self._pubsub.subscribe(topic)
                nursery.start_soon(self._receive, subscription)
                nursery.start_soon(self._dial_forever)
                nursery.start_soon(self._tell_status, topic)
                await self._commands()
                nursery.cancel_scope.cancel()

    # ---- the parent --------------------------------------------------------------------------------------------------

    async def _line(self, rest: bytes) -> bytes:
        """A line from stdin, after the rest of the last read; empty at the end."""
        while b"\n" not in rest:
            chunk = await self._in.receive_some(CHUNK_BYTES)
            if not chunk:
                return b""
            rest += chunk
            assert len(rest) <= LINE_BYTES_MAX, "the parent sends short lines"
        line, _, self._rest = rest.partition(b"\n")
        return line

    async def _commands(self) -> None:
        import trio

        while line := await self._line(self._rest):
            for address in json.loads(line)["dial"]:
                if len(self._addresses) < ADDRESSES_KEPT_MAX and tcp_only(address):
                    self._addresses[address] = None
            self._news.set()
            self._news = trio.Event()

    async def _send(self, kind: bytes, body: bytes) -> None:
        """Send a frame. A parent that has not read for too long is gone or broken, and this process ends."""
        import trio

        with trio.fail_after(PIPE_SECONDS_MAX):
            async with self._lock:
                await self._out.send_all(frame(kind, body))

    # ---- the overlay -------------------------------------------------------------------------------------------------

    async def _receive(self, subscription: Any) -> None:
        while True:
            data = (await subscription.get()).data
            if len(data) <= GOSSIP_MESSAGE_BYTES_MAX:
                await self._send(MESSAGE, data)
            else:
                await self._send(OVERSIZED, str(len(data)).encode())

    async def _tell_status(self, topic: str) -> None:
        import trio

        while True:
            await self._send(STATUS, str(len(self._pubsub.peer_topics.get(topic, ()))).encode())
            self._router.equivocation_detection.clear()  # the library keeps whole messages there for ever
            await trio.sleep(STATUS_SECONDS)

    async def _dial_forever(self) -> None:
        import trio

        while True:
            news = self._news
            async with trio.open_nursery() as nursery:
                for address in self._to_dial():
                    nursery.start_soon(self._dial, address)
            with trio.move_on_after(REDIAL_SECONDS):
                await news.wait()

    def _to_dial(self) -> list[str]:
        """Addresses of peers without a connection, least recently tried first."""
        here = {peer.to_base58() for peer in self._host.get_network().connections}
        room = min(DIALS_MAX, PEERS_CONNECTED_MAX - len(here))
        away = [address for address in self._addresses if address.rpartition("/")[2] not in here]
        chosen = away[: max(room, 0)]
        for address in chosen:
            del self._addresses[address]
            self._addresses[address] = None  # to the end of the line
        return chosen

    async def _dial(self, address: str) -> None:
        import trio
        from libp2p.peer.peerinfo import info_from_p2p_addr
        from multiaddr import Multiaddr

        with trio.move_on_after(DIAL_SECONDS_MAX):
            try:
                await self._host.connect(info_from_p2p_addr(Multiaddr(address)))
            except Exception as error:  # noqa: BLE001 - a stranger's address fails in as many ways as the library has layers
                print(printable(f"{address} does not answer: {error!r}"), file=sys.stderr)


def _make_host() -> tuple[Any, Any, Any]:
    """(host, pubsub, router): a fresh identity, TCP, noise and yamux only; Pubsub made before anything is dialled."""
    from libp2p import new_host
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
    from libp2p.pubsub.gossipsub import PROTOCOL_ID, PROTOCOL_ID_V11, GossipSub
    from libp2p.pubsub.pubsub import Pubsub
    from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
    from libp2p.security.noise.transport import Transport as NoiseTransport

    key_pair = create_new_key_pair()
    noise = NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)
    host = new_host(key_pair=key_pair, sec_opt={NOISE_ID: noise}, muxer_preference="YAMUX")

    class GuardedPubsub(Pubsub):
        """A stranger's bytes end the stranger's stream, not the trio tree."""

        async def stream_handler(self, stream: Any) -> None:
            try:
                await super().stream_handler(stream)
            except Exception as error:  # noqa: BLE001 - whatever a stranger's frame does to the library
                print(f"a peer's gossip stream failed: {error!r}", file=sys.stderr)
                await stream.reset()

        async def push_msg(self, msg_forwarder: Any, msg: Any) -> None:
            try:
                await super().push_msg(msg_forwarder, msg)
            except Exception as error:  # noqa: BLE001 - as above
                print(f"a gossiped message failed: {error!r}", file=sys.stderr)

    router = GossipSub(
        protocols=[PROTOCOL_ID_V11, PROTOCOL_ID],
        degree=MESH_DEGREE,
        degree_low=MESH_DEGREE_LOW,
        degree_high=MESH_DEGREE_HIGH,
        heartbeat_interval=HEARTBEAT_SECONDS,
        adaptive_gossip_enabled=False,
        spam_protection_enabled=False,
        eclipse_protection_enabled=False,
    )
    return host, GuardedPubsub(host, router), router


if __name__ == "__main__":
    main()
