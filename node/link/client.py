"""The coordinator, as a peer sees it: gRPC over TLS with the invite's pinned certificate; requests signed by the peer's key.

One session at a time; calls have deadlines. Refuses a server whose certificate is not the pinned one, and a genesis that is
not the invite's run. Of several coordinators, one acts: `move` finds it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from node.link.coordinators import Coordinators, CoordinatorWays, Telling
from protos import limits as contract
from protos.calls import BusyError, details_of, error_of, pinned_aio_channel, unpack
from protos.clocks import Waits
from protos.envelope import Kind, parse, seal, unsigned
from protos.errors import NetworkError, OperatorError, Refusal, RefusedError
from protos.http_proxy import HttpProxy
from protos.identity import Identity
from protos.invite import Invite
from protos.log import FORMAT_VERSION, run_id_of
from protos.run_config import RunConfig, UnknownSetting, config_from_json
from protos.run_facts import bounded
from protos.start import start_of
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from protos.v1 import envelope_pb2, log_pb2
from protos.version import own_misfit, release_of, software_version

T = TypeVar("T")
CALL_SECONDS_MAX = 15.0
LATE_ANSWERS_MAX = 64
# A peer asks a busy coordinator again for so long.
BUSY_SECONDS_MAX = 60.0
# These times count if a peer knows several coordinators. A peer gives a coordinator up that does not say within
# PROBE_SECONDS_MAX whether it acts. The peer pings a coordinator every second, and gives it up after SILENT_SECONDS_MAX of
# silence. The peer asks all coordinators often for TAKE_OVER_SECONDS_MAX, until one acts.
PROBE_SECONDS_MAX = 1.5
SILENT_SECONDS_MAX = 1.5
TAKE_OVER_SECONDS_MAX = 15.0
TAKE_OVER_RETRY_SECONDS_MAX = 0.5

_OPTIONS = {
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.http2.ping_timeout_ms": 10_000,  # without it gRPC waits a minute, in spite of keepalive_timeout_ms
    "grpc.http2.max_pings_without_data": 0,
    "grpc.http2.bdp_probe": 0,  # the coordinator answers each of these pings
    "grpc.http2.lookahead_bytes": 1 << 20,  # a long log needs more than the 64 kB that gRPC begins with
    "grpc.max_receive_message_length": contract.ENTRIES_PAGE_MAX * (contract.ENTRY_BYTES_MAX + 1024),
    "grpc.initial_reconnect_backoff_ms": 200,  # a killed coordinator is back in seconds
    "grpc.min_reconnect_backoff_ms": 1_000,
    "grpc.max_reconnect_backoff_ms": 2_000,
}
_OPTIONS_OF_SEVERAL = _OPTIONS | {
    "grpc.keepalive_time_ms": 1_000,
    "grpc.keepalive_timeout_ms": int(1000 * SILENT_SECONDS_MAX),
    "grpc.http2.ping_timeout_ms": int(1000 * SILENT_SECONDS_MAX),
    "grpc.max_reconnect_backoff_ms": 1_000,
}


class CoordinatorClient:
    """Calls to the one of the run's coordinators that acts. `known`: the addresses of all (default: the invite's)."""

    def __init__(self, invite: Invite, identity: Identity | None, known: Coordinators | None = None) -> None:
        self.known = Coordinators(invite.coordinators) if known is None else known
        self._invite = invite
        self._identity = identity
        self._ways = CoordinatorWays(invite.certificate_sha256)
        self._at = ""
        self._channel: Any = None
        self._session = b""
        self._sequence = 0
        self._telling: Telling | None = None
        self._telling_on: Any = None
        self.late: asyncio.Queue[pb.ReportResponse | None] = asyncio.Queue(LATE_ANSWERS_MAX)
        """Answers to reports that wanted none, because a part was not taken. None: a stream of reports has ended."""
        self._opened: list[Any] = []  # until `close`: a call on a channel may only end by itself
        # With several coordinators: the certificate that all have, and a channel to each, which notices silence soon.
        self._pem = b""
        self._channels: dict[str, Any] = {}

    @property
    def several(self) -> bool:
        """Whether there is another coordinator to move to."""
        return len(self.known.addresses) > 1

    @property
    def at(self) -> str:
        """The address of the coordinator that this client calls; empty before `connect`."""
        return self._at

    @property
    def proxy(self) -> HttpProxy | None:
        """The HTTP proxy that this client calls the coordinator through; None: the direct way."""
        return self._ways.known(self._at)

    async def connect(self) -> None:
        """Open a channel to a coordinator with the pinned certificate; with several, to the one that acts, once one acts."""
        await self.close()
        if not self.several:
            [address] = self.known.addresses
            pem = await self._ways.certificate(address, CALL_SECONDS_MAX)
            self._at, self._channel = address, pinned_aio_channel(address, pem, _OPTIONS, await self._ways.to(address))
            self._opened.append(self._channel)
            return
        until, waits = time.monotonic() + TAKE_OVER_SECONDS_MAX, Waits()
        while True:
            try:
                await self.move()
                return
            except NetworkError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(waits.next(TAKE_OVER_RETRY_SECONDS_MAX))

    async def move(self) -> bool:
        """Move to the coordinator that acts, of several. Returns whether it is another one than before.

        The peer asks all at once, so a silent coordinator delays nothing. Raises NetworkError if no coordinator says that it
        acts, RefusedError if all have the wrong certificate.
        """
        if not self.several:
            return False
        asked = [asyncio.ensure_future(self._acts(address)) for address in self.known.addresses]
        failures: list[NetworkError | RefusedError] = []
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    address, channel = await answer
                except (NetworkError, RefusedError) as failure:
                    failures.append(failure)
                    continue
                moved, self._at, self._channel = address != self._at, address, channel
                if moved:
                    self._hang_up()  # otherwise a report waits for an answer of the stopped coordinator
                return moved
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        away = [failure for failure in failures if isinstance(failure, NetworkError)]
        raise NetworkError("; ".join(map(str, away))) if away else failures[0]

    async def _acts(self, address: str) -> tuple[str, Any]:
        """This address and the channel to it, if the coordinator there says that it acts."""
        if not self._pem:
            self._pem = await self._ways.certificate(address, PROBE_SECONDS_MAX)
        if address not in self._channels:
            proxy = await self._ways.to(address)
            self._channels[address] = pinned_aio_channel(address, self._pem, _OPTIONS_OF_SEVERAL, proxy)
            self._opened.append(self._channels[address])
        channel, request = self._channels[address], health_pb2.HealthCheckRequest()
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PROBE_SECONDS_MAX)
        except grpc.RpcError as error:
            raise NetworkError(f"no coordinator answers at {address}: {details_of(error)}") from error
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise NetworkError(f"the coordinator at {address} stands by")
        return address, channel

    async def or_move(self, call: Awaitable[T]) -> T:
        """The call's result. After one that nobody answered, the next goes to the coordinator that acts, of several."""
        try:
            return await call
        except NetworkError:
            with suppress(NetworkError):
                await self.move()
            raise

    async def explained(self, error: NetworkError) -> NetworkError:
        """See `CoordinatorWays.explained`."""
        return error if self.several else await self._ways.explained(error, self._at)

    async def close(self) -> None:
        """Drop the channels."""
        self._hang_up()
        opened, self._opened = self._opened, []
        self._at, self._channel, self._channels = "", None, {}
        self._ways.forget()
        for channel in opened:
            await channel.close()

    async def get_run(self) -> tuple[pb.GetRunResponse, RunConfig]:
        """Public facts of the run; RefusedError if they are not the invite's run."""
        response: pb.GetRunResponse = await self._call("GetRun", pb.GetRunRequest(run_id=self._invite.run_id))
        return bounded(response), check_genesis(response.genesis, self._invite)

    async def bootstrap(self) -> list[str]:
        """Addresses of some connected peers, and nothing else of the run."""
        response = await self._call("GetRun", pb.GetRunRequest(run_id=self._invite.run_id, bootstrap_only=True))
        return list(response.bootstrap)

    async def reach_run(self, patience_seconds: float) -> tuple[pb.GetRunResponse, RunConfig]:
        """As `get_run`; waits for an absent coordinator, and moves to another one that acts."""
        give_up, waits = time.monotonic() + patience_seconds, Waits()
        while True:
            try:
                return await self.get_run()
            except NetworkError:
                if time.monotonic() > give_up:
                    raise
            with suppress(NetworkError):
                await self.move()
            await asyncio.sleep(waits.next())

    async def may_join(self) -> str:
        """Raise RefusedError with the reason if the coordinator would not admit this peer with any model.

        Returns the IP address from which the coordinator sees this machine; empty if the coordinator does not say.
        """
        body = pb.JoinBody()
        seen_from = await self._prepare(body)
        await self._call("MayJoin", pb.MayJoinRequest(envelope=self._seal(Kind.KIND_JOIN, body)))
        return seen_from

    async def wait_in_line(self, *, anchor: bool = False) -> pb.MayJoinResponse:
        """As `may_join`; if the run is full, take a place in the line before it, or keep it. `place` 0: this peer may join."""
        body = pb.JoinBody(anchor=anchor)
        await self._prepare(body)
        request = pb.MayJoinRequest(envelope=self._seal(Kind.KIND_JOIN, body), waits=True)
        response: pb.MayJoinResponse = await self._call("MayJoin", request)
        return response

    async def tell_failure(self, reason: pb.JoinFailure) -> None:
        """Tell the operator what keeps this peer from joining: no name, no key. NetworkError or RefusedError if not taken."""
        request = pb.TellFailureRequest(run_id=self._invite.run_id, reason=reason, software_version=software_version())
        await self._call("TellFailure", request)

    async def join(self, body: pb.JoinBody) -> pb.JoinResponse:
        """Open a session. RefusedError if the coordinator does not admit this peer."""
        await self._prepare(body)
        response: pb.JoinResponse = await self._call("Join", pb.JoinRequest(envelope=self._seal(Kind.KIND_JOIN, body)))
        self._session, self._sequence = response.session_id, 0
        return response

    async def _prepare(self, body: pb.JoinBody) -> str:
        """Fill in what each request to join names; returns the address from which the coordinator sees this machine."""
        response = await self._call("GetChallenge", pb.GetChallengeRequest(run_id=self._invite.run_id))
        body.challenge, body.ticket = response.challenge, self._invite.ticket
        body.format_version, body.software_version = FORMAT_VERSION, software_version()
        return str(response.seen_from)

    async def follow(self, from_step: int) -> AsyncIterator[pb.FollowResponse]:
        """The log after `from_step`, then events. Ends or raises NetworkError when the stream breaks."""
        body = pb.FollowBody(session_id=self._session, from_step=from_step, sequence=self._next(), unpacks=True)
        stub = rpc.CoordinatorServiceStub(self._channel)
        call = stub.Follow(pb.FollowRequest(envelope=self._seal(Kind.KIND_FOLLOW, body)))
        newest = b""
        try:
            async for event in call:
                what = event.WhichOneof("event")
                if what not in {"decided", "decided_zstd"}:
                    yield event
                    continue
                decided = event.decided if what == "decided" else _unpacked(event.decided_zstd, newest)
                newest = decided.SerializeToString(deterministic=True)
                yield pb.FollowResponse(entry=decided.entry)
                yield pb.FollowResponse(tick=decided.tick)
        except grpc.RpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()

    async def offer(self, entries: Sequence[bytes], newest: bytes) -> int:
        """Give entries back that the coordinator has lost. Returns the step of the coordinator's head after that."""
        body = pb.ReportBody(session_id=self._session, sequence=self._next())
        request = pb.OfferEntriesRequest(
            envelope=self._seal(Kind.KIND_REPORT, body),
            entries=[envelope_pb2.SignedEnvelope.FromString(data) for data in entries],
            newest=envelope_pb2.SignedEnvelope.FromString(newest),
        )
        response: pb.OfferEntriesResponse = await self._call("OfferEntries", request)
        return response.head_step

    async def report(self, body: pb.ReportBody) -> list[str]:
        """Send a report in a call of its own. Returns the refused parts, with reasons."""
        response: pb.ReportResponse = await self._call("Report", self._reported(body))
        return list(response.refusals)

    async def tell(self, body: pb.ReportBody) -> pb.ReportResponse:
        """Send a report on the stream of reports, and wait for its answer; one at a time."""
        with self._stream() as telling:
            request = self._reported(body, signed=not telling.signed)
            response = await telling.ask(request, body.sequence, CALL_SECONDS_MAX)
        self.known.learn(response.coordinators)
        return response

    async def tell_quietly(self, body: pb.ReportBody, begun: Callable[[int], None]) -> None:
        """Send a report that is answered, in `late`, only if a part is not taken. `begun` gets the report's number first."""
        body.quiet = True
        with self._stream() as telling:
            request = self._reported(body, signed=not telling.signed)
            begun(body.sequence)
            await telling.tell(request, CALL_SECONDS_MAX)

    @contextmanager
    def _stream(self) -> Iterator[Telling]:
        """The stream of reports; after an error the next report opens another one."""
        if self._channel is None:
            raise NetworkError("not connected to a coordinator")
        if self._telling is None or self._telling.ended is not None or self._telling_on is not self._channel:
            self._hang_up()
            call = rpc.CoordinatorServiceStub(self._channel).Tell()
            self._telling, self._telling_on = Telling(call, self._hear_late), self._channel
        telling, done = self._telling, False
        try:
            yield telling
            done = True
        finally:
            if not done and telling is self._telling:
                self._hang_up()

    def _hear_late(self, answer: pb.ReportResponse | None) -> None:
        if answer is not None:
            self.known.learn(answer.coordinators)
        if not self.late.full():
            self.late.put_nowait(answer)

    def _reported(self, body: pb.ReportBody, *, signed: bool = True) -> pb.ReportRequest:
        body.session_id, body.sequence = self._session, self._next()
        if signed:
            return pb.ReportRequest(envelope=self._seal(Kind.KIND_REPORT, body))
        assert self._identity is not None, "this client only reads"
        data = body.SerializeToString(deterministic=True)
        envelope = unsigned(self._identity.public_key, Kind.KIND_REPORT, self._invite.run_id, data)
        return pb.ReportRequest(envelope=envelope)

    def _hang_up(self) -> None:
        """End the stream of reports; the next report opens another one."""
        telling, self._telling, self._telling_on = self._telling, None, None
        if telling is not None:
            telling.close()

    async def entries(self, from_step: int) -> tuple[list[bytes], int]:
        """A page of the log as serialised envelopes, and the head's step."""
        request = pb.ListEntriesRequest(run_id=self._invite.run_id, from_step=from_step)
        give_up, waits = time.monotonic() + BUSY_SECONDS_MAX, Waits()
        while True:  # the coordinator tells the reader of a long log to wait now and then
            try:
                response = await self._call("ListEntries", request)
                break
            except BusyError:
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(waits.next())
        return [entry.SerializeToString(deterministic=True) for entry in response.entries], response.head_step

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _seal(self, kind: int, body: Any) -> Any:
        assert self._identity is not None, "this client only reads"
        return seal(self._identity, kind, self._invite.run_id, body)

    async def _call(self, name: str, request: Any) -> Any:
        if self._channel is None:
            raise NetworkError("not connected to a coordinator")
        try:
            return await getattr(rpc.CoordinatorServiceStub(self._channel), name)(request, timeout=CALL_SECONDS_MAX)
        except grpc.RpcError as error:
            raise error_of(error) from error


def _unpacked(frame: bytes, before: bytes) -> pb.Decided:
    """What the coordinator packed against the Decided before. Raises NetworkError: a new stream begins without packing."""
    try:
        return parse(pb.Decided, unpack(frame, before, contract.DECIDED_BYTES_MAX))
    except Refusal as refusal:
        raise NetworkError(f"the coordinator's stream cannot be read: {refusal}") from refusal


def check_genesis(genesis: log_pb2.Genesis, invite: Invite) -> RunConfig:
    """The run's configuration if the genesis is the invite's; RefusedError otherwise.

    Raises OperatorError for a run of another format, and for a configuration of a newer version.
    """
    if run_id_of(genesis) != invite.run_id or genesis.coordinator_public_key != invite.coordinator_public_key:
        raise RefusedError("the coordinator's run is not the one that the invite names; ask for a new invite")
    if why := own_misfit(genesis):
        raise OperatorError(why)
    try:
        start_of(genesis)
        return config_from_json(genesis.config_json)
    except UnknownSetting as error:
        raise OperatorError(
            f"a newer version made the run, and this version does not know its settings {error.detail}; upgrade swarmentum "
            f"(installed is {software_version()}, the run names {release_of(genesis) or 'none'} as its oldest)"
        ) from error
