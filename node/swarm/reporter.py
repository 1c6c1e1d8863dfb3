"""Sends the outbox's facts to the coordinator, one report at a time, until the coordinator has them.

Sends nothing before the coordinator's stream has sent a message, because the coordinator does not know this session until then.
Refuses to judge a fact: the module that added it has checked it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from node.link.client import CoordinatorClient
from node.swarm.facts import Fact, Failed, Held, NotCounted, Published
from node.swarm.outbox import Outbox
from node.swarm.publication import Publication
from node.swarm.runtime import Runtime
from node.swarm.view import View
from protos.errors import NetworkError, RefusedError
from protos.slices import mask_from_bytes
from protos.text import printable
from protos.v1 import coordinator_pb2 as pb
from protos.waits import Again, Waits

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
        self._unheard, self._refused = Waits(), Again()
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
            self._hear_late()  # that a stream before this one ended, and what of it was not taken
            self._unanswered.clear()
            self._answers = True
            self._answered(facts, response)
            for step in (fact.step for fact in facts if isinstance(fact, Published)):
                # The coordinator has decided that step. Other refusals may pass: this peer says it again.
                for why in (why for why in response.refusals if why.startswith(f"payload of step {step}: step ")):
                    await self._runtime.emit(NotCounted(step, f"too late: {printable(why)}"))

    async def _hear_late_forever(self) -> None:
        """Report again what the coordinator did not take of a quiet report, and all quiet reports of a stream that ended."""
        while True:
            self._late(await self._client.late.get())

    def _hear_late(self) -> None:
        while not self._client.late.empty():
            self._late(self._client.late.get_nowait())

    def _told_quietly(self, facts: list[Fact], sequence: int) -> None:
        """Before the report is written, because a late answer may come before the writer hears that it is."""
        self._unanswered[sequence] = _Quiet(self._outbox.generation, facts)
        self._outbox.sent(facts)

    def _may_be_quiet(self, body: pb.ReportBody, facts: list[Fact]) -> bool:
        """Holdings by places: the entry shows that they were taken, and a new step makes them worthless.

        After a stream that ended, the next report asks for an answer: a coordinator that refuses it would otherwise end one
        stream after the other, and this peer would never hear why.
        """
        held = all(isinstance(fact, Held) for fact in facts) and not body.holdings
        return held and self._answers and len(self._unanswered) < UNANSWERED_MAX

    def _late(self, answer: pb.ReportResponse | None) -> None:
        if answer is None:
            lost, self._unanswered = self._unanswered, {}
            self._answers = self._answers and not lost
            self._outbox.unsent([fact for quiet in lost.values() for fact in quiet.facts])
            return
        quiet = self._unanswered.pop(answer.sequence, None)
        if quiet is None or quiet.generation != self._outbox.generation:
            return
        self._outbox.name(mask_from_bytes(answer.unclear))
        self._log_refusals(answer)

    def _answered(self, facts: list[Fact], response: pb.ReportResponse) -> None:
        """Mark the facts that the coordinator has; this peer reports the others again."""
        unheard: list[Fact] = [*self._publication.answered(facts, response.announcement_taken)]
        if unheard:
            self._runtime.spawn(self._wake_later(self._unheard.next()))
        elif any(isinstance(fact, Published) for fact in facts):
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
        self._outbox.wake()
