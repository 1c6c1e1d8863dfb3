"""A public list of runs: written by the command of a real coordinator, read by `swarmentum runs` from a file and over HTTP."""

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator import __main__ as operate
from node import __main__ as command
from node.commands import public_runs_view
from protos.envelope import Kind, parse, seal, seal_bytes
from protos.errors import NetworkError, OperatorError, Refusal, RefusedError
from protos.identity import Identity
from protos.invite import Invite
from protos.log import FORMAT_VERSION, run_id_of
from protos.run_config import RunConfig
from protos.run_facts import FIELDS, KEY, LIST_BYTES_MAX, RUNS_MAX, list_text, open_run, open_runs, sealed_run
from protos.run_sections import AdmissionConfig
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2, log_pb2
from tests.unit.coordinator.driver import config
from tests.unit.coordinator.serving import operated, peers, served
from tests.unit.data.test_download import Server, server  # noqa: F401 - a fixture

KEYS = [Identity.from_seed(bytes([n]) * 32) for n in range(2)]
NOW_MS = 1_800_000_000_000


def facts_of(key: Identity, name: str = "tiny", **more: Any) -> pb.GetRunResponse:
    genesis = log_pb2.Genesis(
        format_version=FORMAT_VERSION,
        config_json=RunConfig(name=name, **more).canonical_json(),
        coordinator_public_key=key.public_key,
        nonce=bytes(16),
        parameters=890_000,
    )
    peers = [
        pb.PeerStatus(public_key=bytes([n]) * 32, device="a card", phase=phase, anchor=n == 2)
        for n, phase in enumerate(("READY", "SYNCING", "READY", "ABSENT"))
        for phase in [pb.PeerPhase.Value(f"PEER_PHASE_{phase}")]
    ]
    return pb.GetRunResponse(
        genesis=genesis, phase=pb.Phase.PHASE_OPEN, head_step=7, total_steps=90, loss=3.5, reason="open", peers=peers
    )


def invite_of(facts: pb.GetRunResponse, key: Identity) -> Invite:
    return Invite(run_id_of(facts.genesis), ("host:1",), key.public_key, bytes(32), (), "tiny")


def entry_of(key: Identity = KEYS[0], name: str = "tiny", unix_ms: int = NOW_MS, step: int = 7, **more: Any) -> bytes:
    facts = facts_of(key, name, **more)
    facts.head_step = step
    return sealed_run(key, invite_of(facts, key), facts, unix_ms)


def signed_by(key: Identity, body: pb.ListedRun, run_id: bytes | None = None, kind: int = Kind.KIND_LISTED_RUN) -> str:
    named = run_id_of(body.facts.genesis) if run_id is None else run_id
    return base64.b64encode(seal(key, kind, named, body).SerializeToString()).decode()


def body_of(entry: bytes) -> pb.ListedRun:
    return parse(pb.ListedRun, parse(envelope_pb2.SignedEnvelope, entry).body)


def test_a_run_comes_back_as_its_coordinator_signed_it_and_names_no_peer() -> None:
    made = entry_of()
    [found], left_out = open_runs(list_text([made]).encode(), NOW_MS / 1000)
    values = found.values()
    assert not left_out
    assert (values["name"], values["phase"], values["step"], values["steps"], values["loss"]) == (
        "tiny",
        "open",
        7,
        90,
        3.5,
    )
    assert (values["peers"], values["places"], values["places_free"]) == (2, 256, 254), "an anchor takes no place"
    assert (values["parameters"], values["data"], values["as_of"]) == (890_000, ["stdlib"], NOW_MS / 1000)
    assert Invite.parse(values["invite"]) == invite_of(facts_of(KEYS[0]), KEYS[0])
    body = body_of(made)
    assert {field.name for field, _ in body.facts.ListFields()} <= {*FIELDS, "unix_ms"}
    assert not body.facts.peers
    assert b"a card" not in made


def test_changed_settings_count() -> None:
    facts = facts_of(KEYS[0])
    for key, value in (("clock.max_peers", "3"), ("admission.mode", '"invite"')):
        facts.changed.add(setting=log_pb2.Setting(key=key, value_json=value), from_step=3)
    values = open_run(base64.b64encode(sealed_run(KEYS[0], invite_of(facts, KEYS[0]), facts, 1)).decode()).values()
    assert (values["places"], values["places_free"], values["admission"]) == (3, 1, "invite")


def test_the_newest_entry_of_a_run_counts() -> None:
    entries = [entry_of(unix_ms=NOW_MS + late) for late in (5000, 9000, 1000)]
    [found], left_out = open_runs(list_text(entries).encode(), NOW_MS / 1000)
    assert (found.values()["as_of"], left_out) == ((NOW_MS + 9000) / 1000, [])


