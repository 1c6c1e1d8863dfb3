"""Ctrl-C, SIGTERM and a closed window, at every stage of `join` and `relay`, on a real terminal: quiet, soon, nothing left.

The signals go to every process of the terminal's foreground group, p2pd's guard included, as the kernel sends them.
"""

import json
import secrets
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.identity import Identity
from protos.invite import Invite
from tests.system.local_swarm import PLAIN_MODEL, TINY_MODEL, LocalSwarm
from tests.system.terminal import CTRL_C, Terminal, daemons_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

STOP_SECONDS_MAX = 5.0
"""It takes some 0.1 s where nothing else runs; p2pd's second life took 11 s and more."""

OURS = ("--allow-code", "--yes")
"""For runs whose model is code of these tests."""
EVERY_WAY = ("ctrl-c", "sigterm", "hang-up")
# One way stands for all; `make nightly` tries each.
WAYS = ("ctrl-c", *(pytest.param(way, marks=pytest.mark.nightly) for way in EVERY_WAY[1:]))
RUN = """
name = "stopping"
[data]
context = 32
[clock]
steps = 1000000
batch_samples = 4
[overlay]
bootstrap = [BOOTSTRAP]
"""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    swarm = LocalSwarm(tmp_path_factory.mktemp("stopping"), RUN + TINY_MODEL)
    yield swarm
    swarm.close()


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A port on loopback that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def another_run(swarm: LocalSwarm, tmp_path: Path, text: str) -> str:
    """The link of one more run on the swarm's coordinator."""
    file = tmp_path / "another.toml"
    text = f'name = "another-{secrets.token_hex(4)}"\n' + text.replace('name = "stopping"\n', "")
    file.write_text(text.replace("BOOTSTRAP", json.dumps(swarm.bootstrap[0])))
    create = swarm.start(
        "another", "coordinator", "run", "create", str(file), "--home", swarm.home, "--json", "--no-layout"
    )
    link: str = create.first_json()["invite"]
    create.finish()
    return link


def join(link: str, home: Path, *flags: str, environment: dict[str, str] | None = None) -> Terminal:
    at = ("--home", str(home), "--listen", "127.0.0.1:0", "--threads", "1")
    return Terminal("node", "join", link, *at, *flags, environment=environment)


def stop(terminal: Terminal, way: str) -> None:
    if way == "ctrl-c":
        terminal.type(CTRL_C)
    elif way == "sigterm":
        terminal.signal(signal.SIGTERM)
    else:
        terminal.hang_up()


def check_end(terminal: Terminal, home: Path, way: str, code: int = 130) -> None:
    """Soon, with its code, no p2pd left, and nothing on the screen that looks like a crash."""
    seen = len(terminal.look())
    stop(terminal, way)
    terminal.check_ends_soon(STOP_SECONDS_MAX)
    said = terminal.look()[seen:]
    assert terminal.code == code, said
    for word in ("Traceback", "Error", "died", "did not"):
        assert word not in said, said
    assert not daemons_of(home)


