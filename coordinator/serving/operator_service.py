"""The calls of the operator: requests that the coordinator's own key signed. Decides nothing: the machine does."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from coordinator.clock import admission, life
from coordinator.clock.events import (
    ArchiveAsked,
    Asked,
    ChangeAsked,
    DecayAsked,
    ExclusionAsked,
    FinishAsked,
    OrderAsked,
    PauseAsked,
    ReadmissionAsked,
    ResumeAsked,
    RevocationAsked,
    Steered,
    TicketAsked,
    WithdrawalAsked,
)
from coordinator.clock.state import Phase
from coordinator.serving import doors
from coordinator.serving.doors import Calls, Context, DeclinedError, answered
from protos import clocks, limits
from protos.changes import settings_from_body
from protos.envelope import Kind, check, parse
from protos.errors import Reason, Refusal
from protos.invite import ticket_body, ticket_from_body
from protos.log import FORMAT_VERSION, run_id_of
from protos.orders import order_from_body, order_id, signed_order_body
from protos.run_config import config_from_json
from protos.start import StartingState, start_body, start_from_body
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from protos.v1 import envelope_pb2, log_pb2, ticket_pb2
from protos.version import RELEASES

_B = TypeVar("_B", bound=Message)


class OperatorService(Calls, rpc.OperatorServiceServicer):
    """For the operator; protos/v1/coordinator.proto describes each call."""

    @answered
    async def CreateRun(self, request: pb.CreateRunRequest, context: Context) -> pb.CreateRunResponse:  # noqa: N802
        """A new run from a configuration."""
        body = self._body(request.envelope, pb.CreateRunBody)
        config = config_from_json(body.config_json)
        config.check_new()
        if body.layout_digest:
            doors.sized(body.layout_digest, limits.HASH_BYTES, "layout digest")
        genesis = log_pb2.Genesis(
            format_version=FORMAT_VERSION,
            config_json=config.canonical_json(),
            coordinator_public_key=self.hub.identity.public_key,
            nonce=body.nonce,  # so that a replayed request makes one run
            layout_digest=body.layout_digest,
            parameters=body.parameters,
            software_version_min=RELEASES[FORMAT_VERSION],
            start=start_body(await self._start(body)) if body.HasField("start") else None,
        )
        if run_id_of(genesis) in self.hub.runs:
            raise Refusal(Reason.REPLAYED, "this run was created before")
        if run_id_of(genesis) in self.hub.deleted:
            raise Refusal(Reason.REPLAYED, "a run of this id was deleted: create the run again for a new id")
        await self.hub.create_run(genesis)
        return pb.CreateRunResponse(genesis=genesis)

    async def _start(self, body: pb.CreateRunBody) -> StartingState:
        """Where a fork begins. Of a run of this coordinator it is an agreed state, in the same layout. Raises Refusal."""
        doors.sized(body.layout_digest, limits.HASH_BYTES, "layout digest of a fork")
        start = start_from_body(body.start)
        if start.run_id not in self.hub.runs:
            return start  # another coordinator's run: peers check the state itself
        parent = self.hub.runs[start.run_id].run
        if body.layout_digest != parent.layout_digest:
            raise Refusal(
                Reason.WRONG_LAYOUT, "the layout of a fork is that of its parent run, and this is another one"
            )
        agreed = {state.step: state for state in await self.hub.states(parent)}.get(start.step)
        # a digest may have been agreed, or forgotten, since the operator's list
        either = agreed is not None and (b"" in (agreed.state_digest, start.state_digest))
        if agreed is None or start != (replace(agreed, state_digest=start.state_digest) if either else agreed):
            raise Refusal(Reason.OUT_OF_RANGE, f"the state after {start} is not agreed, or is withdrawn")
        return start

    @answered
    async def ListStates(self, request: pb.ListStatesRequest, context: Context) -> pb.ListStatesResponse:  # noqa: N802
        """Every state of a run that a fork can begin at."""
        body = self._body(request.envelope, pb.ListStatesBody)
        run = self.runtime(body.run_id, archived=True).run
        found = await self.hub.states(run)
        return pb.ListStatesResponse(
            states=map(start_body, found), layout_digest=run.layout_digest, parameters=run.parameters
        )

    @answered
    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:  # noqa: N802
        """Every run of this coordinator."""
        body = self._body(request.envelope, pb.ListRunsBody)
        shown = [it for it in self.hub.runs.values() if body.archived or not it.run.archived]
        return pb.ListRunsResponse(runs=map(self.hub.describe, shown))

    @answered
    async def CreateTicket(  # noqa: N802
        self, request: pb.CreateTicketRequest, context: Context
    ) -> pb.CreateTicketResponse:
        """A new ticket of a run."""
        body = self._body(request.envelope, pb.CreateTicketBody)
        doors.bounded(body.expires_in_ms, limits.TICKET_MS_MAX, "ms until it expires")
        now = clocks.unix_ms()
        made = ticket_pb2.Ticket(
            ticket_id=body.nonce,
            expires_unix_ms=now + body.expires_in_ms if body.expires_in_ms else 0,
            uses=body.uses,
            label=body.label,
            anchor=body.anchor,
        )
        await self._ask(body.run_id, TicketAsked(ticket_from_body(made), now))
        return pb.CreateTicketResponse(ticket=made)

    @answered
    async def ListTickets(  # noqa: N802
        self, request: pb.ListTicketsRequest, context: Context
    ) -> pb.ListTicketsResponse:
        """Every ticket of a run, with the peers that used it."""
        body = self._body(request.envelope, pb.ListTicketsBody)
        run = self.runtime(body.run_id).run
        users: dict[bytes, list[bytes]] = {}
        for public_key, came_with in run.guests.items():
            users.setdefault(came_with, []).append(public_key)
        now, found = clocks.unix_ms(), []
        for name, issued in run.tickets.items():
            used = users.get(name, [])
            state, _ = admission.ticket_state(issued, len(used), now)
            found.append(pb.TicketStatus(ticket=ticket_body(issued.ticket), users=used, state=state.value))
        return pb.ListTicketsResponse(tickets=found)

    @answered
    async def RevokeTicket(  # noqa: N802
        self, request: pb.RevokeTicketRequest, context: Context
    ) -> pb.RevokeTicketResponse:
        """A ticket admits no further peer."""
        body = self._body(request.envelope, pb.RevokeTicketBody)
        await self._ask(body.run_id, RevocationAsked(body.ticket_id, body.with_peers))
        return pb.RevokeTicketResponse()

    @answered
    async def ExcludePeer(  # noqa: N802
        self, request: pb.ExcludePeerRequest, context: Context
    ) -> pb.ExcludePeerResponse:
        """A peer takes part no more."""
        body = self._body(request.envelope, pb.ExcludePeerBody)
        doors.sized(body.public_key, limits.PUBLIC_KEY_BYTES, "public key")
        await self._ask(body.run_id, ExclusionAsked(body.public_key, doors.operators_reason(body.reason, needed=True)))
        self.sessions.end(body.run_id, body.public_key)
        return pb.ExcludePeerResponse()

    @answered
    async def ReadmitPeer(  # noqa: N802
        self, request: pb.ReadmitPeerRequest, context: Context
    ) -> pb.ReadmitPeerResponse:
        """An excluded peer may join again."""
        body = self._body(request.envelope, pb.ReadmitPeerBody)
        doors.sized(body.public_key, limits.PUBLIC_KEY_BYTES, "public key")
        await self._ask(body.run_id, ReadmissionAsked(body.public_key))
        return pb.ReadmitPeerResponse()

    @answered
    async def WithdrawSnapshot(  # noqa: N802
        self, request: pb.WithdrawSnapshotRequest, context: Context
    ) -> pb.WithdrawSnapshotResponse:
        """Agreed snapshots of this step and later ones, and the digests since, do not count any more."""
        body = self._body(request.envelope, pb.WithdrawSnapshotBody)
        doors.bounded(body.step, limits.STEP_MAX, "as a step")
        await self._ask(body.run_id, WithdrawalAsked(body.step))
        return pb.WithdrawSnapshotResponse()

    @answered
    async def SteerRun(self, request: pb.SteerRunRequest, context: Context) -> pb.SteerRunResponse:  # noqa: N802
        """One change in the life of a run."""
        body = self._body(request.envelope, pb.SteerRunBody)
        if body.change == pb.RunChange.RUN_CHANGE_DELETE:
            if why := life.may_go(self.runtime(body.run_id, archived=True).run):
                raise DeclinedError(why)
            await self.hub.delete_run(body.run_id)
        else:
            await self._ask(body.run_id, _steered(body), archived=True)
        return pb.SteerRunResponse()

    @answered
    async def SignOrder(self, request: pb.SignOrderRequest, context: Context) -> pb.SignOrderResponse:  # noqa: N802
        """One more signature of an order of a run's operators."""
        self.check_acts()
        envelope = request.envelope
        runtime = self.runtime(envelope.run_id)
        if envelope.public_key not in runtime.run.config.operators.public_keys:
            raise Refusal(Reason.UNKNOWN_SIGNER, "this key is none of the keys in `operators` of the run's definition")
        opened = check(envelope, kind=Kind.KIND_ORDER, run_id=envelope.run_id)
        order, name = order_from_body(opened.body), order_id(opened.run_id, opened.body)
        asked = OrderAsked(opened.body, opened.public_key, envelope.signature, clocks.unix_ms())
        await self._ask(opened.run_id, asked)
        if (waiting := runtime.run.orders.waiting.get(name)) is not None:
            return pb.SignOrderResponse(order=signed_order_body(waiting))
        if order.excludes:
            self.sessions.end(opened.run_id, order.excludes)
        return pb.SignOrderResponse(obeyed=True)

    @answered
    async def ListOrders(self, request: pb.ListOrdersRequest, context: Context) -> pb.ListOrdersResponse:  # noqa: N802
        """The orders that wait for signatures."""
        self.check_acts()
        run = self.runtime(parse(pb.ListOrdersBody, request.envelope.body).run_id, archived=True).run
        signer = request.envelope.public_key
        self._body(request.envelope, pb.ListOrdersBody, signer if signer in run.config.operators.public_keys else None)
        waiting = {} if run.phase is Phase.FINISHED else run.orders.waiting_at(clocks.unix_ms())
        return pb.ListOrdersResponse(orders=map(signed_order_body, waiting.values()))

    async def _ask(self, run_id: bytes, event: Asked, *, archived: bool = False) -> None:
        """The event through the machine. Raises DeclinedError with the machine's reason."""
        if refusals := await self.runtime(run_id, archived=archived).handle(event):
            raise DeclinedError(refusals[0])

    def _body(self, envelope: envelope_pb2.SignedEnvelope, body_type: type[_B], signer: bytes | None = None) -> _B:
        """The body of a request of the operator, used once. Raises StandsByError or Refusal.

        `signer`: None for the coordinator's own key.
        """
        self.check_acts()
        opened = self.opened(envelope, Kind.KIND_ADMIN, signer=signer or self.hub.identity.public_key)
        body = parse(body_type, opened.body)
        if len(UnknownFieldSet(body)):
            # All requests share one kind of envelope, so a signed exclusion must not pass as another request.
            raise Refusal(
                Reason.MALFORMED, f"not a {body_type.__name__}: it has fields that this coordinator does not know"
            )
        nonce: bytes = body.nonce  # type: ignore[attr-defined]  # each of these bodies has one
        doors.sized(nonce, limits.NONCE_BYTES, "nonce")
        self.sessions.use_nonce(nonce)
        return body


def _steered(body: pb.SteerRunBody) -> Steered:
    """The request as an event. Raises Refusal for a change that this version does not know."""
    reason = doors.operators_reason(body.reason, needed=False)
    match body.change:
        case pb.RunChange.RUN_CHANGE_PAUSE:
            return PauseAsked(reason)
        case pb.RunChange.RUN_CHANGE_RESUME:
            return ResumeAsked()
        case pb.RunChange.RUN_CHANGE_DECAY:
            if not 1 <= body.steps <= limits.STEP_MAX:
                raise Refusal(Reason.OUT_OF_RANGE, f"a decay of {body.steps} steps: give at least 1")
            return DecayAsked(body.steps)
        case pb.RunChange.RUN_CHANGE_SETTINGS:
            return ChangeAsked(settings_from_body(body.settings))
        case pb.RunChange.RUN_CHANGE_FINISH:
            return FinishAsked(reason)
        case pb.RunChange.RUN_CHANGE_ARCHIVE | pb.RunChange.RUN_CHANGE_UNARCHIVE:
            return ArchiveAsked(body.change == pb.RunChange.RUN_CHANGE_ARCHIVE)
        case _:
            raise Refusal(Reason.MALFORMED, f"change {body.change} of a run is none that this coordinator knows")
