"""A peer's own payload of a step: signed once, shown to other peers when it may be, re-announced until the step is decided; and
the reports to the coordinator, whose answers decide when other peers may see the payload.

Refuses to sign a second announcement for a step. In a run with checks, and in an open run, no peer sees
a payload before the coordinator has its announcement. A peer that copies the payload is therefore later. ADR 19.

A task beside the training thread tells other peers, because one peer that does not answer must not slow all others down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from node.blobs.payloads import Payloads
from node.link.client import CoordinatorClient
from node.swarm.facts import Applied, Fact, Failed, Held, NotCounted, Published
from node.swarm.outbox import Outbox
from node.swarm.runtime import Runtime, View
from protos.clocks import Again, Waits
from protos.disk import check_no_folder, write_bytes
from protos.envelope import Kind, seal
from protos.equivocation import open_announcement
from protos.errors import NetworkError, OperatorError, Refusal, RefusedError
from protos.identity import Identity
from protos.log import Entry
from protos.slices import hash_of, mask_from_bytes
from protos.text import printable
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import update_pb2

# The last announcement that this peer signed is on its disk before another peer gets it: one payload a step in every case. If a
# peer is killed and comes back, or re-syncs, it computes other votes for a step that is still open, and the log excludes an
# author of two announcements of one step. So it re-sends its first one, or abstains if that payload is lost. ADR 19.

NAME = "announced"
LOST = "the payload that it announced before is lost"


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
                f"{self._path} is not this peer's last announcement of this run ({refusal}): delete it, and the peer will send "
                "no votes in the step that is open when it starts, in which it may have sent some"
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
        if signed is None:
            self._outbox.abstain(announcement.step, LOST, lost=True)
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
            what = "announcing them again" if held else LOST
            self._runtime.log.info("this peer announced votes before", step=step, announced_step=last.step, then=what)
            return last if held else None
        if self._payloads.put_whole(step, data, ranges):
            self._runtime.counters.payload_bytes_sent += len(data)
        if last is not None and step == last.step:
            return last
        announcement.payload_sha256, announcement.payload_bytes = sha256, len(data)
        envelope = seal(self._identity, Kind.KIND_ANNOUNCEMENT, self._run_id, announcement)
        signed = SignedAnnouncement(step, sha256, envelope.SerializeToString(deterministic=True))
        await asyncio.gather(self._aside(self._last_announcement.keep, signed), self._aside(self._payloads.sync_own))
        return signed

    async def take_back(self, data: bytes) -> None:
        """Take over what an earlier life of this peer announced, as the coordinator has it: with its key alone, in a new home,
        this peer would announce another payload. Raises Refusal, DiskError."""
        _, body = open_announcement(data, run_id=self._run_id, author=self._identity.public_key)
        if body.step > max(self._view.step, self.last_step):
            await self._aside(self._last_announcement.keep, SignedAnnouncement(body.step, body.payload_sha256, data))

    @property
    def last_step(self) -> int:
        """The step of this peer's last announcement, as far as its home knows; 0: it announced none."""
        return 0 if self._last_announcement.value is None else self._last_announcement.value.step

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
            self._withheld = None
            self._say_soon(withheld)
            return []
        return said

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
        sha256 = self.announced_in(step)
        return self._payloads.whole(sha256, self._view.ranges) if sha256 else None

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


# The reporter sends the outbox's facts to the coordinator, one report at a time, until the coordinator has them. It sends
# nothing before the coordinator's stream has sent a message, because the coordinator does not know this session until then. It
# judges no fact: the module that added it has checked it.


UNANSWERED_MAX = 16
"""After so many quiet reports this peer asks for an answer."""


@dataclass(frozen=True)
class _Quiet:
    """A report that wanted no answer: the outbox's generation at that time, and the facts in it."""

    generation: int
    facts: list[Fact]


