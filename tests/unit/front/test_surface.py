"""What programs may rely on: the names and signatures of `swarmentum`, an import without torch, and words for a package that
hides one of ours."""

import asyncio
import inspect
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import swarmentum
from tests.kept.make import KEPT

SURFACE = {
    "DeMoConfig": None,
    "DeMoOptimizer": None,
    "DivergedError": None,
    "Joined": None,
    "Local": None,
    "LocalConfig": None,
    "NetworkError": None,
    "OperatorError": None,
    "Peer": "(id, votes_accepted, samples, tokens, payload_bytes, first_step, last_step, owner=)",
    "RefusedError": None,
    "Run": "(id, name, settings, steps, peers, exclusions, head)",
    "Share": "(number, learning_rate, indices, _samples, _micro_batch, _device, _decided)",
    "Step": "(step, entry_hash, learning_rate, loss, samples, tokens, payload_bytes, votes, state_digest_before)",
    "StoppedError": None,
    "SwarmOptimizer": "(peer)",
    "SwarmentumError": None,
    "Verification": None,
    "Vote": "(peer, payload_sha256, payload_bytes, samples, tokens, loss)",
    "__version__": None,
    "join": "(link, model, *, loss=, home=, own_data=, allow_code=, allow_data=, yes=, settings)",
    "local": "(peers=, anchor=, run=, folder=)",
    "read_run": "(run)",
    "verify": "(archive, *, run_id=, from_step=, model=)",
}
"""A change here is a change of the public interface: the CHANGELOG names it."""


def python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )  # fmt: skip


def shape(function: object) -> str:
    """The names of a signature, in order; `=` after those with a default."""
    words, starred = [], False
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            words, starred = [*words, "*"], True
        words.append(parameter.name + ("" if parameter.default is parameter.empty else "="))
    return f"({', '.join(words)})"


def test_the_names_and_signatures_are_the_promised_ones() -> None:
    assert set(swarmentum.__all__) == SURFACE.keys() == set(dir(swarmentum))
    assert swarmentum.__all__ == sorted(swarmentum.__all__)
    found = {name: getattr(swarmentum, name) for name in SURFACE}
    assert {name: shape(found[name]) for name, wanted in SURFACE.items() if wanted} == {
        name: wanted for name, wanted in SURFACE.items() if wanted
    }
    silent = [name for name, it in found.items() if name != "__version__" and not inspect.getdoc(it)]
    assert not silent, silent
    with pytest.raises(AttributeError, match="no attribute 'Demo'; it has DeMoConfig"):
        swarmentum.Demo  # noqa: B018


def test_the_import_takes_no_torch_and_the_log_needs_none(tmp_path: Path) -> None:
    heavy = "[m for m in ('torch', 'numpy', 'grpc', 'pydantic', 'rich', 'node', 'hivemind') if m in sys.modules]"
    done = python(
        f"import swarmentum, sys; print({heavy}); swarmentum.read_run; print('torch' in sys.modules)", tmp_path
    )
    assert done.stdout.splitlines() == ["[]", "False"], done.stderr


