"""The calls of peers. Each call opens its request, passes it through a door, and hands the event to the run.

Decides nothing: `doors.py` checks bytes and maps errors to gRPC statuses, and the machine decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any
from weakref import WeakValueDictionary

from coordinator.clock import admission, holder_counts, rules
from coordinator.clock.effects import Denial
from coordinator.clock.events import Disconnected, Reported
from coordinator.clock.state import Run
from coordinator.serving import doors, following
from coordinator.serving.doors import (
    Calls,
    Context,
    DeclinedError,
    NoSessionError,
    NotAdmittedError,
    StandsByError,
    answered,
)
from coordinator.serving.event_loop import RunRuntime
from coordinator.serving.following import ReadersBusyError, bootstrap
from coordinator.serving.gate import admitted
from coordinator.serving.hub import Hub
from coordinator.serving.sessions import IdentityPrograms, Sessions
from coordinator.store import wait_queues
from protos import clocks, limits, version
from protos.address import block_of, network_of, site
from protos.changes import settings_body
from protos.envelope import Kind, VerifiedEnvelope, parse
from protos.errors import Reason, Refusal
from protos.slices import mask_bytes
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from protos.v1 import envelope_pb2

REFUSED = pb.JoinFailure.JOIN_FAILURE_REFUSED


class CoordinatorService(Calls, rpc.CoordinatorServiceServicer):
    """For peers; protos/v1/coordinator.proto describes each call."""

    def __init__(self, hub: Hub, sessions: Sessions) -> None:
        super().__init__(hub, sessions)
        self._telling: set[asyncio.Task[Any]] = set()
        self._ended = False
        self._processes = IdentityPrograms()
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """By public key: one report of a peer is taken at a time, however many streams it has. By run id: one of all peers
        without accepted votes, because identities are free."""

    @answered
    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:  # noqa: N802
        """Public facts of a run."""
        runtime = self.runtime(request.run_id)
        if request.bootstrap_only:
            return pb.GetRunResponse(bootstrap=self._bootstrap(runtime, context, without=b""))
        answer = self.hub.describe(runtime)
        answer.bootstrap.extend(self._bootstrap(runtime, context, without=b""))
        answer.unix_ms = clocks.unix_ms()
        return answer

    @answered
    async def GetChallenge(  # noqa: N802
        self, request: pb.GetChallengeRequest, context: Context
    ) -> pb.GetChallengeResponse:
        """A single-use challenge for Join."""
        self.runtime(request.run_id)
        where = site(network_of(context.peer())) if context.peer() else ""
        if where and not self.sessions.may_ask(where, clocks.monotonic_ms()):
            raise ReadersBusyError("too many peers join from your network address; try again in a minute")
        seen = network_of(context.peer())
        challenge = self.sessions.challenge(clocks.monotonic_ms(), where)
        return pb.GetChallengeResponse(challenge=challenge, seen_from="" if seen is None else str(seen))

    @answered
    async def TellFailure(  # noqa: N802
        self, request: pb.TellFailureRequest, context: Context
    ) -> pb.TellFailureResponse:
        """Count what kept a peer from joining. The coordinator counts by itself whom it refuses."""
        runtime = self.runtime(request.run_id)
        if request.reason == pb.JoinFailure.JOIN_FAILURE_REFUSED:
            raise Refusal(Reason.OUT_OF_RANGE, "the coordinator counts by itself whom it refuses")
        if not self.hub.failures.may_tell(site(network_of(context.peer())), clocks.monotonic_ms()):
            raise ReadersBusyError("too many failures are told; this one is not counted")
        self.hub.failures.count(runtime.run.run_id, request.reason, request.software_version)
        return pb.TellFailureResponse()

    @answered
    async def MayJoin(self, request: pb.MayJoinRequest, context: Context) -> pb.MayJoinResponse:  # noqa: N802
        """Whether the run admits a peer, asked before the peer builds its model. Nothing is kept: Join decides."""
        runtime = self.runtime(request.envelope.run_id)
        opened, body = self._join(request.envelope, runtime)
        ticket = doors.ticket(body.ticket, opened.run_id, self.hub.identity.public_key)
        network = block_of(network_of(context.peer()))
        denial, reason = admission.may_enter(
            runtime.run,
            opened.public_key,
            ticket,
            clocks.unix_ms(),
            network,
            clocks.monotonic_ms(),
            anchor=body.anchor,
        )
        if request.waits and denial in {None, Denial.FULL} and not body.anchor:
            part, most = wait_queues.part_of(runtime.run, opened.public_key, ticket, network)
            turn = self._turn(runtime, opened.public_key, part, most, may_enter=denial is None)
            return turn or pb.MayJoinResponse(place=1, length=1, reason=reason)
        if denial is not None:
            self._count_refused(runtime, denial, body)
            raise NotAdmittedError(reason)
        return pb.MayJoinResponse()

    def _turn(
        self, runtime: RunRuntime, public_key: bytes, part: str, most: int, *, may_enter: bool
    ) -> pb.MayJoinResponse | None:
        """What the line before the run says to a peer. None: there is a free place, and not for a peer of this network."""
        run, now_ms = runtime.run, clocks.monotonic_ms()
        if may_enter and not admission.needs_turn(run, public_key, anchor=False):
            return pb.MayJoinResponse()
        here = wait_queues.waiting(self.hub.lines.of(run.run_id), run, now_ms)
        free = self._places_free(run, public_key, here, now_ms)
        if free and not may_enter:
            return None
        turn = wait_queues.asked(here, public_key, part, free, most, now_ms)
        pace = self.hub.keep_line(run.run_id, turn.line, now_ms)
        waits = turn.place and public_key in turn.line and pace is not None
        reason = f"{turn.reason}; {wait_queues.expected(pace, turn.place, now_ms)}" if waits and pace else turn.reason
        return pb.MayJoinResponse(place=turn.place, length=turn.length, reason=reason)

    @answered
    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:  # noqa: N802
        """Admit a peer and open a session."""
        runtime = self.runtime(request.envelope.run_id)
        opened, body = self._join(request.envelope, runtime)
        network = network_of(context.peer())
        coordinator = self.hub.identity.public_key
        event = doors.joined(opened, body, coordinator, clocks.unix_ms(), block_of(network))
        self._check_turn(runtime, opened.public_key, anchor=body.anchor)
        if refusals := await runtime.handle(event):
            self.hub.failures.count(runtime.run.run_id, REFUSED, body.software_version)
            raise NotAdmittedError(refusals[0])
        self.hub.metrics.refused_addresses(len(body.addresses) - len(event.addresses))
        run = runtime.run
        twice = self._processes.joined(
            (run.run_id, opened.public_key), body.process[: limits.PROCESS_BYTES], network, clocks.monotonic_ms(),
            connected=opened.public_key in runtime.streams.newest,
        )  # fmt: skip
        runtime.streams.end(
            opened.public_key
        )  # it belongs to the session that ends, whose peer would wait for events for ever
        return pb.JoinResponse(
            session_id=self.sessions.open(run.run_id, opened.public_key, network),
            head_step=run.head_step,
            head_hash=run.head_hash,
            snapshot=following.snapshot_ref(run, run.snapshot) if run.snapshot else None,
            earlier=following.earlier_snapshots(run),
            withdrawn=following.withdrawn_of(run),
            bootstrap=self._bootstrap(runtime, context, without=opened.public_key),
            settings=settings_body(run.settings_at(run.head_step)),
            used_twice=twice,
        )

    def _places_free(self, run: Run, public_key: bytes, waiting: wait_queues.Line, now_ms: int) -> int:
        """Places of the run that a peer in the line may get now."""
        free = admission.places_free(run, public_key)
        if waiting and self.hub.lines.waits_for_members(now_ms):
            free -= admission.may_return(run)
        return max(free, 0)

    def _check_turn(self, runtime: RunRuntime, public_key: bytes, *, anchor: bool) -> None:
        """Raises NotAdmittedError if all free places are kept for peers in the line before the run."""
        run, now_ms = runtime.run, clocks.monotonic_ms()
        waiting = wait_queues.waiting(self.hub.lines.of(run.run_id), run, now_ms)
        if not waiting or not admission.needs_turn(run, public_key, anchor=anchor):
            return
        if not wait_queues.may_come(waiting, public_key, self._places_free(run, public_key, waiting, now_ms)):
            self.hub.metrics.not_admitted(run, Denial.FULL)
            raise NotAdmittedError(f"the run is full, and {len(waiting)} peers wait in line; ask for a place again")

    def _join(self, envelope: envelope_pb2.SignedEnvelope, runtime: RunRuntime) -> tuple[VerifiedEnvelope, pb.JoinBody]:
        """A request to join that answers a challenge of this coordinator, by a program that speaks the run's format.

        Raises Refusal or NotAdmittedError.
        """
        opened = self.opened(envelope, Kind.KIND_JOIN)
        body = parse(pb.JoinBody, opened.body)
        self.sessions.answer(body.challenge, clocks.monotonic_ms())
        speaks = body.format_version or version.UNNAMED_FORMAT
        if why := version.misfit(self.hub.genesis(runtime.run.run_id), speaks, body.software_version):
            self._count_refused(runtime, Denial.VERSION, body)
            raise NotAdmittedError(why)
        return opened, body

    def _count_refused(self, runtime: RunRuntime, denial: Denial, body: pb.JoinBody) -> None:
        self.hub.metrics.not_admitted(runtime.run, denial)
        failure = pb.JoinFailure.JOIN_FAILURE_VERSION if denial is Denial.VERSION else REFUSED
        self.hub.failures.count(runtime.run.run_id, failure, body.software_version)

    def _bootstrap(self, runtime: RunRuntime, context: Context, without: bytes) -> list[str]:
        """Addresses of other peers that this peer can dial when it starts."""
        run, network = runtime.run, network_of(context.peer())
        return bootstrap(run, self.sessions.networks(run.run_id), network, without, site(network).encode())

    @answered
    async def Follow(self, request: pb.FollowRequest, context: Context) -> None:  # noqa: N802
        """The log, then events as they happen. Each is written by itself, so a peer that hangs up ends the stream at once."""
        runtime = self.runtime(request.envelope.run_id)
        opened = self.opened(request.envelope, Kind.KIND_FOLLOW)
        body = parse(pb.FollowBody, opened.body)
        self._in_session(opened, body.session_id, body.sequence)
        async with aclosing(runtime.follow(opened.public_key, body.from_step, unpacks=body.unpacks)) as events:
            async for event in events:
                await context.write(event)

    @answered
    async def Tell(self, requests: AsyncIterator[pb.ReportRequest], context: Context) -> None:  # noqa: N802
        """Report after report, in order. A quiet one is answered only if a part of it is not taken, or the peer does not know
        the coordinators that are here. The stream ends when this coordinator stops."""
        task, teller, known = asyncio.current_task(), b"", tuple[str, ...]()
        assert task is not None
        self._telling.add(task)
        try:
            async for request in requests:
                answer, quiet = await self._told(request, context, teller)
                if not quiet or answer.refusals or answer.unclear or known != self.hub.coordinators:
                    known = self.hub.coordinators
                    await context.write(answer)
                teller = request.envelope.public_key
        except asyncio.CancelledError:
            if not self._ended:
                raise
            task.uncancel()  # without a status, the peer would wait for the end of the call
            raise StandsByError("this coordinator stops") from None
        finally:
            self._telling.discard(task)

    def end_telling(self) -> None:
        """End the streams of reports, so that they do not hold up a stop."""
        self._ended = True
        for task in self._telling:
            task.cancel()

    @answered
    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:  # noqa: N802
        """Take the payloads, states and snapshots that a peer reports."""
        answer, _ = await self._told(request, context)
        return answer

    async def _told(
        self, request: pb.ReportRequest, context: Context, teller: bytes = b""
    ) -> tuple[pb.ReportResponse, bool]:
        """The answer, and whether the report is quiet.

        `teller` signed the first report of this stream. Its later ones need no signature: the stream is the proof."""
        runtime = self.runtime(request.envelope.run_id)
        opened, body = self._report(request.envelope, context, "reports", teller)
        peer = runtime.run.peers.get(opened.public_key)
        async with self._turn_to_report(opened.public_key):
            if peer is not None and (peer.anchor or peer.votes_accepted):
                return await self._taken(runtime, opened, body), body.quiet
            async with self._turn_to_report(opened.run_id):
                await asyncio.sleep(0)  # others' reports that are here by now come first
                return await self._taken(runtime, opened, body), body.quiet

    def _turn_to_report(self, of: bytes) -> asyncio.Lock:
        return self._turns.setdefault(of, asyncio.Lock())

    async def _taken(self, runtime: RunRuntime, opened: VerifiedEnvelope, body: pb.ReportBody) -> pb.ReportResponse:
        event = doors.reported(opened, body)
        self._in_session(opened, body.session_id, body.sequence)
        self.hub.metrics.refused_addresses(len(body.addresses) - len(event.addresses))
        refusals = await runtime.handle(event)
        if body.leaving:
            await runtime.handle(Disconnected(opened.public_key, leaving=True))
        answer = self._answer(runtime.run, event, refusals)
        answer.sequence = body.sequence
        return answer

    def _report(
        self, envelope: envelope_pb2.SignedEnvelope, context: Context, what: str, teller: bytes = b""
    ) -> tuple[VerifiedEnvelope, pb.ReportBody]:
        """A report whose connection has not sent too many. Raises ReadersBusyError or Refusal."""
        if not self.sessions.may_report(context.peer(), clocks.monotonic_ms()):
            raise ReadersBusyError(f"your connection sends too many {what}; send again in a second")
        known = bool(teller) and not envelope.signature and envelope.public_key == teller
        opened = self.opened(envelope, Kind.KIND_REPORT, signed=not known)
        return opened, parse(pb.ReportBody, opened.body)

    def _answer(self, run: Run, event: Reported, refusals: list[str]) -> pb.ReportResponse:
        taken = event.claim is not None and rules.heard(run, event.public_key, event.claim)
        anchor = event.public_key in run.peers and run.peers[event.public_key].anchor
        unclear = holder_counts.unclear(run.step, event.public_key, event.held, anchor=anchor)
        return pb.ReportResponse(
            refusals=refusals,
            announcement_taken=taken,
            coordinators=self.hub.coordinators,
            unclear=mask_bytes(unclear),
        )

    @answered
    async def OfferEntries(  # noqa: N802
        self, request: pb.OfferEntriesRequest, context: Context
    ) -> pb.OfferEntriesResponse:
        """Take back entries that the journal has lost."""
        runtime = self.runtime(request.envelope.run_id)
        opened, body = self._report(request.envelope, context, "offers")
        self._in_session(opened, body.session_id, body.sequence)
        event = doors.returned(opened, request, self.hub.identity.public_key, runtime.run.head_step)
        if refusals := await runtime.returned(event):
            raise DeclinedError(refusals[0])
        return pb.OfferEntriesResponse(head_step=runtime.run.head_step)

    @answered
    async def ListEntries(  # noqa: N802
        self, request: pb.ListEntriesRequest, context: Context
    ) -> pb.ListEntriesResponse:
        """One page of the log."""
        runtime = self.runtime(request.run_id)
        first = min(max(request.from_step, 1), limits.STEP_MAX)
        page = await runtime.entries(first, follows=False)
        return pb.ListEntriesResponse(entries=page, head_step=runtime.run.head_step)

    def _in_session(self, opened: VerifiedEnvelope, session_id: bytes, sequence: int) -> None:
        """The call belongs to a session of its signer. Raises NoSessionError, or Refusal for a number used before."""
        if not self.sessions.check(session_id, opened.run_id, opened.public_key, sequence):
            raise NoSessionError("no such session: join again")
        admitted(session_id)
