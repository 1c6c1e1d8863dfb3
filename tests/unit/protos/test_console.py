"""What a command logs of an error of ours: its traceback, and nothing of what the variables hold. And what it prints to streams
that are full, closed, or know no umlauts."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from protos.console import FORMAT_FILE, HOME_FORMAT, configure_logging, lock_home
from protos.errors import OperatorError


@pytest.fixture
def _logging() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("_logging")
@pytest.mark.parametrize("as_json", [False, True])
def test_a_traceback_shows_no_values(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    def open_door(private_key: str) -> None:
        raise TypeError("of our own")

    configure_logging(as_json=as_json)
    try:
        open_door("do not " + "print this")
    except TypeError as error:
        structlog.get_logger("swarm").error("the network side failed", exc_info=error)
    said = capsys.readouterr().err
    assert "in open_door" in said
    assert "TypeError: of our own" in said
    assert "do not print this" not in said
    assert not as_json or "in open_door" in json.loads(said)["exception"]


def _program(body: str, redirected: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys\nfrom protos.console import exit_with\ndef command():\n    {body}\nexit_with(command)"
    shell = ["/bin/bash", "-c", f'exec "$0" -c "$1" {redirected}', sys.executable, program]
    return subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=270, check=False)


def test_a_name_that_the_terminal_cannot_show_ends_no_command() -> None:
    done = _program("print('Jörg')", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "J?rg\n"), done.stderr


def test_output_that_a_full_disk_does_not_take_is_one_message() -> None:
    for body in ("print('figures')", "print('figures', flush=True)"):
        done = _program(body, ">/dev/full")
        assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")


def test_a_log_on_a_full_disk_ends_no_work() -> None:
    done = _program("[print('step', file=sys.stderr, flush=True) for _ in range(3)]; print('trained')", "2>/dev/full")
    assert (done.returncode, done.stdout) == (0, "trained\n")


def test_a_file_never_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    file = tmp_path / "momentum"
    opened = f"import os; file = open({str(file)!r}, 'wb', buffering=0); file.write(b'kept')"
    printed = "os.write(1, b'a library'); os.write(2, b'another'); print('a log line', file=sys.stderr)"
    assert _program(f"{opened}; {printed}", "<&- >&- 2>&-").returncode == 0
    assert file.read_bytes() == b"kept"


def test_a_reader_that_has_gone_sees_no_traceback() -> None:
    for lines in (1, 100_000):
        body = f"import time, typer; time.sleep(0.5); typer.run(lambda: print('line\\n' * {lines}))"
        done = _program(body, "> >(true)")
        assert (done.returncode, done.stderr) == (1, "")


def test_unbuffered_output_comes_by_line() -> None:
    """Services and images set PYTHONUNBUFFERED: their logs have each line at once."""
    done = _program("import os; print('a line'); os._exit(0)", PYTHONUNBUFFERED="1")
    assert (done.returncode, done.stdout) == (0, "a line\n"), done.stderr


def test_a_home_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    """A store deletes files that it does not know: a start of an earlier version took the states of a later one."""
    lock_home(tmp_path, "peer").close()
    (tmp_path / FORMAT_FILE).write_text(f"{HOME_FORMAT}\n")
    lock_home(tmp_path, "peer").close()
    (tmp_path / FORMAT_FILE).write_text(f"{HOME_FORMAT + 1}\n")
    for _ in range(2):
        with pytest.raises(OperatorError, match=r"a later version.*format 2, this one knows 1.*upgrade"):
            lock_home(tmp_path, "peer")


def test_a_disk_without_locks_is_not_another_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre without -o flock, NFS without its lock daemon: the error named a peer that there is not."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    held = lock_home(tmp_path, "peer")
    with pytest.raises(OperatorError, match="another peer is using it"):
        lock_home(tmp_path, "peer")
    held.close()
    monkeypatch.setattr("fcntl.flock", refused)
    with pytest.raises(OperatorError, match=r"its disk locks no files \(No locks available\); choose another home"):
        lock_home(tmp_path, "peer")


@pytest.mark.parametrize(
    ("work", "lacking"),
    [("bytes(2**40)", "memory"), ("threading.stack_size(2**30); threading.Thread(target=int).start()", "threads")],
)
def test_a_limit_of_the_system_is_said_in_words(work: str, lacking: str) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))"
    done = _program(f"import resource, threading; {limit}; {work}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: the system gives this program no more {lacking}: "), done.stderr
    assert done.stderr.count("\n") == 1
