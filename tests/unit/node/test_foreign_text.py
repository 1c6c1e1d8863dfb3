"""Words of strangers on people's screens: never markup, never escape codes, and no command fails for them."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
from rich.console import Console

from coordinator.commands import peers
from node import pictures as report
from node.commands import demonstration as demo
from node.commands import status
from node.pictures import PeerTotals, peers_table
from protos.console import configure_logging, exit_with
from protos.errors import RefusedError
from protos.identity import Identity
from protos.limits import DEVICE_CHARACTERS_MAX
from protos.run_config import RunConfig
from protos.v1 import coordinator_pb2 as pb

EVIL = "[/x]\x1b]0;owned\x07[bold]\u202e"
KEY = Identity.from_seed(b"e" * 32).public_key


def facts() -> pb.GetRunResponse:
    """Of a run whose coordinator and whose peers mean it harm."""
    peer = pb.PeerStatus(public_key=KEY, device=EVIL * 40, phase=2, standing=EVIL, standing_reason=EVIL)
    excluded = pb.ExcludedPeer(public_key=KEY, reason=EVIL)
    return pb.GetRunResponse(phase=1, reason=EVIL, peers=[peer], exclusions=[excluded])


def shows_it_plainly(text: str) -> None:
    assert "\x1b]" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "[/x]" in text


def test_status_shows_foreign_words_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig()
    values = status.as_values(facts(), config, b"r" * 32)
    assert len(values["peers"][0]["device"]) == DEVICE_CHARACTERS_MAX
    status.show(values)
    shows_it_plainly(capsys.readouterr().out)


@pytest.mark.parametrize("columns", [80, 160])
def test_nothing_of_a_status_is_cut(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    peer = pb.PeerStatus(
        public_key=KEY, device="NVIDIA GeForce RTX 4090 Laptop GPU", phase=2, applied_step=123_456, votes_accepted=123_000,
        samples_per_second=1234.5, loss=3.25, standing="probation", state_digest=b"d" * 32, score=12.5,
    )  # fmt: skip
    status.show(status.as_values(pb.GetRunResponse(phase=1, peers=[peer] * 3), RunConfig(), b"r" * 32))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    words = " ".join(lines)
    assert "\u2026" not in words
    for word in ("123456", "123000", "1234.5", "3.2500", "probation", (b"d" * 8).hex(), "12.5", "Laptop", "samples/s"):
        assert word in words, word


def test_so_do_the_demo_and_its_report() -> None:
    values = status.as_values(facts(), RunConfig(), b"r" * 32)
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    console.print(demo._view(values))
    row = PeerTotals("id", EVIL, 1, 1, 1, 1, "d")
    console.print(peers_table([row], 10))
    assert isinstance(console.file, io.StringIO)
    shows_it_plainly(console.file.getvalue())
    assert report.render(peers_table([row], 10))


def test_so_does_the_operators_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("coordinator.commands.operator.Operator.__init__", lambda self, home: None)
    monkeypatch.setattr("coordinator.commands.operator.Operator.find", lambda self, run: facts())
    monkeypatch.setenv("COLUMNS", "200")
    peers.list_peers("run", Path("home"), False)
    shows_it_plainly(capsys.readouterr().out)


def test_errors_and_logs_that_quote_others_print(capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> None:
        raise RefusedError(f"the coordinator refused: {EVIL}\nsecond line")

    with pytest.raises(SystemExit):
        exit_with(refused)
    told = capsys.readouterr().err
    shows_it_plainly(told)
    assert told.count("\n") == 2
    before = structlog.get_config()
    try:
        configure_logging(as_json=False)
        structlog.get_logger().info("refused", why=EVIL)
    finally:
        structlog.configure(**before)
    told = capsys.readouterr().err
    assert "\x1b]" not in told
    assert sys.stderr is not None


def test_brackets_in_a_folder_s_name_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from coordinator.__main__ import _ready

    _ready(Path("/srv/[runs]"), False, SimpleNamespace(advertise="10.0.0.1:5080"))
    assert "run create --home '/srv/[runs]'" in " ".join(capsys.readouterr().out.split())  # quoted as a shell needs it
