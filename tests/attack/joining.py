"""A stranger that joins a run without a model: what an attack needs to be a peer."""

import json
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from node.link.client import CoordinatorClient
from protos.identity import Identity
from protos.limits import HASH_BYTES
from protos.v1 import coordinator_pb2 as pb
from tests.attack.base import Target


def layout_of(target: Target) -> bytes:
    """The run's layout digest where its genesis has none. A real attacker builds the model; this one looks into the journal."""
    query = "SELECT body FROM records WHERE kind = 'layout' AND run_id = ?"
    for path in target.folder.rglob("journal.sqlite3"):
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
            row = connection.execute(query, (target.invite.run_id,)).fetchone()
        connection.close()
        if row is not None:
            return bytes.fromhex(json.loads(row[0])["layout_digest"])
    return bytes(HASH_BYTES)


@asynccontextmanager
async def joined(
    target: Target, *, device: str = "cpu", addresses: Sequence[str] = (), identity: Identity | None = None
) -> AsyncIterator[tuple[CoordinatorClient, pb.JoinResponse]]:
    """A new identity with a session; it follows nothing yet, and says that it is at `addresses` (`{id}`: its peer id)."""
    identity = identity or Identity.generate()
    client = CoordinatorClient(target.invite, identity)
    own = [address.replace("{id}", identity.peer_id) for address in addresses]
    try:
        await client.connect()
        facts, _ = await client.get_run()
        layout = facts.genesis.layout_digest or layout_of(target)
        body = pb.JoinBody(layout_digest=layout, parameters=10, device=device, addresses=own)
        yield client, await client.join(body)
    finally:
        await client.close()


async def follow_until_cut(client: CoordinatorClient, from_step: int = 0) -> None:
    """Be a connected peer: read the stream until the coordinator or a cancellation ends it."""
    async for _ in client.follow(from_step):
        continue
