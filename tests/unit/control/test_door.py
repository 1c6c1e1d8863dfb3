"""The control door of a peer: real sockets, its file, and callers that have no right to it."""

import json
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from node.control.control_server import CALLERS_MAX, DOOR_FILE, REQUEST_BYTES_MAX, ControlServer, call
from protos.console import lock_home
from protos.errors import NetworkError, OperatorError


def greet(request: Mapping[str, Any]) -> dict[str, Any]:
    if "name" not in request:
        raise ValueError("say a name")
    return {"hello": request["name"]}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    door = ControlServer(tmp_path, {"greet": greet, "stumble": lambda _: {"result": 1 // 0}})
    yield tmp_path
    door.close()
    assert not (tmp_path / DOOR_FILE).exists()


def raw(home: Path, line: bytes) -> dict[str, Any]:
    port = json.loads((home / DOOR_FILE).read_text())["port"]
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(line)
        with connection.makefile("rb") as answers:
            answer: dict[str, Any] = json.loads(answers.readline())
    return answer


def test_a_command_is_answered_and_a_wrong_value_is_told(home: Path) -> None:
    assert call(home, "greet", name="Ada") == {"hello": "Ada"}
    with pytest.raises(OperatorError, match="say a name"):
        call(home, "greet")
    with pytest.raises(OperatorError, match="knows no command 'dance'; it knows greet, stumble"):
        call(home, "dance")


def test_only_who_can_read_the_home_is_answered(home: Path) -> None:
    file = home / DOOR_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "secret" in raw(home, b'{"command": "greet", "name": "Eve"}\n')["error"]
    assert "secret" in raw(home, b'{"command": "greet", "name": "Eve", "secret": 7}\n')["error"]
    assert (
        "secret"
        in raw(home, json.dumps({"command": "greet", "name": "Eve", "secret": "0" * 64}).encode() + b"\n")["error"]
    )


@pytest.mark.parametrize("line", [b"\n", b"{\n", b"[]\n", b"\xff\xfe\n", b"x" * (REQUEST_BYTES_MAX + 10) + b"\n"])
def test_what_is_no_request_is_told_so_and_the_door_goes_on(home: Path, line: bytes) -> None:
    assert "error" in raw(home, line)
    assert call(home, "greet", name="Ada") == {"hello": "Ada"}


def test_callers_that_hang_up_do_not_hold_the_door(home: Path) -> None:
    port = json.loads((home / DOOR_FILE).read_text())["port"]
    for _ in range(50):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    assert call(home, "greet", name="Ada") == {"hello": "Ada"}


def test_callers_that_trickle_or_say_nothing_do_not_lock_the_owner_out(home: Path) -> None:
    port = json.loads((home / DOOR_FILE).read_text())["port"]
    idle = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(5 * CALLERS_MAX)]
    try:
        for connection in idle[-CALLERS_MAX:]:
            connection.sendall(b"{")
        assert call(home, "greet", name="Ada") == {"hello": "Ada"}
        assert idle[0].recv(1) == b"", "the oldest caller lost its place"
    finally:
        for connection in idle:
            connection.close()


def test_a_request_that_comes_byte_by_byte_is_ended(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.control.control_server.REQUEST_SECONDS_MAX", 0.3)
    port = json.loads((home / DOOR_FILE).read_text())["port"]
    ended = False
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.settimeout(0.02)
        for _ in range(1000):  # each byte in time, the whole never
            try:
                connection.sendall(b" ")
                ended = connection.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
            if ended:
                break
    assert ended
    assert call(home, "greet", name="Ada") == {"hello": "Ada"}


def test_a_bug_behind_the_door_is_in_the_log(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NetworkError, match="closed the call"):
        call(home, "stumble")
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert call(home, "greet", name="Ada") == {"hello": "Ada"}


def test_without_a_peer_the_person_is_told_what_to_do(tmp_path: Path) -> None:
    with lock_home(tmp_path, "peer"), pytest.raises(NetworkError, match=r"takes no commands now: .*its full disk"):
        call(tmp_path, "greet")
    with pytest.raises(NetworkError, match=r"no peer runs with the home .*swarmentum join"):
        call(tmp_path, "greet")
    (tmp_path / DOOR_FILE).write_text("{")
    with pytest.raises(OperatorError, match="start the peer again"):
        call(tmp_path, "greet")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / DOOR_FILE).write_text(json.dumps({"port": port, "secret": "s"}))
    with pytest.raises(NetworkError, match="does not answer"):
        call(tmp_path, "greet")


def test_a_file_that_the_disk_keeps_ends_no_stop(tmp_path: Path) -> None:
    """A disk that has become read-only ended its peer by a traceback in place of the reason."""
    door = ControlServer(tmp_path, {"greet": greet})
    (tmp_path / DOOR_FILE).unlink()
    (tmp_path / DOOR_FILE / "kept").mkdir(parents=True)  # as root, a disk that is written to can refuse it only so
    door.close()
    assert (tmp_path / DOOR_FILE / "kept").is_dir()
