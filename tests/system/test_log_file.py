"""A run's log as a file: written from a real coordinator over gRPC, checked without it; each kind of damage is found."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from node import __main__ as command
from node.archive.ledger import export_log, log_entries, of
from protos.errors import OperatorError, RefusedError
from tests.system.local_swarm import LocalSwarm, toml_of_run

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(900)]
STEPS = 12
RUN = toml_of_run(
    "log", source=str(Path(json.__file__)), clock={"steps": STEPS, "batch_samples": 4, "snapshot_every": 6}
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, list[str]]:
    """The file of a run that one peer finished, the run id, and the identities of its ledger."""
    folder = tmp_path_factory.mktemp("log")
    with LocalSwarm(folder, RUN) as swarm:
        assert swarm.join("ada").finish()[0] == 0
        file = folder / "run.log"
        done = CliRunner().invoke(command.app, ["export-log", swarm.link, str(file), "--json"])
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)
        assert (told["steps"], told["bytes"]) == (STEPS, file.stat().st_size)
        with pytest.raises(OperatorError, match="exists already"):
            export_log(swarm.invite, file)
        with pytest.raises(OperatorError, match="cannot be written: Not a directory"):
            export_log(swarm.invite, file / "run.log")
        live = of(swarm.link)
    return file, live.run_id, [account.id for account in live.accounts]


def test_the_file_proves_the_run_when_the_coordinator_is_gone(written: tuple[Path, bytes, list[str]]) -> None:
    file, run_id, identities = written
    found = of(str(file))
    assert (found.run_id, found.from_step, found.to_step) == (run_id, 1, STEPS)
    assert [account.id for account in found.accounts] == identities
    assert sum(account.votes_accepted for account in found.accounts) == STEPS


def test_the_log_of_another_run_than_the_wanted_one_is_refused(written: tuple[Path, bytes, list[str]]) -> None:
    file, run_id, _ = written
    named = CliRunner().invoke(command.app, ["ledger", str(file), "--run", run_id.hex()[:16], "--json"])
    assert named.exit_code == 0, named.output
    with pytest.raises(RefusedError, match="--run names 0123456789abcdef"):
        CliRunner().invoke(command.app, ["ledger", str(file), "--run", "0123456789abcdef"], catch_exceptions=False)


def parts(data: bytes) -> list[bytes]:
    """The records with their lengths."""
    found, at = [], 0
    while at < len(data):
        size = 4 + int.from_bytes(data[at : at + 4], "big")
        found.append(data[at : at + size])
        at += size
    return found


def test_damage_is_found(written: tuple[Path, bytes, list[str]], tmp_path: Path) -> None:
    file, _, _ = written
    whole = parts(file.read_bytes())
    assert len(whole) == STEPS + 1
    turned = whole[5][:-1] + bytes([whole[5][-1] ^ 1])
    other = whole[0][:30] + bytes([whole[0][30] ^ 1]) + whole[0][31:]
    damaged = {
        "no log": b"",
        "a text": b"name = 3\n",
        "nothing behind its length": (5).to_bytes(4, "big"),
        "too long": (1 << 31).to_bytes(4, "big") + bytes(99),
        "another run": other + b"".join(whole[1:]),
        "a signature": b"".join([*whole[:5], turned, *whole[6:]]),
        "an entry left out": b"".join([*whole[:5], *whole[6:]]),
        "two entries exchanged": b"".join([*whole[:5], whole[6], whole[5], *whole[7:]]),
        "cut inside of an entry": b"".join(whole)[:-3],
        "cut inside of a length": b"".join(whole) + b"\0\0",
        "a long entry": b"".join(whole) + (1 << 31).to_bytes(4, "big") + bytes(99),
    }
    for name, data in damaged.items():
        path = tmp_path / "damaged"
        path.write_bytes(data)
        with pytest.raises(OperatorError):  # noqa: PT012 - the entries are read one by one
            _, entries = log_entries(path)
            raise AssertionError(f"{name}: {len(list(entries))} entries hold")
    with pytest.raises(OperatorError, match="cannot be read"):
        log_entries(tmp_path)
