"""A peer receives other peers' announcements, and pulls, checks and holds their payloads. The peer keeps contradictions as
evidence.

A peer pulls only from members of the open step's roster (node/swarm/inbox.py is the door). A peer reports that it holds a
payload only after the payload has passed the payloads' door.

`Topic` is the run's GossipSub topic, for signed announcements and log entries. Its delivery is best effort: a peer that misses
a message gets the entry from the coordinator, and the entry names the payloads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from node.overlay.host import Host
from node.swarm.collector import PayloadDecoder
from node.swarm.inbox import Announced, Inbox
from node.swarm.outbox import Outbox
from node.swarm.pulls import Pulls
from node.swarm.runtime import Runtime, View
from protos.errors import NetworkError, OperatorError, Reason, Refusal
from protos.identity import public_key_of, short
from protos.log import Entry, Equivocation
from protos.slices import split
from protos.tick import Tick


def topic_of(run_id: bytes) -> str:
    """GossipSub topic of a run: signed envelopes of announcements and log entries."""
    return f"swarmentum/v1/{run_id.hex()}"


class Topic:
    """One run's, over one overlay host."""

    def __init__(self, host: Host, run_id: bytes, view: View, log: Any) -> None:
        self._host, self._name = host, topic_of(run_id)
        self._view, self._log = view, log

    async def subscribe(self, hear: Callable[[bytes], None]) -> None:
        """Hand every message to `hear`."""
        await self._host.subscribe(self._name, hear)

    async def say(self, raw: bytes) -> None:
        """Gossip an envelope. A failure is only logged."""
        try:
            await self._host.publish(self._name, raw)
        except NetworkError as error:
            self._log.info("gossip failed", step=self._view.step, why=str(error))

    async def neighbours(self) -> set[bytes]:
        """Public keys of the connected peers of this run: they are in the open step's roster, or listen to the topic, or their
        connection is relayed.

        A relay of the overlay is connected, too, but listens to no topic and needs nothing of the run. p2pd may not know for
        minutes that a member listens.
        """
        connected, listening = await self._host.connected(), await self._host.subscribers(self._name)
        roster, found = frozenset(self._view.roster), set()
        for remote, direct in connected.items():
            with suppress(OperatorError):  # not an Ed25519 key, so no peer of a run
                key = public_key_of(remote)
                if key in roster or remote in listening or not direct:
                    found.add(key)
        return found

    async def publish_to_each(self, raw: bytes) -> None:
        """Gossip an envelope, and send it to every connected peer: it has to arrive before this peer stops."""
        await self._host.publish_to_each(self._name, raw)


