"""Others' announcements: heard, their payloads pulled, checked and held; what contradicts itself is evidence.

Only members of the open step's roster are pulled from (node/swarm/inbox.py is the door). A peer says that it holds a payload
when it has it and it passed the payloads' door, not before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from node.swarm.collector import Door
from node.swarm.inbox import Announced, Inbox
from node.swarm.outbox import Outbox
from node.swarm.pulls import Pulls
from node.swarm.runtime import Runtime
from node.swarm.view import View
from protos.errors import NetworkError, Reason, Refusal
from protos.identity import short
from protos.log import Entry, Equivocation, Tick


class Announcements:
    """One peer's, of the steps after the head; `public_key` is its own. What it holds and finds goes into the outbox."""

    def __init__(
        self,
        public_key: bytes,
        inbox: Inbox,
        pulls: Pulls,
        door: Door,
        outbox: Outbox,
        view: View,
        runtime: Runtime,
    ) -> None:
        self._public_key = public_key
        self._inbox, self._pulls, self._door, self._outbox = inbox, pulls, door, outbox
        self._view, self._runtime = view, runtime
        self._pulling: dict[asyncio.Task[None], int] = {}  # at which step

    def move_head(self, step: int, entry_hash: bytes) -> None:
        """The log has grown (or was started again from a snapshot): what was announced before its last step matters no more.

        Pulls for the last step itself go on: what its entry names is taken over from them.
        """
        self._inbox.move_head(step, entry_hash)
        for task in [task for task, at in self._pulling.items() if at < step]:
            task.cancel()

    def open_step(self, tick: Tick) -> None:
        """The step's roster is known: what its members said already is heard now."""
        for announced in self._inbox.open_step(tick.step, (share.public_key for share in tick.roster)):
            if announced.author != self._public_key:
                self._heard(announced)

    def offer(self, data: bytes) -> None:
        """Somebody else's announcement, unverified. Raises `Refusal`."""
        announced = self._inbox.offer(data, self._door.bytes_max)
        self._runtime.counters.announcements += 1
        if self._inbox.may_pull(announced) or self._inbox.is_decided(announced.step):
            self._heard(announced)

    @contextmanager
    def pushed(self, data: bytes, author: bytes) -> Iterator[Announced | None]:
        """An announcement that comes with its payload, from its author; heard once the payload is there, or does not come.

        None: the payload is not wanted, as it was announced before, or its step is not open here yet (then it is pulled).
        Raises `Refusal`, as `offer` does, and for an announcement by somebody else.
        """
        try:
            announced = self._inbox.offer(data, self._door.bytes_max)
        except Refusal as refusal:
            if refusal.reason is not Reason.REPLAYED:
                raise
            yield None
            return
        self._runtime.counters.announcements += 1
        wanted = self._inbox.may_pull(announced)
        try:
            if announced.author != author:
                raise Refusal(Reason.UNKNOWN_SIGNER, f"a push by another than its author {short(announced.author)}")
            yield announced if wanted else None
        finally:
            if wanted:
                self._heard(announced)

    def disputed(self, entry: Entry) -> list[bytes]:
        """What this peer heard from an entry's authors about other payloads than the entry names: for others to compare."""
        return self._inbox.disputed(entry)

    def named_in(self, entry: Entry) -> dict[bytes, bytes]:
        """What the authors of an entry's payloads said about them, by author: those that this peer heard."""
        return {
            c.public_key: envelope
            for c in entry.contributions
            if (envelope := self._inbox.envelope_of(entry.step, c.public_key, c.payload_sha256)) is not None
        }

    def _heard(self, announced: Announced) -> None:
        """A roster member's announcement: its payload is pulled, or it is evidence against its author."""
        first = self._inbox.contradicted(announced)
        if first is None:
            task = self._runtime.spawn(self._hold(announced))
            self._pulling[task] = announced.step
            task.add_done_callback(self._pulling.pop)
            return
        step, author = announced.step, announced.author
        self._runtime.refused(Refusal(Reason.EQUIVOCATED, f"two payloads for step {step} by {short(author)}"))
        if self._outbox.accuse(author, Equivocation(first.envelope, announced.envelope)):
            self._runtime.log.warning("a peer announced two payloads for one step", step=step, author=short(author))

    async def _hold(self, announced: Announced) -> None:
        """Pull an announced payload, check it, and report that we hold it. Others' faults end here."""
        step, log = announced.step, self._runtime.log
        try:
            data = await self._pulls.announced(announced)
            self._door.open(data, step, announced.payload_bytes)
        except Refusal as refusal:
            self._runtime.refused(refusal)
            log.warning("refused a payload", step=step, author=short(announced.author), why=str(refusal))
            return
        except NetworkError as error:
            log.info("announced payload not pulled", step=step, why=str(error))
            return
        if step > self._view.step:
            self._outbox.hold(step, announced.author, announced.payload_sha256)
