"""A peer's own payload of a step: signed once, shown to other peers when it may be, re-announced until the step is decided.

Refuses to sign a second announcement for a step (last_announcement.py). In a run with checks, and in an open run, no peer sees
a payload before the coordinator has its announcement. A peer that copies the payload is therefore later. ADR 19.

A task beside the training thread tells other peers, because one peer that does not answer must not slow all others down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from node.blobs.payloads import Payloads
from node.swarm.facts import Fact, Held, Published
from node.swarm.outbox import Outbox
from node.swarm.runtime import Runtime, View
from protos.disk import check_no_folder, write_bytes
from protos.envelope import Kind, seal
from protos.equivocation import open_announcement
from protos.errors import OperatorError, Refusal
from protos.identity import Identity
from protos.log import Entry
from protos.slices import hash_of
from protos.v1 import update_pb2
from protos.waits import Waits

# The last announcement that this peer signed is on its disk before another peer gets it: one payload a step in every case.
#
# A peer that is killed and comes back, or that re-syncs, computes other votes for a step that is still open. The log excludes
# an author of two announcements of one step, so the peer re-sends its first announcement. If the announced payload is lost, the
# peer sits the step out. ADR 19.

NAME = "announced"


@dataclass(frozen=True)
class SignedAnnouncement:
    """A signed announcement: its step, its payload's hash, and its envelope."""

    step: int
    payload_sha256: bytes
    envelope: bytes


class LastAnnouncement:
    """One file in the folder of a peer's run. Raises OperatorError if the file is not this peer's announcement of this run."""

    def __init__(self, folder: Path, run_id: bytes, author: bytes) -> None:
        self._path = folder / NAME
        self.value: SignedAnnouncement | None = None
        check_no_folder(self._path)
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        try:
            _, body = open_announcement(data, run_id=run_id, author=author)
        except Refusal as refusal:
            raise OperatorError(
                f"{self._path} is not this peer's last announcement of this run ({refusal}). Without it the peer may announce "
                "two payloads for a step, and be excluded for that. Wait until the run is a step further, then delete the file"
            ) from refusal
        self.value = SignedAnnouncement(body.step, body.payload_sha256, data)

    def keep(self, signed: SignedAnnouncement) -> None:
        """Durable on return: a power cut does not undo it. Raises DiskError."""
        write_bytes(self._path, signed.envelope)
        self.value = signed


T = TypeVar("T")
# A peer gossips its announcement again while the step is open: the mesh may not have existed at the first time.
GOSSIP_AGAIN_SECONDS_MIN = 1.0
GOSSIP_AGAIN_SECONDS_MAX = 8.0
# A peer tells others of a payload for at most so long. Then the next repetition tells those that lack it.
SAY_SECONDS_MAX = 10.0


class Aside(Protocol):
    """Runs a function beside the loop, and waits for what it returns."""

    def __call__(self, function: Callable[..., T], /, *given: Any) -> Awaitable[T]: ...


