"""Discovery: hivemind's DHT on the host's own libp2p. Peers of a run find each other under the run's key.

Every record is a signed peer record under its own peer's subkey and its own run's key. A DHT node refuses any other record, so
nobody can replace another peer's record. A peer verifies a record again when it reads one.

Everything that a node keeps for others is bounded. A peer keeps records of its own run only, a relay of RELAY_RUNS_MAX runs. A
node keeps at most DHT_RECORDS_MAX records, none longer than DHT_RECORD_SECONDS, and bounds the calls of each remote.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from node.overlay.host import Host
from node.overlay.settings import BOOTSTRAP_MAX
from protos import limits as contract
from protos.address import parse_address, usable
from protos.envelope import Kind, check, open_envelope, parse, seal
from protos.errors import Reason, Refusal, SwarmentumError
from protos.identity import peer_id
from protos.limits import RateLimiter
from protos.v1 import envelope_pb2, update_pb2

DHT_SECONDS_MAX = 10.0
STOP_SECONDS_MAX = 2.0
# A record outlives three missed refreshes.
DHT_RECORD_SECONDS = 1200.0
# Limits of a DHT node: records in all, records of one run (8 KiB each at most), and runs of a relay (a peer has one run). The
# last is the largest difference between two machines' clocks.
DHT_RECORDS_MAX = 4096
DHT_RECORDS_A_RUN_MAX = 2048
RELAY_RUNS_MAX = 64
DHT_CLOCKS_APART_SECONDS = 60.0
# Calls of one remote, and of all remotes: so many keys at once, and one more each so many ms. A peer stores its one key every
# five minutes, and looks it up every 2 to 60 s while peers are missing, over several hops.
DHT_CALLS_MAX = 200
DHT_CALL_MS = 200
DHT_CALLS_ALL_MAX = 20_000
DHT_CALL_ALL_MS = 2
DHT_KEYS_A_CALL_MAX = 64
DHT_REMOTES_KEPT = 4096

RECORD_BYTES_MAX = 8 * 1024


class DhtBusyError(SwarmentumError):
    """A remote asked this node too often; hivemind sends it as the answer."""


def run_key(run_id: bytes) -> str:
    """The DHT key of a run's peers."""
    return f"swarmentum/v1/{run_id.hex()}/peers"


class _OwnRecordsOnly(RecordValidatorBase):  # type: ignore[misc]
    """Keeps a record only if it is an envelope signed by the peer of the record's subkey, under the key of the envelope's run.

    The run is `run_id` if this node serves one run. The record must not outlive a record that this node makes itself."""

    def __init__(self, run_id: bytes | None = None) -> None:
        super().__init__()
        self._run_id = run_id

    def validate(self, record: DHTRecord) -> bool:
        """hivemind calls this for every record that it stores or reads."""
        if not record.expiration_time <= get_dht_time() + DHT_RECORD_SECONDS + DHT_CLOCKS_APART_SECONDS:
            return False
        if len(record.value) > 2 * RECORD_BYTES_MAX or len(record.subkey) > contract.ADDRESS_BYTES_MAX:
            return False
        try:
            value, subkey = MSGPackSerializer.loads(record.value), MSGPackSerializer.loads(record.subkey)
            if not isinstance(value, bytes) or not isinstance(subkey, str) or len(value) > RECORD_BYTES_MAX:
                return False
            envelope = parse(envelope_pb2.SignedEnvelope, value)
            if self._run_id not in (None, envelope.run_id) or record.key != _key_bytes(envelope.run_id):
                return False
            opened = check(envelope, kind=Kind.KIND_PEER_RECORD, run_id=envelope.run_id)
        except (Refusal, ValueError, TypeError):
            return False
        return peer_id(opened.public_key) == subkey

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value as it is: values are signed already."""
        return record.value  # type: ignore[no-any-return]

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value as it is: `sign_value` added nothing."""
        return record.value  # type: ignore[no-any-return]

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """True: one such validator is enough."""
        return isinstance(other, _OwnRecordsOnly)


def _key_bytes(run_id: bytes) -> bytes:
    return DHTID.generate(source=run_key(run_id)).to_bytes()  # type: ignore[no-any-return]


class _Records(DHTLocalStorage):  # type: ignore[misc]
    """Records of at most `runs_max` runs, DHT_RECORDS_MAX in all; the records that end soonest go first. Only dictionaries."""

    def __init__(self, runs_max: int) -> None:
        super().__init__(maxsize=runs_max)

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """hivemind's two ways to store: a dictionary's record, and the dictionary itself (from `store_subkey`)."""
        until = min(expiration_time, get_dht_time() + DHT_RECORD_SECONDS)
        if subkey is not None:
            return self.store_subkey(key, subkey, value, until)
        if not isinstance(value, DictionaryDHTValue):
            return False
        value.maxsize = DHT_RECORDS_A_RUN_MAX  # the sender may have given another limit
        return bool(super().store(key, value, until))

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """One record of a run; a new one finds no place when there are DHT_RECORDS_MAX."""
        until = min(expiration_time, get_dht_time() + DHT_RECORD_SECONDS)
        found = self.get(key)
        new = found is None or subkey not in found.value
        if new and self.records() >= DHT_RECORDS_MAX:
            return False
        if not super().store_subkey(key, subkey, value, until):
            return False
        self.data[key].value.maxsize = DHT_RECORDS_A_RUN_MAX
        return True

    def records(self) -> int:
        """The number of records."""
        return sum(len(kept.value) for _, kept in self.items())


