"""What an attack is, and what it may know: the run's link, as a stranger has it, and where the swarm's files are."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc

from protos.calls import TLS_NAME, fetch_certificate
from protos.invite import Invite
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc


@dataclass(frozen=True)
class Target:
    """A run to attack. `folder` holds the swarm's homes and logs (`LocalSwarm.folder`), and is there to write in."""

    link: str
    folder: Path
    coordinator_pid: int | None = None

    @property
    def invite(self) -> Invite:
        """What the link says."""
        return Invite.parse(self.link)

    @asynccontextmanager
    async def channel(self, **options: Any) -> AsyncIterator[Any]:
        """A new gRPC connection to the coordinator: channels with equal options share one, so each gets a number."""
        address, credentials, settings = self._connection()
        async with grpc.aio.secure_channel(
            address, credentials, options=[*settings.items(), *options.items()]
        ) as channel:
            yield channel

    @contextmanager
    def threaded_channel(self) -> Iterator[Any]:
        """The same of gRPC's threaded client."""
        address, credentials, settings = self._connection()
        with grpc.secure_channel(address, credentials, options=list(settings.items())) as channel:
            yield channel

    def _connection(self) -> tuple[str, grpc.ChannelCredentials, dict[str, Any]]:
        """Where to connect, with what, and as a channel of its own: channels with equal options share one connection."""
        invite = self.invite
        address = invite.coordinators[0]
        pem = fetch_certificate(address, invite.certificate_sha256)
        settings = {"grpc.ssl_target_name_override": TLS_NAME, "attack.number": next(_numbers)}
        return address, grpc.ssl_channel_credentials(pem), settings

    async def run_now(self) -> pb.GetRunResponse:
        """The public facts of the run."""
        async with self.channel() as channel:
            request = pb.GetRunRequest(run_id=self.invite.run_id)
            answer: pb.GetRunResponse = await rpc.CoordinatorServiceStub(channel).GetRun(request, timeout=240)
            return answer


_numbers = itertools.count(1)
END_SECONDS = 10.0


async def together(work: list[Coroutine[Any, Any, Any]], seconds: float) -> None:
    """Run all of it for about `seconds`, then cancel the rest: of thousands of calls, gRPC lost the end of one now and then."""
    tasks = [asyncio.ensure_future(part) for part in work]
    done, late = await asyncio.wait(tasks, timeout=seconds + END_SECONDS)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late, timeout=END_SECONDS)
    for task in done:
        task.result()


class Attack(Protocol):
    """One attack. `what` says in a sentence what it tries; `run` does it for so long and says what came of it."""

    @property
    def name(self) -> str:
        """As the command line has it."""

    @property
    def what(self) -> str:
        """One sentence."""

    def run(self, target: Target, seconds: float) -> str:
        """Attack for about `seconds`; returns what was done and what was answered, in a few words."""