def test_an_entry_of_a_clock_that_is_ahead_hides_no_later_one() -> None:
    """It was the newest for a year, whatever its coordinator signed after its clock was right."""
    year = 365 * 86_400_000
    for entries, step, late in (
        (((7, year), (7, 1000), (7, 5000)), 7, 5000),  # of one step
        (((7, 5000), (7, year)), 7, 5000),
        (((7, year), (9, 1000)), 9, 1000),  # the log has grown
        (((9, 1000), (7, year)), 9, 1000),
        (((7, year), (7, 2 * year)), 7, 2 * year),  # this machine's clock may be the wrong one
    ):
        made = [entry_of(unix_ms=NOW_MS + late_ms, step=step) for step, late_ms in entries]
        [found], left_out = open_runs(list_text(made).encode(), NOW_MS / 1000)
        assert not left_out
        assert (found.values()["step"], found.values()["as_of"]) == (step, (NOW_MS + late) / 1000), entries


def wrong_entries() -> Iterator[tuple[str, object, str]]:
    good, other = entry_of(), body_of(entry_of(KEYS[1], "theirs"))
    body = body_of(good)
    envelope = parse(envelope_pb2.SignedEnvelope, good)
    envelope.signature = bytes(63) + b"\x01"
    yield "signature", base64.b64encode(envelope.SerializeToString()).decode(), "the signature does not verify"
    yield "signed by another", signed_by(KEYS[1], body), "another key than its coordinator's signed it"
    yield "another run id", signed_by(KEYS[0], body, bytes(32)), "defines another run"
    yield (
        "the link of another run",
        signed_by(KEYS[0], pb.ListedRun(invite=other.invite, facts=body.facts)),
        "another run",
    )
    yield "no link", signed_by(KEYS[0], pb.ListedRun(facts=body.facts)), "link"
    yield "another kind", signed_by(KEYS[0], body, kind=Kind.KIND_REPORT), "kind 6, expected 22"
    changed = pb.ListedRun()
    changed.CopyFrom(body)
    changed.facts.genesis.config_json = changed.facts.genesis.config_json.replace("tiny", "tidy")
    yield "another definition", signed_by(KEYS[0], changed, run_id_of(body.facts.genesis)), "defines another run"
    changed.CopyFrom(body)
    changed.facts.head_step = 1 << 63
    yield "a step without end", signed_by(KEYS[0], changed), "a figure is out of range"
    changed.CopyFrom(body)
    changed.facts.changed.add(setting=log_pb2.Setting(key="model.factory", value_json='"os:system"'))
    yield "a setting that cannot change", signed_by(KEYS[0], changed), "model.factory"
    rubbish = seal_bytes(KEYS[0], Kind.KIND_LISTED_RUN, bytes(32), b"\xff\xff").SerializeToString()
    yield "no body", base64.b64encode(rubbish).decode(), "not a ListedRun"
    yield "no base64", "%%%", "it is no base64"
    yield "no text", {"run": 3}, "expected text"
    yield "too long", "A" * (1 << 20), "expected text of at most"


@pytest.mark.parametrize(("text", "why"), [it[1:] for it in wrong_entries()], ids=[it[0] for it in wrong_entries()])
def test_a_wrong_entry_is_left_out_with_a_reason_and_the_others_are_shown(text: object, why: str) -> None:
    values = json.loads(list_text([entry_of(KEYS[1], "theirs")]))
    values["runs"].insert(0, text)
    [found], [reason] = open_runs(json.dumps(values).encode(), NOW_MS / 1000)
    assert found.values()["name"] == "theirs"
    assert reason.startswith("entry 1 is left out: ")
    assert why in reason


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "expected"),
        (b'{"swarmentum_runs": true, "runs": []}', "expected"),
        (b'{"swarmentum_runs": 2, "runs": []}', "format 2"),
        (b'{"swarmentum_runs": 1, "runs": {}}', "expected"),
        (json.dumps({KEY: 1, "runs": [""] * (RUNS_MAX + 1)}).encode(), "at most 256"),
        (b" " * (LIST_BYTES_MAX + 1), "bytes"),
    ],
)
def test_what_is_no_list_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(Refusal, match=why):
        open_runs(data, NOW_MS / 1000)


def read(source: object, *more: str) -> Any:
    return CliRunner().invoke(command.app, ["runs", str(source), *more], catch_exceptions=True)


