"""The supervisor keeps the overlay process running: it starts the process, reads its frames, and starts it again after its end.

A process that falls silent is ended and started again, too. The supervisor hands everything on as values through `put`, which
may refuse a value. The supervisor does not know the meaning of a message.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from node.watch.frames import MESSAGE, STATUS, FrameReader
from node.watch.net import CHUNK_BYTES, EXIT_NO_LIBP2P
from protos.safe_path import python_command
from protos.waits import Waits

RESTARTS_MAX = 100
RESTART_SECONDS_MIN = 0.2
RESTART_SECONDS_MAX = 30.0
STEADY_SECONDS = 60.0  # a process that lived this long starts again at once
SILENCE_SECONDS_MAX = 20.0  # the process reports every second
STOP_SECONDS_MAX = 3.0
WAKE_SECONDS = 0.2
LAST_WORDS_BYTES_MAX = 4096


@dataclass(frozen=True)
class Gossiped:
    """A message of the topic, as it came; None and the message's size if it was beyond the gossip limit."""

    data: bytes | None
    size: int


@dataclass(frozen=True)
class OverlayStatus:
    """`peers`: connected subscribers of the topic. `problem`: why the process ended, empty while it runs."""

    peers: int
    restarts: int
    problem: str = ""
    fatal: bool = False


class Overlay(threading.Thread):
    """The supervisor. `put` takes the values above, and returns whether it took the value."""

    def __init__(self, topic: str, put: Callable[[Gossiped | OverlayStatus], bool]) -> None:
        super().__init__(name="overlay", daemon=True)
        self.restarts = 0
        self.lost = 0
        self._topic = topic
        self._put = put
        self._addresses: tuple[str, ...] = ()
        self._stopping = threading.Event()
        self._last_words = b""

    def dial(self, addresses: tuple[str, ...]) -> None:
        """Set the peers to connect to; this list replaces the last one."""
        self._addresses = addresses

    def stop(self) -> None:
        """End the process and this thread, in bounded time."""
        self._stopping.set()
        self.join(2 * STOP_SECONDS_MAX)

    def run(self) -> None:
        """Start, serve, start again. Gives up after RESTARTS_MAX restarts."""
        waits = Waits(RESTART_SECONDS_MIN, RESTART_SECONDS_MAX)
        while not self._stopping.is_set():
            started = time.monotonic()
            code = self._one_life()
            if self._stopping.is_set():
                return
            fatal = code == EXIT_NO_LIBP2P or self.restarts >= RESTARTS_MAX
            words = self._last_words.decode(errors="replace").strip().rpartition("\n")[2]
            self._put(OverlayStatus(0, self.restarts, words or f"the overlay process ended with code {code}", fatal))
            if fatal:
                return
            self.restarts += 1
            if time.monotonic() - started > STEADY_SECONDS:
                waits.reset()
            self._stopping.wait(waits.next())

    def _one_life(self) -> int:
        """Run one process from start to end. Returns its exit code."""
        command = python_command("-m", "node.watch.net")
        pipe = subprocess.PIPE
        self._last_words = b""
        try:
            # The process has a group of its own, so Ctrl-C in the terminal reaches only the watcher.
            child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0)
        except OSError as error:
            self._last_words = f"the overlay process does not start: {error}".encode()
            return 1
        with child:
            assert child.stdin is not None
            try:
                os.set_blocking(child.stdin.fileno(), False)
                self._serve(child)
                child.stdin.close()  # tells the process to end
                return child.wait(STOP_SECONDS_MAX)
            except (OSError, ValueError, subprocess.TimeoutExpired) as error:
                # The process does not read, does not end, or writes no valid frame.
                self._last_words = f"the overlay process is stuck: {error}".encode()
                child.kill()
                return child.wait(STOP_SECONDS_MAX)

    def _serve(self, child: subprocess.Popen[bytes]) -> None:
        """Pass on the process's frames until it ends. Raises TimeoutExpired if the process is silent for too long."""
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        self._write(child.stdin.fileno(), {"topic": self._topic})
        told: tuple[str, ...] = ()
        heard = time.monotonic()
        reader = FrameReader()
        with selectors.DefaultSelector() as ready:
            ready.register(child.stdout, selectors.EVENT_READ)
            ready.register(child.stderr, selectors.EVENT_READ)
            while not self._stopping.is_set():
                if told != self._addresses:
                    told = self._addresses
                    self._write(child.stdin.fileno(), {"dial": told})
                for key, _ in ready.select(WAKE_SECONDS):
                    chunk = os.read(key.fd, CHUNK_BYTES)
                    if not chunk:
                        ready.unregister(key.fileobj)
                    elif key.fileobj is child.stderr:
                        self._last_words = (self._last_words + chunk)[-LAST_WORDS_BYTES_MAX:]
                    else:
                        heard = time.monotonic()
                        self._hand_on(reader.feed(chunk))
                if not ready.get_map():
                    return
                if time.monotonic() - heard > SILENCE_SECONDS_MAX:
                    raise subprocess.TimeoutExpired(child.args, SILENCE_SECONDS_MAX)

    def _write(self, descriptor: int, message: dict[str, object]) -> None:
        """Write a short line into the pipe. BlockingIOError (an OSError) means that the process does not read the pipe."""
        line = json.dumps(message).encode() + b"\n"
        if os.write(descriptor, line) != len(line):
            raise BlockingIOError("the pipe is full")

    def _hand_on(self, frames: list[tuple[bytes, bytes]]) -> None:
        for kind, body in frames:
            if kind == STATUS:
                self._put(OverlayStatus(int(body), self.restarts))
            elif not self._put(Gossiped(body, len(body)) if kind == MESSAGE else Gossiped(None, int(body))):
                self.lost += 1  # gossip is best effort: the watcher asks for missing entries
