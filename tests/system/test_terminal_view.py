"""The terminal view of a real peer and of a real run, on a real terminal: what it shows, its keys, and how it ends.

A child that draws, a peer that trains: whatever ends one of them, the terminal is as it was, and nothing is left running.
"""

import os
import platform
import re
import secrets
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from node.control.control_server import call
from protos.invite import Invite
from tests.system.local_swarm import TINY_MODEL, LocalSwarm, processes_with, toml_of_run, wait_for
from tests.system.terminal import CTRL_C, Terminal, daemons_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

STOP_SECONDS_MAX = 20.0
SIZE = (80, 24)
VIEW = "node.terminal.peer_view"
WRITE = {"aarch64": "64"}.get(platform.machine(), "1")
"""The kernel's number of `write`."""
# One way to end it stands for all; `make nightly` tries each.
WAYS = ("ctrl-c", *(pytest.param(way, marks=pytest.mark.nightly) for way in ("q", "sigterm", "hang-up")))
MODEL = """
[model]
factory = "tests.system.paced_model:make"
[model.kwargs]
seconds = 0.2
[model.kwargs.config]
""" + TINY_MODEL.partition("[model.config]")[2]  # fmt: skip


def run_of(steps: int, name: str = "seen") -> str:
    return toml_of_run(name, MODEL, clock={"steps": steps, "batch_samples": 4})


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    swarm = LocalSwarm(tmp_path_factory.mktemp("seen"), run_of(1000000))
    yield swarm
    swarm.close()


def another_run(swarm: LocalSwarm, tmp_path: Path, steps: int) -> str:
    """The link of one more run on the swarm's coordinator."""
    file = tmp_path / "another.toml"
    file.write_text(run_of(steps, f"seen-{secrets.token_hex(4)}"))
    flags = ("--home", swarm.home, "--json", "--no-layout")
    create = swarm.start("another", "coordinator", "run", "create", str(file), *flags)
    link: str = create.first_json()["invite"]
    create.finish()
    return link


def join(link: str, home: Path, *flags: str, size: tuple[int, int] | None = SIZE, in_shell: bool = False) -> Terminal:
    at = ("--home", str(home), "--listen", "127.0.0.1:0", "--threads", "1", "--allow-code", "--yes")
    return Terminal("node", "join", link, *at, *flags, size=size, in_shell=in_shell)


def view_of(home: Path) -> list[int]:
    """The processes that draw."""
    lines = {it.pid: it.info["cmdline"] or [] for it in psutil.process_iter(["cmdline"])}
    return [pid for pid, words in lines.items() if VIEW in words and str(home) in words]


def writes(pid: int) -> bool:
    """Whether a thread of the process waits for its window to take what it writes. Kernels differ in the name of the wait."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    waiting = [task for task in tasks if re.search("write|wait_woken", (task / "wchan").read_text())]
    return any((task / "syscall").read_text().split()[0] == WRITE for task in waiting)


def check_end(terminal: Terminal, home: Path, code: int) -> str:
    """Soon, with its code; the terminal as it was, no process left, and the words after the view. Gives these words."""
    terminal.check_ends_soon(STOP_SECONDS_MAX)
    shown = terminal.look()
    assert terminal.code == code, shown[-2000:]
    assert not daemons_of(home)
    assert not view_of(home)
    assert not processes_with(f"--home {home}")
    for word in ("Traceback", "Error", "died", "did not"):
        assert word not in shown, shown[-2000:]
    assert "\x1b[?1049h" in shown
    after = shown.rpartition("\x1b[?1049l")[2]
    for mode in ("?1049h", "?25l", "?1000h"):
        assert f"\x1b[{mode}" not in after, "a mode of the view is left on"
    return after


@pytest.fixture
def short_home() -> Iterator[Path]:
    """A home whose path fits into a row of the view."""
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        yield Path(folder)


def test_a_peer_is_seen_at_work_and_finishes(swarm: LocalSwarm, short_home: Path) -> None:
    """The keys, the log's file, and the thanks at the end."""
    with join(swarm.link, short_home) as terminal:
        before = terminal.modes()
        terminal.wait_for("standing", lambda: terminal.shows(" state    counted"))
        terminal.wait_for("steps", lambda: terminal.shows("accepted, 4 of 4 samples"))
        rows: list[str] = []

        def whole() -> bool:
            """The last row is drawn last: a frame without it is half of one."""
            rows[:] = terminal.rows()
            return " p Pause / go on  f Finish, then leave  q Quit  ? Help" in rows[-1]

        terminal.wait_for("a whole frame", whole)
        assert re.match(r" seen +step \d+ of 1,000,000$", rows[0]), rows[0]
        assert any(row.startswith(" device   cpu, ") and " busy, " in row for row in rows)
        assert any(re.search(r"^ given .* tokens, .* 100 % of the swarm", row) for row in rows)
        assert any(row.rstrip() == f" log: {short_home}/peer.log" for row in rows)
        terminal.type(b"p")
        terminal.wait_for("pause", lambda: terminal.shows(" state    paused"))
        assert call(short_home, "me")["paused"]
        log = short_home / "peer.log"  # the view shows the wish at once; the peer follows it between two steps
        terminal.wait_for("the peer's pause", lambda: "paused by its owner" in log.read_text())
        terminal.type(b"p")
        terminal.wait_for("work", lambda: terminal.shows(" state    counted"))
        terminal.type(b"?")
        terminal.wait_for("help", lambda: terminal.shows("Any key closes this help."))
        terminal.type(b"x")
        terminal.wait_for("no help", lambda: not terminal.shows("Any key closes this help."))
        terminal.type(b"f")
        after = check_end(terminal, short_home, 0)
        assert terminal.modes() == before
    assert re.search(r"step \d+, state digest [0-9a-f]{16}\r\n", after), after
    assert re.search(r"Thank you for .* tokens in \d+ steps, 100 % of the\s+swarm's work, with", after), after
    assert "taking part" in log.read_text()
    assert "\x1b" not in log.read_text()
    assert "taking part" not in after


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_end_it_is_quiet(swarm: LocalSwarm, tmp_path: Path, way: str) -> None:
    link = another_run(swarm, tmp_path, 1000000)
    folder = tmp_path / "runs" / Invite.parse(link).run_id.hex()[:16]
    with join(link, tmp_path) as terminal:
        before = terminal.modes()
        terminal.wait_for("standing", lambda: terminal.shows(" state    counted"))
        if way == "hang-up":
            terminal.hang_up()
            terminal.check_ends_soon(STOP_SECONDS_MAX)
            assert terminal.code == 130
            assert not view_of(tmp_path)
            assert not daemons_of(tmp_path)
        else:
            keys = {"ctrl-c": CTRL_C, "q": b"q"}
            if way == "sigterm":
                terminal.signal(signal.SIGTERM)
            else:
                terminal.type(keys[way])
            after = check_end(terminal, tmp_path, 0 if way == "q" else 130)
            assert "Thank you" in after
            assert terminal.modes() == before
    assert (folder / "private.pt").exists()


