"""The overlay as `swarmentum watch` sees it: py-libp2p on trio, on a thread of its own. One topic, bytes out.

A malformed frame from any peer can end py-libp2p's whole trio tree (docs/overlay.md). The thread then starts a new one. It
dials and never listens; it checks nothing and keeps nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from protos.clocks import Waits
from protos.limits import ADDRESSES_MAX, GOSSIP_MESSAGE_BYTES_MAX

DIAL_SECONDS_MAX = 10.0
REDIAL_SECONDS = 1.0
STATUS_SECONDS = 1.0
SUBSCRIBE_SECONDS_MAX = 10.0
ADDRESSES_KEPT_MAX = 32 * ADDRESSES_MAX
PEERS_CONNECTED_MAX = 16
DIALS_MAX = 8
RESTARTS_MAX = 100
RESTART_SECONDS_MIN = 0.2
RESTART_SECONDS_MAX = 30.0
STEADY_SECONDS = 60.0  # a tree that lived this long starts again at once
STOP_SECONDS_MAX = 3.0

# The degrees are from the GossipSub specification; the other values interoperate with go-libp2p (docs/overlay.md).
MESH_DEGREE, MESH_DEGREE_LOW, MESH_DEGREE_HIGH = 6, 4, 12
HEARTBEAT_SECONDS = 1


@dataclass(frozen=True)
class Gossiped:
    """A message of the topic, as it came; None and the message's size if it was beyond the gossip limit."""

    data: bytes | None
    size: int


@dataclass(frozen=True)
class OverlayStatus:
    """`peers`: connected subscribers of the topic. `problem`: why the overlay ended, empty while it runs."""

    peers: int
    restarts: int
    problem: str = ""
    fatal: bool = False


class Overlay(threading.Thread):
    """One py-libp2p host on one topic. `put` takes the values above, and returns whether it took the value."""

    def __init__(self, topic: str, put: Callable[[Gossiped | OverlayStatus], bool]) -> None:
        super().__init__(name="overlay", daemon=True)
        self.restarts = 0
        self.lost = 0
        self._topic, self._put = topic, put
        self._addresses: dict[str, None] = {}
        self._stopping = threading.Event()
        self._end: Callable[[], None] = lambda: None

    def dial(self, addresses: tuple[str, ...]) -> None:
        """Name peers to connect to. Those that were named before are kept, up to ADDRESSES_KEPT_MAX."""
        known = self._addresses
        new = [address for address in addresses if address not in known and tcp_only(address)]
        self._addresses = known | dict.fromkeys(new[: max(ADDRESSES_KEPT_MAX - len(known), 0)])

    def stop(self) -> None:
        """End the thread, in bounded time."""
        self._stopping.set()
        self._end()
        self.join(STOP_SECONDS_MAX)

    def run(self) -> None:
        """Serve, and start again. Gives up after RESTARTS_MAX restarts."""
        logging.getLogger().addHandler(logging.NullHandler())  # or the library's warnings come between the lines
        waits = Waits(RESTART_SECONDS_MIN, RESTART_SECONDS_MAX)
        while not self._stopping.is_set():
            started = time.monotonic()
            problem, fatal = self._one_life()
            if self._stopping.is_set():
                return
            fatal = fatal or self.restarts >= RESTARTS_MAX
            self._put(OverlayStatus(0, self.restarts, problem, fatal))
            if fatal:
                return
            self.restarts += 1
            if time.monotonic() - started > STEADY_SECONDS:
                waits.reset()
            self._stopping.wait(waits.next())

    def _one_life(self) -> tuple[str, bool]:
        """Run one trio tree to its end. Why it ended, and whether the next one would, too."""
        try:
            import libp2p  # noqa: F401
            import trio
        except ImportError as error:
            return f"py-libp2p cannot be imported: {error}", True
        try:
            trio.run(self._serve)
        except Exception as error:  # noqa: BLE001 - whatever a stranger's frame does to the library
            return f"py-libp2p ended: {_leaf(error)!r}", False
        return "py-libp2p ended", False

    async def _serve(self) -> None:
        import trio
        from libp2p.tools.anyio_service import background_trio_service

        host, pubsub, router = _make_host()
        async with trio.open_nursery() as nursery:
            token, scope = trio.lowlevel.current_trio_token(), nursery.cancel_scope

            def end() -> None:
                with suppress(trio.RunFinishedError):
                    token.run_sync_soon(scope.cancel)

            self._end = end
            async with (
                host.run(listen_addrs=[]),
                background_trio_service(pubsub),
                background_trio_service(router),
            ):
                with trio.fail_after(SUBSCRIBE_SECONDS_MAX):
                    await pubsub.wait_until_ready()
                    subscription = await pubsub.subscribe(self._topic)
                nursery.start_soon(self._receive, subscription)
                nursery.start_soon(self._dial_forever, host)
                while not self._stopping.is_set():
                    self._put(OverlayStatus(len(pubsub.peer_topics.get(self._topic, ())), self.restarts))
                    router.equivocation_detection.clear()  # the library keeps whole messages there for ever
                    await trio.sleep(STATUS_SECONDS)

    async def _receive(self, subscription: Any) -> None:
        while True:
            data = (await subscription.get()).data
            if not self._put(Gossiped(data if len(data) <= GOSSIP_MESSAGE_BYTES_MAX else None, len(data))):
                self.lost += 1  # gossip is best effort: the watcher asks for missing entries

    async def _dial_forever(self, host: Any) -> None:
        import trio

        tried = dict[str, int]()
        while True:
            async with trio.open_nursery() as nursery:
                for address in _to_dial(host, self._addresses, tried):
                    tried[address] = tried.get(address, 0) + 1
                    nursery.start_soon(_dial, host, address)
            await trio.sleep(REDIAL_SECONDS)


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


def _to_dial(host: Any, addresses: dict[str, None], tried: dict[str, int]) -> list[str]:
    """Addresses of peers without a connection, those that were tried least first."""
    here = {peer.to_base58() for peer in host.get_network().connections}
    room = min(DIALS_MAX, PEERS_CONNECTED_MAX - len(here))
    away = [address for address in addresses if address.rpartition("/")[2] not in here]
    return sorted(away, key=lambda address: tried.get(address, 0))[: max(room, 0)]


async def _dial(host: Any, address: str) -> None:
    import trio
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from multiaddr import Multiaddr

    with trio.move_on_after(DIAL_SECONDS_MAX):
        try:
            await host.connect(info_from_p2p_addr(Multiaddr(address)))
        except Exception:  # noqa: BLE001 - a stranger's address fails in as many ways as the library has layers
            return  # it is dialled again


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
            except Exception:  # noqa: BLE001 - whatever a stranger's frame does to the library
                await stream.reset()

        async def push_msg(self, msg_forwarder: Any, msg: Any) -> None:
            with suppress(Exception):  # as above
                await super().push_msg(msg_forwarder, msg)

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
