"""Sends the outbox's facts to the coordinator, one report at a time, until the coordinator has them.

Sends nothing before the coordinator's stream has sent a message, because the coordinator does not know this session until then.
Refuses to judge a fact: the module that added it has checked it.
"""

from __future__ import annotations

import asyncio

from node import patience
from node.link.client import CoordinatorClient
from node.swarm.events import Failed, NotCounted
from node.swarm.facts import Fact, Published
from node.swarm.outbox import Outbox
from node.swarm.publication import Publication
from node.swarm.runtime import Runtime
from node.swarm.view import View
from protos.errors import NetworkError, RefusedError
from protos.holdings import mask_from_bytes
from protos.text import printable
from protos.v1 import coordinator_pb2 as pb


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
        while True:
            await self._outbox.changed()
            if self._telling:
                await self._wait_for_more()
            report = self._outbox.next_report() if self._telling else None
            if report is None:
                continue
            body, facts = report
            try:
                response = await self._client.tell(body)
            except NetworkError as error:
                log = self._runtime.log
                log.info("the report did not arrive; sending it again", step=self._view.step, why=str(error))
                await asyncio.sleep(patience.RETRY_SECONDS_MIN)
                self._outbox.wake()
                continue
            except RefusedError as error:
                await self._runtime.emit(Failed(error))
                return
            self._answered(facts, response)
            for step in (fact.step for fact in facts if isinstance(fact, Published)):
                # The coordinator has decided that step. Other refusals may pass: this peer says it again.
                for why in (why for why in response.refusals if why.startswith(f"payload of step {step}: step ")):
                    await self._runtime.emit(NotCounted(step, f"too late: {printable(why)}"))

    def _answered(self, facts: list[Fact], response: pb.ReportResponse) -> None:
        """Mark the facts that the coordinator has; this peer reports the others again."""
        unheard: list[Fact] = [*self._publication.answered(facts, response.announcement_taken)]
        if unheard:
            self._runtime.spawn(self._wake_later())
        unheard += self._outbox.name(mask_from_bytes(response.unclear))
        self._outbox.sent([fact for fact in facts if fact not in unheard])
        for refusal in response.refusals:
            self._runtime.log.info(
                "the coordinator refused a part of this peer's report", step=self._view.step, why=refusal
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

    async def _wake_later(self) -> None:
        await asyncio.sleep(patience.RETRY_SECONDS_MIN)
        self._outbox.wake()
