"""The coordinator as a watcher sees it: plain calls with deadlines, on a thread of its own. Reads only.

Refuses a server whose certificate is not the invite's, and a genesis that is not the invite's run.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from node.link.client import check_genesis
from protos import limits
from protos.calls import error_of, fetch_certificate, pinned_channel, way_of
from protos.clocks import Waits
from protos.errors import NetworkError, Refusal, RefusedError
from protos.invite import Invite
from protos.orders import End, open_end
from protos.run_config import RunConfig
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc

CALL_SECONDS_MAX = 10.0
POLL_SECONDS = 5.0
RETRY_SECONDS_MIN = 2.0
RETRY_SECONDS_MAX = 8.0
BOOTSTRAP_MAX = 8 * limits.ADDRESSES_MAX
STOP_SECONDS_MAX = 3.0
# The bytes of a page of the longest entries.
_OPTIONS = {"grpc.max_receive_message_length": limits.ENTRIES_PAGE_MAX * (limits.ENTRY_BYTES_MAX + 1024)}


@dataclass(frozen=True)
class WatchedRun:
    """The answer to GetRun. The configuration is the genesis's, so the run id verifies it.

    `reason` says what the run waits for; empty if the run does not wait.
    """

    config: RunConfig
    head_step: int
    reason: str
    bootstrap: tuple[str, ...]
    total_steps: int
    """As the coordinator says: the operator may change them, or end the run."""
    end: End | None = None
    """The signed end of a run that its operator ended early."""


@dataclass(frozen=True)
class LogPage:
    """The requested entries, as envelopes, and the coordinator's head."""

    entries: tuple[bytes, ...]
    head_step: int


@dataclass(frozen=True)
class Away:
    """No coordinator answers. The reader tries again until it is stopped."""

    error: NetworkError


@dataclass(frozen=True)
class Denied:
    """A server answers that does not serve the invite's run."""

    error: RefusedError


class LogReader(threading.Thread):
    """Asks for the run's facts every POLL_SECONDS, and for entries when told to."""

    def __init__(self, invite: Invite, put: Callable[[WatchedRun | LogPage | Away | Denied], bool]) -> None:
        """`put` waits a moment, and returns whether it took the value."""
        super().__init__(name="log-reader", daemon=True)
        self._invite = invite
        self._put = put
        self._addresses = itertools.cycle(invite.coordinators)
        self._channel: Any = None
        self._wanted: int | None = None
        self._wake = threading.Event()
        self._stopping = False

    def ask(self, step: int) -> None:
        """Ask the thread to fetch a page of entries from this step on."""
        self._wanted = step
        self._wake.set()

    def stop(self) -> None:
        """End the thread, and drop a call in flight."""
        self._stopping = True
        self._wake.set()
        self.join(STOP_SECONDS_MAX)

    def run(self) -> None:
        """Read until stopped."""
        due, waits = time.monotonic(), Waits(RETRY_SECONDS_MIN, RETRY_SECONDS_MAX)
        while not self._stopping:
            try:
                if self._channel is None:
                    self._connect()
                if time.monotonic() >= due:
                    self._tell(self._facts())
                    due = time.monotonic() + POLL_SECONDS
                    waits.reset()
                step, self._wanted = self._wanted, None
                if step is not None:
                    self._tell(self._page(step))
            except NetworkError as error:
                self._close()
                self._tell(Away(error))
                due = time.monotonic() + waits.next()
            except RefusedError as error:
                self._tell(Denied(error))
                break
            self._wake.wait(max(due - time.monotonic(), 0.0))
            self._wake.clear()
        self._close()

    def _tell(self, news: WatchedRun | LogPage | Away | Denied) -> None:
        """Give the watcher a value. Wait while the watcher is busy."""
        while not self._stopping and not self._put(news):
            pass

    def _connect(self) -> None:
        """Connect to the first coordinator that answers with the pinned certificate. Raises the last failure if none does."""
        failure: NetworkError | RefusedError = NetworkError("the invite names no coordinator")
        for _ in self._invite.coordinators:
            address = next(self._addresses)
            try:
                proxy = way_of(address)
                pem = fetch_certificate(address, self._invite.certificate_sha256, proxy=proxy)
                self._channel = pinned_channel(address, pem, _OPTIONS, proxy)
                return
            except (NetworkError, RefusedError) as error:
                failure = error
        raise failure

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _facts(self) -> WatchedRun:
        response: pb.GetRunResponse = self._call("GetRun", pb.GetRunRequest(run_id=self._invite.run_id))
        try:
            config = check_genesis(response.genesis, self._invite)
        except Refusal as refusal:
            raise RefusedError(f"the run's configuration cannot be read: {refusal.detail}") from refusal
        bootstrap = tuple(a for a in response.bootstrap[:BOOTSTRAP_MAX] if len(a) <= limits.ADDRESS_BYTES_MAX)
        reason = response.reason if response.phase == pb.Phase.PHASE_WAITING else ""
        return WatchedRun(
            config, response.head_step, reason, bootstrap, response.total_steps, self._end(response, config)
        )

    def _end(self, response: pb.GetRunResponse, config: RunConfig) -> End | None:
        """The end that the answer has, verified. RefusedError for one that the coordinator did not sign, or the run's operators
        did not order."""
        if not response.HasField("end"):
            return None
        data, invite = response.end.SerializeToString(deterministic=True), self._invite
        try:
            pinned = invite.coordinator_public_key
            return open_end(data, run_id=invite.run_id, coordinator=pinned, operators=config.operators)
        except Refusal as refusal:
            raise RefusedError(
                f"the coordinator shows an end of the run that does not hold: {refusal.detail}"
            ) from refusal

    def _page(self, step: int) -> LogPage:
        request = pb.ListEntriesRequest(run_id=self._invite.run_id, from_step=step)
        response: pb.ListEntriesResponse = self._call("ListEntries", request)
        page = response.entries[: limits.ENTRIES_PAGE_MAX]
        return LogPage(tuple(entry.SerializeToString(deterministic=True) for entry in page), response.head_step)

    def _call(self, name: str, request: Any) -> Any:
        try:
            return getattr(rpc.CoordinatorServiceStub(self._channel), name)(request, timeout=CALL_SECONDS_MAX)
        except grpc.RpcError as error:
            raise error_of(error) from error
