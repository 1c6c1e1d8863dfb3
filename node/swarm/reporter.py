"""What the coordinator is told: the outbox, one report at a time, until it is taken.

Tells nothing while the coordinator's stream has not said a word: it would not know us. Whether a fact is true is for those
who added it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from node.swarm import settings as limits
from node.swarm.client import CoordinatorClient
from node.swarm.events import Failed
from node.swarm.outbox import Outbox
from node.swarm.runtime import Runtime
from node.swarm.view import View
from protos.errors import NetworkError, RefusedError
from protos.limits import ABSTENTION_REASON_BYTES_MAX
from protos.log import Verdict

Answered = Callable[[list[object], bool], list[object]]


class Reporter:
    """One session's; paused until `resume`."""

    def __init__(self, client: CoordinatorClient, outbox: Outbox, view: View, runtime: Runtime) -> None:
        self._client, self._outbox = client, outbox
        self._view, self._runtime = view, runtime
        self._telling = False

    def pause(self) -> None:
        """The coordinator does not know us: what comes up waits."""
        self._telling = False

    def resume(self) -> None:
        """The coordinator knows us (again): after a pause, what still matters is told again."""
        if not self._telling:
            self._telling = True
            self._outbox.everything_again()
            self._outbox.changed.set()

    def announce_again(self) -> None:
        """The open step has another roster: say again what we have for it."""
        self._outbox.announce_again()
        self._outbox.changed.set()

    def applied(self, step: int, digest: bytes) -> None:
        """A state was reached."""
        self._outbox.add_applied(step, digest)
        self._outbox.changed.set()

    def abstained(self, step: int, reason: str) -> None:
        """There will be no votes for this step: why, in words that print on one line and are not too long."""
        words = "".join(c if c.isprintable() else " " for c in reason).encode()[:ABSTENTION_REASON_BYTES_MAX]
        self._outbox.abstain((step, words.decode(errors="ignore")))
        self._outbox.changed.set()

    def found(self, verdicts: Sequence[Verdict]) -> None:
        """What checks of others' votes gave."""
        self._outbox.verdicts.update({(verdict.step, verdict.subject): verdict for verdict in verdicts})
        self._outbox.changed.set()

    def restarted(self) -> None:
        """The state starts again from a snapshot: earlier ones do not count."""
        self._outbox.restart()

    def stored(self, step: int, root: bytes, size: int) -> None:
        """A snapshot is in the piece store."""
        self._outbox.snapshots[step] = (root, size)
        self._outbox.changed.set()

    def found_bad(self, step: int, root: bytes, size: int) -> None:
        """An agreed snapshot does not hold what the log says."""
        self._outbox.bad_snapshots[step] = (root, size)
        self._outbox.changed.set()

    def moved(self, addresses: tuple[str, ...]) -> None:
        """Where this peer is now."""
        if addresses != self._outbox.addresses:
            self._outbox.addresses = addresses
            self._outbox.changed.set()

    async def report_forever(self, answered: Answered) -> None:
        """Report whatever is new. `answered(facts, announcement taken)` gives the facts that are to be told again."""
        log = self._runtime.log
        while True:
            await self._outbox.changed.wait()
            self._outbox.changed.clear()
            report = self._outbox.take() if self._telling else None
            if report is None:
                continue
            body, facts = report
            try:
                response = await self._client.tell(body)
            except NetworkError as error:
                log.info("report not taken; telling again", step=self._view.step, why=str(error))
                await asyncio.sleep(limits.RETRY_SECONDS_MIN)
                self._outbox.changed.set()
                continue
            except RefusedError as error:
                await self._runtime.emit(Failed(error))
                return
            unheard = answered(facts, response.announcement_taken)
            if unheard:
                facts = [fact for fact in facts if fact not in unheard]
                self._runtime.spawn(self._tell_again())
            self._outbox.sent(facts)
            for refusal in response.refusals:
                log.info("the coordinator did not take something", step=self._view.step, why=refusal)

    async def _tell_again(self) -> None:
        await asyncio.sleep(limits.RETRY_SECONDS_MIN)
        self._outbox.changed.set()