def loads_torch(pid: int) -> bool:
    """Not the moment before exec, in which it is still a copy of this process."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"\0node\0join\0" in command and "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("way", WAYS)
def test_while_it_imports(swarm: LocalSwarm, tmp_path: Path, way: str) -> None:
    with join(swarm.link, tmp_path) as terminal:
        terminal.wait_for("torch", lambda: loads_torch(terminal.pid))
        check_end(terminal, tmp_path, way)


def connected(server: socket.socket) -> bool:
    """Whether somebody waits to be accepted."""
    return bool(select.select([server], [], [], 0)[0])


@pytest.mark.parametrize("way", WAYS)
def test_while_it_downloads(swarm: LocalSwarm, tmp_path: Path, silent: socket.socket, way: str) -> None:
    link = another_run(swarm, tmp_path, RUN.replace("[data]", '[data]\ntokenizer = "somebody/something"'))
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
    with join(link, tmp_path, "--yes", environment=hub) as terminal:
        terminal.wait_for("download", lambda: connected(silent))
        check_end(terminal, tmp_path, way)


@pytest.mark.parametrize("way", WAYS)
def test_while_it_builds(swarm: LocalSwarm, tmp_path: Path, way: str) -> None:
    mark = tmp_path / "building"
    model = f'[model]\nfactory = "tests.system.slow_model:never"\nkwargs = {{ mark = "{mark}" }}\n'
    with join(
        another_run(swarm, tmp_path, model + RUN.replace('name = "stopping"\n', "")), tmp_path, *OURS
    ) as terminal:
        terminal.wait_for("building", mark.exists)
        check_end(terminal, tmp_path, way)


@pytest.mark.parametrize("way", WAYS)
def test_while_p2pd_starts(swarm: LocalSwarm, tmp_path: Path, silent: socket.socket, way: str) -> None:
    stranger = Identity.from_seed(bytes(32)).peer_id
    nobody = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{stranger}"
    link = another_run(swarm, tmp_path, RUN.replace("[BOOTSTRAP]", f'["{nobody}"]') + PLAIN_MODEL)
    with join(link, tmp_path, *OURS) as terminal:
        terminal.wait_for("p2pd", lambda: daemons_of(tmp_path))
        terminal.wait_for("its dial", lambda: connected(silent))
        check_end(terminal, tmp_path, way)


PACED = """
[model]
factory = "tests.system.paced_model:make"
[model.kwargs]
seconds = 0.8
[model.kwargs.config]
""" + TINY_MODEL.partition("[model.config]")[2]


@pytest.mark.nightly
@pytest.mark.parametrize("way", EVERY_WAY)
def test_while_it_trains_and_its_momentum_is_kept(swarm: LocalSwarm, tmp_path: Path, way: str) -> None:
    """In a forward pass of 0.8 s: a p2pd that heard the signal would be dead, and started again, when that is over."""
    link = another_run(swarm, tmp_path, RUN + PACED)
    folder = tmp_path / "runs" / Invite.parse(link).run_id.hex()[:16]
    steps = folder / "steps.jsonl"
    with join(link, tmp_path, *OURS) as terminal:
        terminal.wait_for("training", lambda: steps.exists() and steps.read_text().count("\n") > 1)
        assert daemons_of(tmp_path)
        check_end(terminal, tmp_path, way)
    assert (folder / "private.pt").exists()


@pytest.mark.long
def test_while_it_waits_for_votes_that_nobody_has(swarm: LocalSwarm, tmp_path: Path) -> None:
    link = another_run(swarm, tmp_path, RUN + PLAIN_MODEL)
    steps = tmp_path / "first" / "runs" / Invite.parse(link).run_id.hex()[:16] / "steps.jsonl"
    with join(link, tmp_path / "first", *OURS) as terminal:
        terminal.wait_for("training", lambda: steps.exists() and steps.read_text().count("\n") > 5)
        check_end(terminal, tmp_path / "first", "ctrl-c")
    with join(link, tmp_path / "second", *OURS) as terminal:
        terminal.wait_for("the log's votes", lambda: "payload missing" in terminal.look())
        check_end(terminal, tmp_path / "second", "ctrl-c")


@pytest.mark.parametrize("way", WAYS)
def test_a_relay(tmp_path: Path, way: str) -> None:
    with Terminal("node", "relay", "--home", str(tmp_path), "--listen", "127.0.0.1:0") as terminal:
        terminal.wait_for("serving", lambda: "serving" in terminal.look())
        assert daemons_of(tmp_path)
        check_end(terminal, tmp_path, way, code=0)


def test_a_relay_that_reaches_nobody_yet(tmp_path: Path, silent: socket.socket) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{Identity.from_seed(bytes(32)).peer_id}"
    at = ("--home", str(tmp_path), "--listen", "127.0.0.1:0", "--set", f"bootstrap={nobody}")
    with Terminal("node", "relay", *at) as terminal:
        terminal.wait_for("its dial", lambda: connected(silent))
        check_end(terminal, tmp_path, "ctrl-c", code=0)
