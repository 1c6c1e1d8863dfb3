"""A run as anybody may read it (GetRun, ListEntries): its facts, and its verified log page by page. Joins nothing.

`status`, the page, `ledger`, `export-log`, the doctor and `read_run` read through this. Refuses entries that do not hold. Only
`swarmentum watch` reads by itself: it proves the wire with another implementation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Self

from node.link.client import CoordinatorClient
from protos.envelope import parse
from protos.errors import NetworkError, OperatorError, Refusal
from protos.invite import Invite
from protos.log import Chain, SignedEntry
from protos.run_config import RunConfig
from protos.run_sections import OperatorsConfig
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2, log_pb2


class DoesNotHoldError(OperatorError):
    """An entry of the log is not what its coordinator signed, or does not follow the one before."""


def extended(chain: Chain, envelope: bytes) -> SignedEntry:
    """The next entry of a log, verified; the chain has it then. Raises DoesNotHoldError."""
    try:
        return chain.extend(envelope)
    except Refusal as refusal:
        raise DoesNotHoldError(f"entry {chain.step + 1} of the log does not hold: {refusal}") from refusal


def chain_before(
    run_id: bytes, coordinator: bytes, operators: OperatorsConfig | None, envelope: bytes, step: int | None = None
) -> Chain:
    """The chain up to an entry: the first of a log follows the run's id, a later one what it names itself.

    `step`: the entry's; None takes what the entry says. Raises DoesNotHoldError for bytes that are none.
    """
    try:
        body = parse(log_pb2.LogEntry, parse(envelope_pb2.SignedEnvelope, envelope).body)
    except Refusal as refusal:
        raise DoesNotHoldError(f"the first entry of the log does not hold: {refusal}") from refusal
    step = body.step if step is None else step
    return Chain(run_id, coordinator, max(step - 1, 0), run_id if step <= 1 else body.parent_hash, operators)


class RunReader:
    """One connection to a run's coordinators. A call that nobody answers ends it, and the next call connects again."""

    def __init__(self, invite: Invite, at: tuple[str, ...] = ()) -> None:
        """`at`: the addresses to ask, if they are not those of the invite."""
        self._invite = replace(invite, coordinators=at or invite.coordinators)
        self._client, self._connected = CoordinatorClient(self._invite, None), False
        self._config: RunConfig | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def at(self) -> str:
        """The coordinator that answered last."""
        return self._client.at

    async def facts(self) -> tuple[pb.GetRunResponse, RunConfig]:
        """What the coordinator says of the run now. Raises NetworkError, RefusedError; OperatorError for another format."""
        client = await self._open()
        try:
            facts, self._config = await client.get_run()
        except NetworkError:
            await self.close()
            raise
        return facts, self._config

    async def page(self, first: int) -> list[bytes]:
        """Entries from step `first` on as they were signed, not verified; none at the end of the log."""
        client = await self._open()
        try:
            return (await client.entries(first))[0]
        except NetworkError:
            await self.close()
            raise

    async def entries(self, first: int = 1) -> AsyncIterator[SignedEntry]:
        """The log from step `first` on, each entry verified, and that it follows the one before. Raises DoesNotHoldError."""
        chain: Chain | None = None
        step = first
        while page := await self.page(step):
            for envelope in page:
                if chain is None:
                    config, invite = self._config or (await self.facts())[1], self._invite
                    chain = chain_before(invite.run_id, invite.coordinator_public_key, config.operators, envelope, step)
                signed = extended(chain, envelope)
                step = chain.step + 1
                yield signed

    async def _open(self) -> CoordinatorClient:
        if not self._connected:
            await self._client.connect()
            self._connected = True
        return self._client

    async def close(self) -> None:
        """Hang up."""
        self._connected = False
        await self._client.close()


async def read_facts(invite: Invite) -> tuple[pb.GetRunResponse, RunConfig]:
    """One look at a run."""
    async with RunReader(invite) as run:
        return await run.facts()