class Announcements:
    """One peer's, of the steps after the head; `public_key` is its own. Held payloads and evidence go into the outbox."""

    def __init__(
        self,
        public_key: bytes,
        inbox: Inbox,
        pulls: Pulls,
        door: PayloadDecoder,
        outbox: Outbox,
        view: View,
        runtime: Runtime,
    ) -> None:
        self._public_key = public_key
        self._inbox, self._pulls, self._door, self._outbox = inbox, pulls, door, outbox
        self._view, self._runtime = view, runtime
        self._pulling: dict[asyncio.Task[None], int] = {}  # at which step

    def move_head(self, step: int, entry_hash: bytes) -> None:
        """The log has grown, or starts again from a snapshot: announcements from before its last step matter no more.

        Pulls for the last step itself continue, because its entry may name their payloads.
        """
        self._inbox.move_head(step, entry_hash)
        for task in [task for task, at in self._pulling.items() if at < step]:
            task.cancel()

    def open_step(self, tick: Tick) -> None:
        """This peer knows the step's roster: it takes the announcements that the roster's members have sent already."""
        if self._view.ranges > 1:  # it may have slices of other ranges than it takes now
            self._outbox.hold_only(self._public_key)
        for announced in self._inbox.open_step(tick.step, (share.public_key for share in tick.roster)):
            if announced.author != self._public_key:
                self._heard(announced)

    def offer(self, data: bytes) -> None:
        """Another peer's announcement, unverified. Raises `Refusal`."""
        announced = self._inbox.offer(data, self._door.bytes_max)
        self._runtime.counters.announcements += 1
        if self._inbox.may_pull(announced) or self._inbox.is_decided(announced.step):
            self._heard(announced)

    @contextmanager
    def pushed(self, data: bytes, author: bytes) -> Iterator[Announced | None]:
        """An announcement that comes with its payload, from its author. The announcement counts once the payload is here, or
        does not come.

        A payload that comes before the tick of its step waits for the tick here: a pull would bring the same bytes again. The
        pusher must be in the roster that this peer knows (node/swarm/pushes.py), and the inbox bounds what it may announce.

        None: this peer does not want the payload, because it knows the announcement, or because others add the step's votes up.
        With several ranges only the tick says which of them this peer takes: it pulls an early payload later. Raises `Refusal`
        as `offer` does, and if the author did not push.
        """
        try:
            announced = self._inbox.offer(data, self._door.bytes_max)
        except Refusal as refusal:
            if refusal.reason is not Reason.REPLAYED:
                raise
            yield None
            return
        self._runtime.counters.announcements += 1
        wanted = self._inbox.may_pull(announced) and bool(self.takes(announced.step))
        early = self._inbox.is_early(announced) and self._view.ranges == 1
        try:
            if announced.author != author:
                raise Refusal(Reason.UNKNOWN_SIGNER, f"a push by another than its author {short(announced.author)}")
            yield announced if wanted or early else None
        finally:
            if wanted:
                self._heard(announced)

    def disputed(self, entry: Entry) -> list[bytes]:
        """Announcements by an entry's authors of other payloads than the entry names: evidence for other peers to compare."""
        return self._inbox.disputed(entry)

    def named_in(self, entry: Entry) -> dict[bytes, bytes]:
        """The announcements of an entry's payloads that this peer has received, by author."""
        return {
            c.public_key: envelope
            for c in entry.contributions
            if (envelope := self._inbox.envelope_of(entry.step, c.public_key, c.payload_sha256)) is not None
        }

    def _heard(self, announced: Announced) -> None:
        """Pull the payload of a roster member's announcement, or keep the announcement as evidence against its author."""
        first = self._inbox.contradicted(announced)
        if first is None:
            if not self.takes(announced.step):
                return
            task = self._runtime.spawn(self._hold(announced))
            self._pulling[task] = announced.step
            task.add_done_callback(self._pulling.pop)
            return
        step, author = announced.step, announced.author
        self._runtime.refused(Refusal(Reason.EQUIVOCATED, f"two payloads for step {step} by {short(author)}"))
        if self._outbox.accuse(author, Equivocation(first.envelope, announced.envelope)):
            self._runtime.log.warning("a peer announced two payloads for one step", step=step, author=short(author))

    def takes(self, step: int) -> tuple[int, ...]:
        """The ranges of which this peer takes the slices of a step's payloads: if others add its votes up, only they do."""
        return self._view.ranges_of(step, self._public_key)

    async def _hold(self, announced: Announced) -> None:
        """Pull an announced payload, check it, and report that this peer holds it. Other peers' faults raise no error."""
        step, log, tick = announced.step, self._runtime.log, self._view.tick
        which, ranges = self.takes(step), self._view.ranges
        if not which:
            return  # the step is open again meanwhile, and others add its votes up
        try:
            data = await self._pulls.announced(announced, which)
            if len(which) == ranges:
                self._door.open(data, step, announced.payload_bytes)
            else:
                for number, part in zip(which, split(data, ranges, which), strict=True):
                    self._door.part(number).open(part, step)
        except Refusal as refusal:
            self._runtime.refused(refusal)
            log.warning("refused a payload", step=step, author=short(announced.author), why=str(refusal))
            return
        except NetworkError as error:
            log.info("announced payload not pulled", step=step, why=str(error))
            return
        if step > self._view.step and (ranges == 1 or self._view.tick is tick):
            self._outbox.hold(step, announced.author, announced.payload_sha256)
