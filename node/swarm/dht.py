"""Discovery: hivemind's DHT on the host's own libp2p. Peers of a run find each other under the run's key.

Every record is a signed peer record stored under its own peer's subkey; a DHT node refuses any other, so nobody can write
over somebody else's. What is read is verified again.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer, get_dht_time

from node.swarm import settings as limits
from node.swarm.host import Host
from protos import limits as contract
from protos.envelope import Kind, check, open_envelope, parse, seal
from protos.errors import Reason, Refusal
from protos.identity import peer_id
from protos.v1 import envelope_pb2, update_pb2

RECORD_BYTES_MAX = 8 * 1024


class _OwnRecordsOnly(RecordValidatorBase):  # type: ignore[misc]
    """Keeps a record only if it is an envelope signed by the peer whose subkey it has."""

    def validate(self, record: DHTRecord) -> bool:
        """Called by hivemind for every record that is stored or read."""
        try:
            value, subkey = MSGPackSerializer.loads(record.value), MSGPackSerializer.loads(record.subkey)
            if not isinstance(value, bytes) or not isinstance(subkey, str) or len(value) > RECORD_BYTES_MAX:
                return False
            envelope = parse(envelope_pb2.SignedEnvelope, value)
            opened = check(envelope, kind=Kind.KIND_PEER_RECORD, run_id=envelope.run_id)
        except (Refusal, ValueError, TypeError):
            return False
        return peer_id(opened.public_key) == subkey

    def sign_value(self, record: DHTRecord) -> bytes:
        """Values are signed already."""
        return record.value  # type: ignore[no-any-return]

    def strip_value(self, record: DHTRecord) -> bytes:
        """Nothing was added."""
        return record.value  # type: ignore[no-any-return]

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """One of us is enough."""
        return isinstance(other, _OwnRecordsOnly)


def open_record(data: bytes, run_id: bytes) -> tuple[bytes, tuple[str, ...]]:
    """(public key, addresses) of a peer record, or `Refusal`."""
    opened = open_envelope(data, kind=Kind.KIND_PEER_RECORD, run_id=run_id, bytes_max=RECORD_BYTES_MAX)
    body = parse(update_pb2.PeerRecord, opened.body)
    suffix = f"/p2p/{peer_id(opened.public_key)}"
    if len(body.addresses) > contract.ADDRESSES_MAX:
        raise Refusal(Reason.OUT_OF_RANGE, f"{len(body.addresses)} addresses, at most {contract.ADDRESSES_MAX}")
    for address in body.addresses:
        if len(address) > contract.ADDRESS_BYTES_MAX or not address.endswith(suffix):
            raise Refusal(Reason.OUT_OF_RANGE, f"address {address[:64]!r} is not the signer's")
    return opened.public_key, tuple(body.addresses)


class Discovery:
    """The DHT node of a peer or relay. `run_id` None: only serves others' lookups (a relay)."""

    def __init__(self, host: Host, run_id: bytes | None) -> None:
        self._host = host
        self._run_id = run_id
        self._node: Any = None
        self._sequence = 0

    async def start(self, bootstrap: list[str]) -> None:
        """Join the DHT through bootstrap peers; alone if there are none or none answers."""
        self._node = await DHTNode.create(
            self._host.p2p,
            initial_peers=bootstrap or None,
            record_validator=_OwnRecordsOnly(),
            ensure_bootstrap_success=False,
            bootstrap_timeout=limits.DHT_SECONDS_MAX,
            node_id=DHTID.generate(self._host.identity.public_key),
            strict=False,
        )

    async def stop(self) -> None:
        """Stop answering."""
        if self._node is not None:
            await self._node.shutdown()

    @property
    def _key(self) -> str:
        assert self._run_id is not None, "a relay has no run"
        return f"swarmentum/v1/{self._run_id.hex()}/peers"

    async def announce(self, addresses: list[str]) -> bool:
        """Publish where this peer is; good for DHT_RECORD_SECONDS."""
        assert self._run_id is not None, "a relay has no run"
        self._sequence += 1
        record = update_pb2.PeerRecord(addresses=addresses[: contract.ADDRESSES_MAX], sequence=self._sequence)
        envelope = seal(self._host.identity, Kind.KIND_PEER_RECORD, self._run_id, record)
        call = self._node.store(
            self._key,
            envelope.SerializeToString(deterministic=True),
            get_dht_time() + limits.DHT_RECORD_SECONDS,
            subkey=self._host.peer_id,
        )
        try:
            return bool(await asyncio.wait_for(call, limits.DHT_SECONDS_MAX))
        except (TimeoutError, OSError):
            return False

    async def peers(self) -> dict[bytes, tuple[str, ...]]:
        """Addresses by public key of the peers that announced themselves lately."""
        assert self._run_id is not None, "a relay has no run"
        try:
            found = await asyncio.wait_for(self._node.get(self._key, latest=True), limits.DHT_SECONDS_MAX)
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