@pytest.mark.parametrize(
    ("hours", "says"),
    [
        (1, "it 1 h 0 min ago\n"),
        (25, "it 1 d 1 h ago, which is old: "),
        (-0.05, "it 0 s ago\n"),
        (-2, "1 h 59 min ahead: "),
    ],
)
def test_how_old_a_list_is_also_where_a_clock_is_ahead(tmp_path: Path, hours: float, says: str) -> None:
    """Signed in the future, it would never grow old."""
    file = tmp_path / "runs.json"
    file.write_text(list_text([entry_of(unix_ms=int(1000 * (time.time() - 3600 * hours)))]))
    assert says in read(file).stdout


async def test_a_real_coordinator_publishes_and_a_stranger_reads(tmp_path: Path) -> None:
    async with served(tmp_path, config()) as here:
        with operated(here, "run"):
            async with peers(here, 1) as [peer]:
                await peer.join()
                name = here.invite.run_name
                words = ["run", "list", "--public", name, "--public", here.invite.run_id.hex(), "--home", str(tmp_path)]
                done = await asyncio.to_thread(CliRunner().invoke, operate.app, words)
    assert done.exit_code == 0, done.output
    file = tmp_path / "runs.json"
    file.write_text(done.stdout[done.stdout.index('{\n "swarmentum_runs"') :])
    told = json.loads(read(file, "--json").stdout)
    [row] = told["runs"]
    assert (row["run"], row["peers"], told["left_out"]) == (here.invite.run_id.hex(), 1, [])
    assert Invite.parse(row["invite"]) == here.invite
    shown = read(file).stdout
    assert f"swarmentum join {row['invite']}" in shown
    assert "0 s ago" in shown or "1 s ago" in shown


def test_only_a_run_that_admits_anybody_shows_the_line_to_join(tmp_path: Path) -> None:
    closed = entry_of(KEYS[1], "closed", admission=AdmissionConfig(mode="invite"))
    ended = facts_of(KEYS[0], "ended")
    ended.phase = pb.Phase.PHASE_FINISHED
    file = tmp_path / "runs.json"
    file.write_text(list_text([closed, sealed_run(KEYS[0], invite_of(ended, KEYS[0]), ended, NOW_MS)]))
    shown = read(file).stdout
    assert "swarmentum join" not in shown
    assert shown.count("swarmentum status swarmentum://") == 2
    assert "only peers with an invite" in shown
    assert "0 of 256 places are free; the run is over" in shown


def test_a_ticket_never_gets_into_a_list() -> None:
    facts = facts_of(KEYS[0])
    secret = replace(invite_of(facts, KEYS[0]), ticket=b"a ticket")
    made = sealed_run(KEYS[0], secret, facts, NOW_MS)
    assert open_run(base64.b64encode(made).decode()).invite.ticket == b""
    assert base64.urlsafe_b64encode(b"a ticket").rstrip(b"=") not in made


def test_exit_codes(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    assert isinstance(read(tmp_path / "nothing").exception, OperatorError)
    file.write_text("{}")
    assert isinstance(read(file).exception, OperatorError)
    assert "there is no list that everybody uses" in str(CliRunner().invoke(command.app, ["runs"]).exception)
    file.write_text(list_text([]))
    assert (read(file).exit_code, read(file).stdout) == (0, "This list has no runs.\n")
    file.write_text(json.dumps({KEY: 1, "runs": ["%"]}))
    assert isinstance(read(file).exception, RefusedError)


def test_over_http(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    server.files["/runs.json"] = list_text([entry_of()]).encode()
    base = server.url.removesuffix("/set")
    assert json.loads(read(f"{base}/runs.json", "--json").stdout)["runs"][0]["name"] == "tiny"
    assert "404" in str(read(f"{base}/other.json").exception)
    server.files["/runs.json"] = b" " * (LIST_BYTES_MAX + 1)
    assert "larger than was promised" in str(read(f"{base}/runs.json").exception)
    server.location = "http://192.0.2.1/runs.json"
    assert "no https address" in str(read(f"{base}/runs.json").exception)
    server.location = f"{base}/again"
    failed = read(f"{base}/runs.json").exception
    assert isinstance(failed, NetworkError)
    assert "redirect" in str(failed).lower()
    assert len(server.asked) < 20
    server.location, server.trickle, server.files["/runs.json"] = "", 0.05, b"x" * 100
    monkeypatch.setattr(public_runs_view, "LIST_SECONDS_MAX", 0.2)
    assert "more than 0 s" in str(read(f"{base}/runs.json").exception)


@pytest.mark.parametrize(
    "url", ["http://example.org/runs.json", "HTTP://192.168.1.7/runs", "http://127.0.0.1.example.org/"]
)
def test_http_of_another_machine_is_refused_before_anything_is_asked(url: str) -> None:
    failed = read(url).exception
    assert isinstance(failed, OperatorError)
    assert "expected https" in str(failed)