@pytest.mark.parametrize("name", ["node", "coordinator", "protos"])
@pytest.mark.parametrize("kind", ["module", "package"])
def test_a_foreign_package_in_the_place_of_ours_is_named_with_its_path(tmp_path: Path, name: str, kind: str) -> None:
    file = tmp_path / (f"{name}.py" if kind == "module" else f"{name}/__init__.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    for first in ("", f"import {name}; "):
        done = python(f"{first}import swarmentum", tmp_path)
        named = file if kind == "module" else file.parent
        assert f"ImportError: the package '{name}' at {named} hides swarmentum's own at " in done.stderr, done.stderr
        assert "rename it" in done.stderr


@pytest.mark.parametrize("program", ["swarmentum", "swarmentum-coordinator"])
def test_the_commands_name_a_foreign_package_too(tmp_path: Path, program: str) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "__init__.py").write_text("print('somebody else')")
    command = Path(sys.executable).with_name(program)
    done = subprocess.run(
        [command, "version"],
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert f"the package 'node' at {tmp_path / 'node'} hides swarmentum's own at " in done.stderr
    assert "somebody else" not in done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a peer that kept an archive, as the release 0.1.0 wrote it."""
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(KEPT / "0.1.0.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "ada"


def test_a_run_is_read_from_its_archive(home: Path) -> None:
    run = swarmentum.read_run(home)
    assert run.id.startswith("13ff2a9cee4b0f96")
    assert (run.name, run.step, len(run.steps)) == ("kept", run.steps[-1].step, run.step)
    assert run.settings["clock"]["batch_samples"] > 0
    [peer] = run.peers
    assert (peer.votes_accepted, peer.first_step, peer.last_step) == (run.step, 1, run.step)
    assert peer.samples == sum(step.samples for step in run.steps) > 0
    assert all(vote.peer == peer.id for step in run.steps for vote in step.votes)
    assert run.loss == pytest.approx(run.steps[-1].votes[0].loss)
    assert run.head == run.steps[-1].entry_hash
    json.dumps(run.settings)


async def test_a_run_is_read_where_an_event_loop_runs_already(home: Path) -> None:
    assert asyncio.get_running_loop().is_running()
    with pytest.raises(swarmentum.NetworkError, match=r"127\.0\.0\.1:1"):
        swarmentum.read_run(nowhere())


def nowhere() -> str:
    """The link of a run whose coordinator is away."""
    from protos.invite import Invite

    return Invite(bytes(32), ("127.0.0.1:1",), bytes(range(32)), bytes(32), (), "away").link()


def test_the_archive_holds_and_a_changed_byte_is_found(home: Path, tmp_path: Path) -> None:
    whole = swarmentum.verify(str(home), run_id="13ff")
    assert (whole.ok, whole.first_bad_step) == (True, None), whole.reason
    assert not swarmentum.verify(home, run_id="00").ok
    copied = tmp_path / "archive"
    [found] = home.glob("runs/*/archive")
    copied.mkdir()
    for path in found.rglob("*"):
        to = copied / path.relative_to(found)
        to.mkdir() if path.is_dir() else to.write_bytes(path.read_bytes())
    log = copied / "0000000000000" / "log"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    broken = swarmentum.verify(copied)
    assert not broken.ok
    assert broken.first_bad_step is not None
    with pytest.raises(swarmentum.OperatorError, match="of the log does not hold"):
        swarmentum.read_run(copied)


@pytest.mark.parametrize(("run", "said"), [("nowhere", "has no archive"), ("swarmentum://abc", "damaged")])
def test_what_is_no_run_is_refused_in_words(run: str, said: str) -> None:
    with pytest.raises(swarmentum.OperatorError, match=said):
        swarmentum.read_run(run)


def test_a_damaged_genesis_is_refused_in_words(home: Path, tmp_path: Path) -> None:
    (tmp_path / "genesis").write_bytes(b"\xff" * 40)
    with pytest.raises(swarmentum.OperatorError, match="do not hold"):
        swarmentum.read_run(tmp_path)


@pytest.mark.parametrize("program", ["_peer_program", "_coordinator_program"])
def test_ctrl_c_while_a_command_is_imported_prints_no_traceback(program: str, tmp_path: Path) -> None:
    code = f"""
import signal, sys, swarmentum
class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name in ("node.__main__", "coordinator.__main__"):
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Pressed())
swarmentum.{program}()
"""
    done = python(code, tmp_path)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_fork_is_none_of_grpc_s_business() -> None:
    """Its handlers ended workers of a program's DataLoader, one in 12 epochs, if the peer's thread was just in gRPC."""
    program = """
import asyncio, os, swarmentum, grpc.aio

async def fork():
    async with grpc.aio.insecure_channel("127.0.0.1:1"):
        for _ in range(20):
            await asyncio.sleep(0)
            if not (child := os.fork()):
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0

asyncio.run(fork())
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240, env=environment
    )
    assert (ran.returncode, "fork_posix" in ran.stderr) == (0, False), ran.stderr