class Publication:
    """One peer's, in one run. `say` sends an announcement to other peers, with its payload if the payload is here.

    The peer withholds at most one payload: the last that it published."""

    def __init__(
        self,
        identity: Identity,
        run_id: bytes,
        payloads: Payloads,
        outbox: Outbox,
        say: Callable[[bytes, bytes | None], Awaitable[None]],
        view: View,
        runtime: Runtime,
        aside: Aside = asyncio.to_thread,
    ) -> None:
        self._identity, self._run_id = identity, run_id
        self._payloads, self._outbox, self._say = payloads, outbox, say
        self._view, self._runtime, self._aside = view, runtime, aside
        self._last_announcement = LastAnnouncement(payloads.folder.parent, run_id, identity.public_key)
        self._withheld: SignedAnnouncement | None = None
        self._saying: asyncio.Task[None] | None = None

    async def publish(self, data: bytes, announcement: update_pb2.Announcement) -> None:
        """Announce this peer's payload of a step, or re-announce the payload that this peer signed before for the step.

        Returns once the announcement is durable. Other peers, and the coordinator, hear it afterwards. Raises DiskError.
        """
        if announcement.step <= self._view.step:
            return  # the log has decided the step while this peer computed
        signed = await self._sign_once(data, announcement)
        if signed is None or signed.step <= self._view.step:
            return
        again = self._outbox.announcement == Published(signed.step, signed.envelope)
        self._outbox.announce(signed.step, signed.envelope)
        self._outbox.hold(signed.step, self._identity.public_key, signed.payload_sha256)
        if self._view.commits_first and not again:
            self._withheld = signed
        if self._withheld is None:
            self._say_soon(signed)

    def _say_soon(self, signed: SignedAnnouncement) -> None:
        """Tell other peers of a durable announcement, in a task of the session: the caller waits for no peer's answer.

        A later call ends an earlier one's task, so there is one at a time. Nothing is lost by that. The later call tells those
        that lack the same announcement, or the log has decided the earlier step and names its payload.
        """
        if self._saying is not None:
            self._saying.cancel()
        self._saying = self._runtime.spawn(self._say_in_time(signed))

    async def _say_in_time(self, signed: SignedAnnouncement) -> None:
        try:
            async with asyncio.timeout(SAY_SECONDS_MAX):
                await self._say(signed.envelope, self._payloads.whole(signed.payload_sha256, self._view.ranges))
        except TimeoutError:
            self._runtime.log.info("telling other peers of votes takes long; trying again later", step=signed.step)

    async def _sign_once(self, data: bytes, announcement: update_pb2.Announcement) -> SignedAnnouncement | None:
        """The one announcement that this peer ever signs for a step, with its payload kept; None if the payload is lost."""
        ranges, last = self._view.ranges, self._last_announcement.value
        step, sha256 = announcement.step, hash_of(data, ranges)
        if last is not None and step <= last.step and (step, sha256) != (last.step, last.payload_sha256):
            held = step == last.step and self._payloads.keep_own(last.payload_sha256)
            held = held and self._payloads.whole(last.payload_sha256, ranges) is not None
            what = "announcing them again" if held else "their payload is not here, so this peer sits the step out"
            self._runtime.log.info("this peer announced votes before", step=step, announced_step=last.step, then=what)
            return last if held else None
        if self._payloads.put_whole(step, data, ranges):
            self._runtime.counters.payload_bytes_sent += len(data)
        if last is not None and step == last.step:
            return last
        announcement.payload_sha256, announcement.payload_bytes = sha256, len(data)
        envelope = seal(self._identity, Kind.KIND_ANNOUNCEMENT, self._run_id, announcement)
        signed = SignedAnnouncement(step, sha256, envelope.SerializeToString(deterministic=True))
        await self._aside(self._last_announcement.keep, signed)
        return signed

    def shown(self, sha256: bytes) -> bytes | None:
        """A payload of any author, for any peer that asks; None for the payload that this peer withholds."""
        if self._withheld is not None and sha256 == self._withheld.payload_sha256:
            return None
        return self._payloads.get(sha256)

    def show_decided(self, step: int) -> None:
        """A step is decided: stop withholding its payload, because the log names its hash to every peer."""
        if self._withheld is not None and self._withheld.step <= step:
            self._withheld = None

    def answered(self, facts: Sequence[Fact], taken: bool) -> list[Published]:
        """The coordinator has answered a report of these facts. If it has `taken` the withheld announcement, show the payload.

        Returns the facts that it has not taken. Until the coordinator takes them, or decides the step, no peer sees the votes.
        """
        withheld = self._withheld
        if withheld is None:
            return []
        said = [fact for fact in facts if isinstance(fact, Published) and fact.envelope == withheld.envelope]
        if said and taken:
            self._show(withheld)
            return []
        return said

    def _show(self, signed: SignedAnnouncement) -> None:
        """The coordinator has the announcement: other peers may see it, too."""
        if self._withheld == signed:
            self._withheld = None
            self._say_soon(signed)

    def named_in(self, entry: Entry) -> bytes | None:
        """This peer's announcement, if an entry names the announced payload."""
        own = self._outbox.announcement
        mine = next((c for c in entry.contributions if c.public_key == self._identity.public_key), None)
        sha256 = b"" if mine is None else mine.payload_sha256 or self.announced_in(entry.step)
        kept = Held(self._identity.public_key, sha256) in self._outbox.holdings
        if kept and own is not None and own.step == entry.step:  # not a payload of an earlier life
            return own.envelope
        return None

    def announced_in(self, step: int) -> bytes:
        """The hash of the only payload that this peer has announced for this step; b"" if it announced none."""
        last = self._last_announcement.value
        return last.payload_sha256 if last is not None and last.step == step else b""

    def _own(self, step: int) -> bytes | None:
        """The payload that this peer announced for this step, if it is here."""
        last = self._last_announcement.value
        if last is None or last.step != step:
            return None
        return self._payloads.whole(last.payload_sha256, self._view.ranges)

    async def say_again_forever(self) -> None:
        """Re-announce to the peers that lack the announcement, ever less often, until its step is decided."""
        said, waits = 0, Waits(GOSSIP_AGAIN_SECONDS_MIN, GOSSIP_AGAIN_SECONDS_MAX)
        while True:
            await asyncio.sleep(waits.next())
            announcement = self._outbox.announcement
            if announcement is None or self._withheld is not None:
                waits.reset()
                continue
            step = announcement.step
            if step == said:
                await self._say(announcement.envelope, self._own(step))
            else:
                waits.reset()
            said = step
