"""Facts of a run from a hostile coordinator, or one of a newer version: shown within seconds, without a traceback."""

import json
import math
import time

import pytest
from google.protobuf.internal.encoder import _VarintBytes

from coordinator.commands.peers import rows_of
from node.commands.status import _line, as_values, show
from node.link.client import CoordinatorClient
from node.web.run_stats import happenings
from protos.accounts import NOBODY
from protos.invite import Invite
from protos.limits import PUBLIC_KEY_BYTES
from protos.log import run_id_of
from protos.run_config import RunConfig
from protos.run_facts import STATUS_PEERS_MAX, bounded, peer_phase_word, peer_values, unconfirmed_words
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import log_pb2

GENESIS = log_pb2.Genesis(
    format_version=1, config_json=RunConfig().canonical_json(), coordinator_public_key=bytes(32), nonce=bytes(16)
)
RUN_ID = run_id_of(GENESIS)


def key(number: int) -> bytes:
    return number.to_bytes(PUBLIC_KEY_BYTES, "big")


def shown(facts: pb.GetRunResponse) -> dict[str, object]:
    values = as_values(bounded(facts), RunConfig(), RUN_ID)
    show(values)
    return values


def test_a_phase_of_a_newer_version_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    facts = pb.GetRunResponse(genesis=GENESIS, peers=[pb.PeerStatus(public_key=key(1))])
    facts.peers[0].phase = 4  # type: ignore[assignment]
    facts.phase = 77  # type: ignore[assignment]
    values = shown(facts)
    assert values["phase"] == "unknown"
    assert "unknown" in capsys.readouterr().out
    assert [row["phase"] for row in rows_of(facts)] == ["unknown"]
    assert [peer_phase_word(number) for number in range(-1, 5)] == [
        "unknown", "unknown", "syncing", "ready", "absent", "unknown",
    ]  # fmt: skip
    assert list(happenings(pb.GetRunResponse(), facts))


def test_keys_that_are_none_are_left_out() -> None:
    facts = pb.GetRunResponse(genesis=GENESIS)
    for wrong in (b"", b"x" * 31, b"x" * 33, key(5)):
        facts.peers.add(public_key=wrong, device="[/bold]\x1b[2J", standing="\n", loss=float("nan"))
        facts.exclusions.add(public_key=wrong, reason="[red]")
    values = shown(facts)
    assert len(values["peers"]) == 1  # type: ignore[arg-type]
    assert ", 1 peer, " in _line(values)
    assert len(values["exclusions"]) == 1  # type: ignore[arg-type]


def test_an_answer_of_16_mb_costs_no_minute() -> None:
    """Each owner's signature is checked, and 130,000 of them took more than 90 s."""
    peer = pb.PeerStatus(
        public_key=key(1), device="d" * 60, owner=pb.Owner(name="Ada", public_key=key(2), signature=bytes(64))
    )
    facts = pb.GetRunResponse(genesis=GENESIS, peers=[peer] * 60_000)
    facts.exclusions.extend([pb.ExcludedPeer(public_key=key(3), reason="r" * 40)] * 60_000)
    facts.changed.extend([pb.ChangedSetting(from_step=1)] * 60_000)
    assert facts.ByteSize() > 8_000_000
    began = time.process_time()
    kept = bounded(facts)
    assert len(kept.peers) == STATUS_PEERS_MAX
    values = as_values(kept, RunConfig(), RUN_ID)
    assert len(values["exclusions"]) == 256
    assert time.process_time() - began < 10


def test_the_newest_exclusions_are_kept() -> None:
    facts = pb.GetRunResponse(exclusions=[pb.ExcludedPeer(public_key=key(n)) for n in range(300)])
    assert [it.public_key for it in bounded(facts).exclusions] == [key(n) for n in range(44, 300)]


def test_fields_of_a_newer_version_are_left_out() -> None:
    data = pb.GetRunResponse(genesis=GENESIS, peers=[pb.PeerStatus(public_key=key(1))]).SerializeToString()
    newer = data + _VarintBytes(900 << 3 | 2) + _VarintBytes(5) + b"later"
    assert shown(pb.GetRunResponse.FromString(newer))["unconfirmed_steps"] == 0


async def test_every_reader_of_a_client_gets_bounded_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    client = CoordinatorClient(Invite(RUN_ID, ("127.0.0.1:1",), bytes(32), bytes(32), (), "swarm"), None)

    async def answered(*_: object) -> pb.GetRunResponse:
        return pb.GetRunResponse(genesis=GENESIS, peers=[pb.PeerStatus(public_key=b"short")] * 3)

    monkeypatch.setattr(client, "_call", answered)
    facts, _ = await client.get_run()
    assert not facts.peers


@pytest.mark.parametrize(("steps", "anchored", "says"), [
    (0, True, ""), (2, True, ""), (7, False, ""), (94, True, "no anchor reports"), (94, False, "fewer than half"),
])  # fmt: skip
def test_steps_without_a_digest_are_said(
    steps: int, anchored: bool, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bool(unconfirmed_words(steps, anchored=anchored)) is bool(says)
    values = shown(pb.GetRunResponse(genesis=GENESIS, unconfirmed_steps=steps, anchored=anchored))
    assert values["unconfirmed_steps"] == steps
    out = capsys.readouterr().out
    assert (f"the last {steps} steps have no agreed state digest" in out) is bool(says)
    assert says in out


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_figures_that_are_no_numbers_do_not_end_the_page(wrong: float) -> None:
    """It sends JSON that is strict."""
    peer = pb.PeerStatus(public_key=key(1), samples_per_second=wrong, loss=wrong, score=wrong, votes_accepted=1)
    json.dumps(peer_values(peer, NOBODY), allow_nan=False)
