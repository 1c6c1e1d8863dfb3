"""Parts that both command-line programs share: logging, a locked home folder, errors as messages and exit codes."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import sys
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import IO, Any, Final, Protocol, TextIO, cast

import structlog
from structlog.typing import Processor

from protos.errors import OperatorError, StoppedError, SwarmentumError
from protos.process import EXIT_INTERRUPTED, STANDARD, end_beside_threads, keep_path_safe, leave, let_go
from protos.text import printable

ERROR_LINE_CHARACTERS_MAX = 4096


class Target(Protocol):
    """What log lines are written to."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


def configure_logging(
    *, as_json: bool, verbose: bool = False, target: Target | None = None, seen: Processor | None = None
) -> None:
    """Structured logs on stderr (JSON lines, or aligned text); stdout stays for results. Called by commands only.

    `target`: where the lines go instead of stderr. `seen` is a structlog processor that looks at each line's values.

    A traceback is plain text. structlog's default with rich prints the values of all local variables, too: private keys
    may be among them, and big ones hold the event loop up for many seconds.
    """
    colors = sys.stderr.isatty()
    console = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if seen is None else [seen]),
            *([structlog.processors.format_exc_info] if as_json else [_printable_values]),
            structlog.processors.JSONRenderer() if as_json else console,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, target or sys.stderr)),
        cache_logger_on_first_use=True,
    )


def _printable_values(_logger: Any, _method: str, values: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """For terminals: what others said may be in a value (JSON escapes by itself)."""
    for name, value in values.items():
        if isinstance(value, str):
            values[name] = printable(value, ERROR_LINE_CHARACTERS_MAX)
    return values


HOME_FORMAT: Final = 1
"""A version whose files an earlier one would delete or misread counts this up, and writes it into FORMAT_FILE of its homes."""
FORMAT_FILE: Final = "format"
HELD_SECONDS: Final = 0.1


def lock_home(home: Path, who: str) -> IO[str]:
    """Hold a home folder until the process ends, however it ends; OperatorError if another `who` has it, or a later version."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        file = (home / "lock").open("w")
    except OSError as error:
        raise OperatorError(f"--home {home}: cannot be written: {error.strerror}") from error
    try:
        if _is_held(file, fcntl.LOCK_EX):
            time.sleep(HELD_SECONDS)  # by a look of `home_is_held`, perhaps
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        held = isinstance(error, BlockingIOError)
        why = f"another {who} is using it; stop it or" if held else f"its disk locks no files ({error.strerror});"
        raise OperatorError(f"--home {home}: {why} choose another home") from error
    try:
        written = (home / FORMAT_FILE).read_text(errors="replace").strip()
    except OSError:
        return file  # there is none
    if written != str(HOME_FORMAT):
        file.close()
        raise OperatorError(
            f"--home {home}: a later version of swarmentum wrote it (format {printable(written, 16)}, this one knows "
            f"{HOME_FORMAT}), and this one would delete what it does not know: upgrade, or choose another home"
        )
    return file


def home_is_held(home: Path) -> bool:
    """Whether a process holds a home folder: one that starts or waits, too, which answers nobody."""
    try:
        with (home / "lock").open() as file:
            return _is_held(file, fcntl.LOCK_SH)
    except OSError:
        return False


def _is_held(file: IO[str], kind: int) -> bool:
    """Whether another open file has the lock; otherwise this one has it now."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


class _Output(io.FileIO):
    """stdout: what cannot be written, on a full disk for example, is one message, not a traceback."""

    def write(self, data: Any, /) -> Any:
        try:
            return super().write(data)
        except BrokenPipeError:  # `| head` has what it wanted
            raise
        except OSError as error:
            let_go((self.fileno(),))  # at its end the interpreter writes what is left
            raise SwarmentumError(f"the output cannot be written: {error.strerror}") from error


class _Log(io.FileIO):
    """stderr: a full disk, or a reader that has gone, ends no program that has work to do. What cannot be written is lost."""

    def write(self, data: Any, /) -> Any:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def _stand(given: TextIO | None, number: int, kind: type[io.FileIO], errors: str) -> TextIO:
    """A standard stream that writes to its descriptor; one that somebody put in its place stays."""
    if given is not None and given is not (sys.__stdout__, sys.__stderr__)[number - 1]:
        return given
    raw = kind(number, "w", closefd=False)
    encoding = "utf-8" if given is None else given.encoding
    unbuffered = getattr(given, "write_through", False)  # PYTHONUNBUFFERED of services and images
    by_line = number == 2 or raw.isatty() or unbuffered
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=by_line)


def stand_streams() -> None:
    """Make the standard streams ones that a program can go by, whatever it was started with.

    A descriptor that nobody gave leads nowhere: otherwise the next file that is opened gets its number, and what is printed.
    A character that the terminal's encoding does not have becomes `?`: an owner's name may hold any.
    """
    while (nowhere := os.open(os.devnull, os.O_RDWR)) in STANDARD:
        os.set_inheritable(nowhere, True)
    os.close(nowhere)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - for good
    sys.stdout = _stand(sys.stdout, 1, _Output, "replace")
    sys.stderr = _stand(sys.stderr, 2, _Log, "backslashreplace")


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        let_go((1,))  # at its end the interpreter writes what is left
        raise SystemExit(1) from None


def exit_with(command: Callable[[], None]) -> None:
    """Run a typer app; a SwarmentumError becomes one message on stderr and its exit code, Ctrl-C becomes 130.

    A process that it starts, or that a library starts for it, imports nothing from the working folder. gRPC writes no lines
    of its own between ours: its calls fail with what it has to say.
    """
    keep_path_safe()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    stand_streams()
    try:
        _carry_out(command)
    except SystemExit as ended:
        end_beside_threads(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise
    end_beside_threads(0)


def _carry_out(command: Callable[[], None]) -> None:
    try:
        try:
            command()
        finally:
            _flush()
    except StoppedError as error:
        print(error, file=sys.stderr, flush=True)
        leave()
    except SwarmentumError as error:
        lines = f"error: {error}".splitlines()  # what others said may be in it
        print("\n".join(printable(line, ERROR_LINE_CHARACTERS_MAX) for line in lines), file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except (MemoryError, RuntimeError) as error:
        if not (lacking := _lacking(error)):
            raise
        print(f"error: the system gives this program no more {lacking} of a container or a batch job", file=sys.stderr)
        raise SystemExit(1) from None


def _lacking(error: Exception) -> str:
    """What the system does not give, and whose limit it may be; empty for other errors."""
    if isinstance(error, MemoryError):
        return "memory: free some, or raise the limit (`ulimit -v`), or that"
    return "threads: raise the limit (`ulimit -u`), or that" if str(error) == "can't start new thread" else ""