class Reporter:
    """One session's; paused until `resume`. `public_key`: this peer's."""

    def __init__(
        self,
        public_key: bytes,
        client: CoordinatorClient,
        outbox: Outbox,
        publication: Publication,
        view: View,
        runtime: Runtime,
    ) -> None:
        self._public_key = public_key
        self._client, self._outbox, self._publication = client, outbox, publication
        self._view, self._runtime = view, runtime
        self._telling = False
        self._unanswered: dict[int, _Quiet] = {}
        self._unheard, self._refused, self._waking = Waits(), Again(), False
        self._answers = True  # False: a stream ended with quiet reports, and only an answer tells why

    def pause(self) -> None:
        """The coordinator does not know this session: new facts wait."""
        self._telling = False

    def resume(self) -> None:
        """The coordinator knows this session (again). After a pause, report every fact that still matters again."""
        if not self._telling:
            self._telling = True
            self._outbox.everything_again()

    async def report_forever(self) -> None:
        """Report every new fact; ends when the coordinator refuses this peer."""
        self._runtime.spawn(self._hear_late_forever())
        waits = Waits()
        while True:
            await self._outbox.changed()
            if self._telling:
                await self._wait_for_more()
            report = self._outbox.next_report() if self._telling else None
            if report is None:
                continue
            body, facts = report
            try:
                if self._may_be_quiet(body, facts):
                    await self._client.tell_quietly(body, partial(self._told_quietly, facts))
                    waits.reset()
                    continue
                response = await self._client.tell(body)
                waits.reset()
            except NetworkError as error:
                log = self._runtime.log
                log.info("the report did not arrive; sending it again", step=self._view.step, why=str(error))
                await asyncio.sleep(waits.next())
                self._outbox.wake()
                continue
            except RefusedError as error:
                await self._runtime.emit(Failed(error))
                return
            while not self._client.late.empty():  # that a stream ended, and what of it was not taken
                await self._late(self._client.late.get_nowait())
            self._unanswered, self._answers = {}, True
            self._answered(facts, response)
            await self._tell_too_late(facts, response)

    async def _tell_too_late(self, facts: list[Fact], response: pb.ReportResponse) -> None:
        """The coordinator decided the step before. Other refusals may pass: this peer says it again."""
        for step in (fact.step for fact in facts if isinstance(fact, Published)):
            for why in (why for why in response.refusals if why.startswith(f"payload of step {step}: step ")):
                await self._runtime.emit(NotCounted(step, f"too late: {printable(why)}"))

    async def _hear_late_forever(self) -> None:
        """Report again what the coordinator did not take of a quiet report, and all quiet reports of a stream that ended."""
        while True:
            await self._late(await self._client.late.get())

    def _told_quietly(self, facts: list[Fact], sequence: int) -> None:
        """Before the report is written, because a late answer may come before the writer hears that it is."""
        self._unanswered[sequence] = _Quiet(self._outbox.generation, facts)
        self._outbox.sent(facts)

    def _may_be_quiet(self, body: pb.ReportBody, facts: list[Fact]) -> bool:
        """States, holdings by places, and votes that this peer does not withhold: the entry shows that they were taken.

        After a stream that ended, the next report asks for an answer: a coordinator that refuses it would otherwise end one
        stream after the other, and this peer would never hear why.
        """
        usual = all(isinstance(fact, (Held, Applied, Published)) for fact in facts) and not body.holdings
        withholds = bool(self._publication.answered(facts, taken=False))
        return usual and not withholds and self._answers and len(self._unanswered) < UNANSWERED_MAX

    async def _late(self, answer: pb.ReportResponse | None) -> None:
        if answer is None:
            lost, self._unanswered = self._unanswered, {}
            self._answers = self._answers and not lost
            self._outbox.unsent([fact for quiet in lost.values() for fact in quiet.facts])
            return
        quiet = self._unanswered.pop(answer.sequence, _Quiet(-1, []))
        await self._tell_too_late(quiet.facts, answer)
        if quiet.generation == self._outbox.generation:
            self._outbox.name(mask_from_bytes(answer.unclear))
            self._log_refusals(answer)

    def _answered(self, facts: list[Fact], response: pb.ReportResponse) -> None:
        """Mark the facts that the coordinator has; this peer reports the others again."""
        unheard: list[Fact] = [*self._publication.answered(facts, response.announcement_taken)]
        if unheard and not self._waking:  # one at a time, whatever else is reported meanwhile
            self._waking = True
            self._runtime.spawn(self._wake_later(self._unheard.next()))
        elif not unheard and any(isinstance(fact, Published) for fact in facts):
            self._unheard.reset()
        unheard += self._outbox.name(mask_from_bytes(response.unclear))
        self._outbox.sent([fact for fact in facts if fact not in unheard])
        self._log_refusals(response)

    def _log_refusals(self, response: pb.ReportResponse) -> None:
        said, now = "; ".join(response.refusals), asyncio.get_running_loop().time()
        if said and self._refused.worth(said, now):
            self._runtime.log.info(
                "the coordinator refused a part of this peer's report", step=self._view.step, why=said
            )

    async def _wait_for_more(self) -> None:
        """Wait until the new facts have waited as long as they may; the time counts from now."""
        outbox, loop = self._outbox, asyncio.get_running_loop()
        since = loop.time()
        while (left := since + outbox.patience_seconds(self._public_key) - loop.time()) > 0:
            try:
                async with asyncio.timeout(left):
                    await outbox.changed()
            except TimeoutError:
                return

    async def _wake_later(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._waking = False
        self._outbox.wake()