@pytest.mark.nightly
def test_a_view_that_is_killed_costs_the_peer_nothing(swarm: LocalSwarm, tmp_path: Path) -> None:
    with join(another_run(swarm, tmp_path, 1000000), tmp_path) as terminal:
        before = terminal.modes()
        terminal.wait_for("standing", lambda: terminal.shows(" state    counted"))
        step = call(tmp_path, "me")["step"]
        [view] = view_of(tmp_path)
        os.kill(view, signal.SIGKILL)
        terminal.wait_for("plain lines", lambda: "the terminal view has ended (exit code -9)" in terminal.look())
        terminal.wait_for("steps", lambda: call(tmp_path, "me")["step"] > step + 2)
        assert terminal.modes() == before
        assert call(tmp_path, "me")["log_file"] is None
        terminal.type(CTRL_C)
        check_end(terminal, tmp_path, 130)


@pytest.mark.nightly
def test_a_peer_that_is_killed_leaves_the_terminal_in_order(swarm: LocalSwarm, tmp_path: Path) -> None:
    with join(another_run(swarm, tmp_path, 1000000), tmp_path, in_shell=True) as terminal:
        before = terminal.modes()
        terminal.wait_for("standing", lambda: terminal.shows(" state    counted"))
        os.kill(terminal.child, signal.SIGKILL)
        wait_for("end of the view", lambda: not view_of(tmp_path))
        assert terminal.modes() == before
        after = terminal.look().rpartition("\x1b[?1049h")[2]
        assert "\x1b[?1049l" in after
        assert "\x1b[?25h" in after


@pytest.mark.nightly
def test_a_window_that_takes_no_output_holds_up_nothing(swarm: LocalSwarm, tmp_path: Path) -> None:
    """Ctrl-S, or a `screen` that is stopped: nobody reads what the view writes."""
    with join(another_run(swarm, tmp_path, 1000000), tmp_path) as terminal:
        terminal.wait_for("standing", lambda: terminal.shows(" state    counted"))
        wait_for("a full window", lambda: any(map(writes, view_of(tmp_path))))
        step = call(tmp_path, "me")["step"]
        wait_for("steps", lambda: call(tmp_path, "me")["step"] > step + 5)
        os.kill(terminal.pid, signal.SIGTERM)

        def ended() -> bool:
            """Without a look at the window."""
            pid, status = os.waitpid(terminal.pid, os.WNOHANG)
            if pid:
                terminal.code = os.waitstatus_to_exitcode(status)
            return bool(pid)

        wait_for("end", ended)
        assert terminal.code == 130
        assert not view_of(tmp_path)


@pytest.mark.nightly
def test_plain_lines_where_they_are_asked_for_and_where_there_is_no_window(swarm: LocalSwarm, tmp_path: Path) -> None:
    link = another_run(swarm, tmp_path, 1000000)  # in the first one, nobody has the state of its steps any more
    for flags, size in ((("--plain",), SIZE), ((), None)):
        with join(link, tmp_path, *flags, size=size) as terminal:
            terminal.wait_for("lines", lambda terminal=terminal: "taking part" in terminal.look())
            assert not view_of(tmp_path)
            assert "\x1b[?1049h" not in terminal.look()
            terminal.type(CTRL_C)
            terminal.check_ends_soon(STOP_SECONDS_MAX)
            assert terminal.code == 130
    assert not (tmp_path / "peer.log").exists()


@pytest.mark.long
def test_a_run_is_seen_from_outside_until_it_is_finished(swarm: LocalSwarm, tmp_path: Path) -> None:
    link = another_run(swarm, tmp_path, 40)
    with Terminal("node", "status", link, "--watch", size=SIZE) as terminal:
        before = terminal.modes()
        terminal.wait_for("line", lambda: terminal.shows("0 peers"))
        terminal.type(CTRL_C)
        terminal.check_ends_soon(STOP_SECONDS_MAX)
        assert terminal.code == 130
        assert terminal.modes() == before
    lines = swarm.start("lines", "node", "status", link, "--watch", "--json")
    with join(link, tmp_path, "--plain") as peer:
        peer.wait_end()
    code, last = lines.finish()
    assert code == 0
    assert (last["phase"], last["step"]) == ("finished", 40)
