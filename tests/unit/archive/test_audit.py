"""What an auditor reads of a log: presence, exclusions with their evidence, changes; the same bytes each time."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from node import __main__ as command
from node.archive import audit, files
from node.archive.audit import AWAY_STEPS, write_from_log
from protos.envelope import Kind, seal
from protos.equivocation import open_announcement
from protos.errors import OperatorError
from protos.identity import Identity
from protos.log import Entry, Equivocation, Exclusion, Verdict, seal_entry
from protos.v1 import log_pb2, update_pb2
from tests.unit.web.logs import COORDINATOR, GENESIS, PEERS, RUN, contribution, entry

LIAR, ALONE, LATE = range(3)
STEPS = 20


def announced(peer: Identity, payload: int) -> bytes:
    body = update_pb2.Announcement(step=5, parent_hash=RUN, payload_sha256=bytes([payload]) * 32, payload_bytes=9)
    return seal(peer, Kind.KIND_ANNOUNCEMENT, RUN, body).SerializeToString()


PAIR = Equivocation(announced(PEERS[LIAR], 1), announced(PEERS[LIAR], 2))
VERDICT = Verdict(9, PEERS[ALONE].public_key, PEERS[LATE].public_key, bytes([9]) * 32, 0.5, -2.0)


def happened(step: int, parent: bytes) -> Entry:
    """The liar votes until it is excluded in step 6; one peer is away in steps 8 to 12, and excluded and readmitted later."""
    who = [ALONE, *([LIAR] if step < 6 else []), *([LATE] if step < 8 or step > 12 else [])]
    made = replace(entry(step, parent), contributions=tuple(contribution(number, step) for number in sorted(who)))
    if step == 6:
        made = replace(made, exclusions=(Exclusion(PEERS[LIAR].public_key, "two payloads", (), PAIR),))
    if step == 14:
        made = replace(made, exclusions=(Exclusion(PEERS[LATE].public_key, "noise", (VERDICT,)),))
    if step == 16:
        made = replace(made, readmitted=(PEERS[LATE].public_key,))
    changed = (("clock.batch_samples", "32"), ("optimizer.lr", "0.5")) if step >= 10 else ()
    return replace(made, settings=changed)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path, head = tmp_path / "run.log", RUN
    with path.open("wb") as file:
        files.append(file, GENESIS.SerializeToString(deterministic=True))
        for step in range(1, STEPS + 1):
            signed = seal_entry(COORDINATOR, RUN, happened(step, head))
            files.append(file, signed.envelope)
            head = signed.hash
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_presence_exclusions_and_changes_are_those_of_the_log(log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    facts = write_from_log(log, folder)
    assert (facts["run"], facts["name"], facts["last_step"]) == (RUN.hex(), "paper", STEPS)
    peers = {row["peer"]: row for row in rows(folder / "peers.jsonl")}
    assert [peers[PEERS[n].peer_id]["voted"] for n in (LIAR, ALONE, LATE)] == [[[1, 5]], [[1, 20]], [[1, 7], [13, 20]]]
    assert peers[PEERS[LIAR].peer_id]["why_not"] == "excluded in step 6: two payloads"
    assert [peers[PEERS[n].peer_id]["why_not"] for n in (ALONE, LATE)] == [None, None], "it was readmitted"
    first, second, third = rows(folder / "exclusions.jsonl")
    assert (first["step"], first["peer"], first["verdicts"]) == (6, PEERS[LIAR].peer_id, [])
    signed = [open_announcement(base64.b64decode(it), run_id=RUN)[0] for it in first["announcements"]]
    assert {it.public_key for it in signed} == {PEERS[LIAR].public_key}, "the evidence proves it without the log"
    assert (second["verdicts"][0]["checker"], second["verdicts"][0]["difference"]) == (
        PEERS[ALONE].public_key.hex(),
        -2.0,
    )
    assert (third["step"], third["readmitted"]) == (16, True)
    assert rows(folder / "changes.jsonl") == [
        {"from_step": 10, "settings": {"clock.batch_samples": 32, "optimizer.lr": 0.5}}
    ]
    steps = rows(folder / "steps.jsonl")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["entry"] == facts["head"]
    assert rows(folder / "ledger.json")[0]["exclusions"][1]["readmitted_step"] == 16


def test_a_step_or_two_without_votes_is_no_absence(tmp_path: Path) -> None:
    seen = audit._Presence()
    for step in (1, 2, 2 + AWAY_STEPS, 3 + 2 * AWAY_STEPS):
        seen.add(PEERS[0].public_key, step)
    [row] = seen.rows(3 + 2 * AWAY_STEPS + AWAY_STEPS, {})
    assert row["voted"] == [[1, 2 + AWAY_STEPS], [3 + 2 * AWAY_STEPS] * 2]
    assert "the log does not say" in row["why_not"]


def run(*words: object) -> Any:
    return CliRunner().invoke(command.app, ["audit-folder", *map(str, words)])


def test_a_log_file_alone_makes_the_same_files_again(log: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert run(log, tmp_path / name, "--json").exit_code == 0
    ones = {path.name: path.read_bytes() for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert ones == {path.name: path.read_bytes() for path in (tmp_path / "two").rglob("*") if path.is_file()}
    assert {"README.md", "SHA256SUMS", "run.log", "peers.jsonl", "run.json"} <= ones.keys()


def test_what_is_there_already_is_left_alone_and_a_failure_leaves_nothing(log: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes").write_text("mine")
    failed = run(log, full)
    assert isinstance(failed.exception, OperatorError)
    assert "is not empty" in str(failed.exception)
    assert [path.name for path in full.iterdir()] == ["notes"]
    log.write_bytes(log.read_bytes()[:-1])
    for bad in (log, tmp_path / "nothing", full):
        failed = run(bad, tmp_path / "new")
        assert isinstance(failed.exception, OperatorError)
        assert str(failed.exception).startswith(str(bad)), "and not its copy, which is gone"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "run.log"]
    later = log_pb2.Genesis()
    later.CopyFrom(GENESIS)
    later.format_version = 2
    with log.open("wb") as file:
        files.append(file, later.SerializeToString(deterministic=True))
    assert "format" in str(run(log, tmp_path / "new").exception)