class _Doorkeeper:
    """The host's libp2p as hivemind's DHT sees it. The class counts every call of a remote before hivemind answers the call."""

    def __init__(self, p2p: Any) -> None:
        self._p2p = p2p
        self._each = RateLimiter(DHT_CALLS_MAX, DHT_CALL_MS, DHT_REMOTES_KEPT)
        self._all = RateLimiter(DHT_CALLS_ALL_MAX, DHT_CALL_ALL_MS, 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._p2p, name)

    async def add_protobuf_handler(self, name: str, handler: Any, *arguments: Any, **options: Any) -> None:
        """As hivemind's, but with the count first."""

        async def counted(request: Any, context: Any) -> Any:
            keys = getattr(request, "keys", ())
            if len(keys) > DHT_KEYS_A_CALL_MAX or not self._may(context.remote_id, max(len(keys), 1)):
                if isinstance(request, dht_pb2.StoreRequest):
                    return dht_pb2.StoreResponse(store_ok=[False] * min(len(keys), DHT_KEYS_A_CALL_MAX))
                raise DhtBusyError("too many calls; try again in a minute")
            return await handler(request, context)

        await self._p2p.add_protobuf_handler(name, counted, *arguments, **options)

    def _may(self, remote: Any, times: int) -> bool:
        now = 1000 * time.monotonic()
        return all(self._each.allow(remote, now) and self._all.allow("", now) for _ in range(times))


def open_record(data: bytes, run_id: bytes) -> tuple[bytes, tuple[str, ...]]:
    """(public key, addresses) of a peer record, or `Refusal`."""
    opened = open_envelope(data, kind=Kind.KIND_PEER_RECORD, run_id=run_id, bytes_max=RECORD_BYTES_MAX)
    body = parse(update_pb2.PeerRecord, opened.body)
    if len(body.addresses) > contract.ADDRESSES_MAX:
        raise Refusal(Reason.OUT_OF_RANGE, f"{len(body.addresses)} addresses, at most {contract.ADDRESSES_MAX}")
    signer = peer_id(opened.public_key)
    return opened.public_key, tuple(parse_address(address, signer).text for address in body.addresses)


class Discovery:
    """The DHT node of a peer or relay. `run_id` None: only serves others' lookups (a relay)."""

    def __init__(self, host: Host, run_id: bytes | None) -> None:
        self._host = host
        self._run_id = run_id
        self._node: Any = None
        self._sequence = 0

    async def start(self, bootstrap: list[str]) -> None:
        """Join the DHT through bootstrap peers; alone if there are none or none answers."""
        known = [address.text for address in usable(bootstrap, most=BOOTSTRAP_MAX)]
        self._node = await DHTNode.create(
            _Doorkeeper(self._host.p2p),
            initial_peers=known or None,
            record_validator=_OwnRecordsOnly(self._run_id),
            ensure_bootstrap_success=False,
            bootstrap_timeout=DHT_SECONDS_MAX,
            node_id=DHTID.generate(self._host.identity.public_key),
            strict=False,
        )
        runs_max = RELAY_RUNS_MAX if self._run_id is None else 1
        self._node.protocol.storage, self._node.protocol.cache = _Records(runs_max), _Records(runs_max)

    async def stop(self) -> None:
        """Stop answering. With a dead daemon hivemind would wait for ever, so this ends after STOP_SECONDS_MAX."""
        if self._node is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._node.shutdown(), STOP_SECONDS_MAX)

    def forget(self) -> None:
        """The daemon of this node is gone, so nobody can ask the node any more: end its work."""
        if self._node is not None:
            self._node.is_alive = False

    @property
    def _key(self) -> str:
        assert self._run_id is not None, "a relay has no run"
        return run_key(self._run_id)

    async def announce(self, addresses: list[str]) -> bool:
        """Publish this peer's addresses; the record is valid for DHT_RECORD_SECONDS. Nobody is told before `start`."""
        assert self._run_id is not None, "a relay has no run"
        if self._node is None:
            return False
        self._sequence += 1
        own = [address.text for address in usable(addresses, self._host.peer_id)]
        record = update_pb2.PeerRecord(addresses=own, sequence=self._sequence)
        envelope = seal(self._host.identity, Kind.KIND_PEER_RECORD, self._run_id, record)
        call = self._node.store(
            self._key,
            envelope.SerializeToString(deterministic=True),
            get_dht_time() + DHT_RECORD_SECONDS,
            subkey=self._host.peer_id,
        )
        try:
            return bool(await asyncio.wait_for(call, DHT_SECONDS_MAX))
        except (TimeoutError, OSError):
            return False

    async def peers(self) -> dict[bytes, tuple[str, ...]]:
        """The addresses of the peers whose records are still valid, by public key. Nobody is known before `start`."""
        assert self._run_id is not None, "a relay has no run"
        if self._node is None:
            return {}
        try:
            found = await asyncio.wait_for(self._node.get(self._key, latest=True), DHT_SECONDS_MAX)
        except (TimeoutError, OSError):
            return {}
        if found is None or not isinstance(found.value, dict):
            return {}
        peers = {}
        for record in list(found.value.values())[: contract.ROSTER_PEERS_MAX]:
            try:
                public_key, addresses = open_record(record.value, self._run_id)
            except (Refusal, TypeError):
                continue
            peers[public_key] = addresses
        return peers
