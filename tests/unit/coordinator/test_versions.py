"""A peer of another format is refused by a real coordinator, before it builds anything, with the release to install."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.clock.effects import Denial
from protos.envelope import Kind, seal
from protos.log import FORMAT_VERSION
from protos.run_config import RunConfig
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from tests.unit.coordinator.driver import LAYOUT
from tests.unit.coordinator.serving import Served, identity, served
from tests.unit.coordinator.test_peers import refused_joins


async def ask(here: Served, call: str, format_version: int, release: str) -> Any:
    """Join or MayJoin of peer 0, which names this format and release; the coordinator's answer to GetChallenge."""
    async with here.channel() as channel:
        stub, run_id = rpc.CoordinatorServiceStub(channel), here.invite.run_id
        challenge = await stub.GetChallenge(pb.GetChallengeRequest(run_id=run_id))
        body = pb.JoinBody(
            challenge=challenge.challenge,
            layout_digest=LAYOUT,
            device="cpu",
            format_version=format_version,
            software_version=release,
        )
        request = getattr(pb, f"{call}Request")
        await getattr(stub, call)(request(envelope=seal(identity(0), Kind.KIND_JOIN, run_id, body)))
        return challenge


@pytest.mark.parametrize("call", ["MayJoin", "Join"])
async def test_a_peer_of_another_format_is_refused_with_what_to_install(tmp_path: Path, call: str) -> None:
    async with served(tmp_path, RunConfig()) as here:
        with pytest.raises(grpc.RpcError) as caught:
            await ask(here, call, FORMAT_VERSION + 1, "0.9.0")
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "needs swarmentum 0.1.0, installed is 0.9.0, which is too new" in str(caught.value.details())
        assert refused_joins(here, Denial.VERSION) == 1
        assert not here.runtime.run.peers


async def test_peers_of_the_format_and_peers_from_before_the_field_are_admitted(tmp_path: Path) -> None:
    async with served(tmp_path, RunConfig()) as here:
        for format_version, release in ((FORMAT_VERSION, "0.1.0"), (0, "")):
            challenge = await ask(here, "Join", format_version, release)
            assert challenge.seen_from == "127.0.0.1"
        assert refused_joins(here, Denial.VERSION) == 0
        assert identity(0).public_key in here.runtime.run.peers
