"""A peer whose disk is full: it leaves the run, says so, waits for room, and takes part again. No file is lost.

Files are there whole or not at all (`protos/disk.py`), so this is the way back of a peer that was killed. Refuses to wait for
anything but room: another error of a disk ends the program.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from protos.clocks import Waits
from protos.disk import FULL
from protos.errors import SwarmentumError

T = TypeVar("T")

ROOM_BYTES_MIN: Final = 64 << 20
"""With less, the next payloads or snapshot would fill the disk again at once."""
LOOK_SECONDS: Final = 5.0
LOOK_SECONDS_MAX: Final = 60.0
SAY_AGAIN_SECONDS: Final = 600.0


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk, or a quota that is used up, caused this error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def outlasting(
    take_part: Callable[[bool], T],
    home: Path,
    log: Any,
    metrics_listen: str | None,
    leaves: Callable[[], bool] = lambda: False,
) -> T:
    """`take_part`, again after each full disk. It hears whether this is the first time. Other errors go through.

    `leaves`: whether the owner wants this peer to end. Such a peer does not wait for room.
    """
    first = True
    while True:
        try:
            return take_part(first)
        except (OSError, SwarmentumError) as error:
            if leaves() or not is_full(error):
                raise
            why = str(error)
        first = False
        _wait(home, log, why, metrics_listen)


def _wait(home: Path, log: Any, why: str, metrics_listen: str | None) -> None:
    """Until there is room. A quota shows none, so this tries again after LOOK_SECONDS_MAX at most once a minute."""
    began, said, looks = time.monotonic(), 0.0, Waits(LOOK_SECONDS, LOOK_SECONDS_MAX)
    with _metric(metrics_listen, log):
        while True:
            free, now = shutil.disk_usage(home).free, time.monotonic()
            if not said or now - said > SAY_AGAIN_SECONDS:
                said = now
                log.error(
                    "the disk is full: this peer is out of the run, and takes part again when there is room",
                    home=str(home), free_bytes=free, needed_bytes=ROOM_BYTES_MIN, why=why,
                )  # fmt: skip
            time.sleep(looks.next())
            if shutil.disk_usage(home).free >= ROOM_BYTES_MIN:
                break
    log.warning("the disk has room again; taking part", seconds=round(time.monotonic() - began))


@contextmanager
def _metric(listen: str | None, log: Any) -> Iterator[None]:
    """Serve the one metric of a peer that waits for room, at the address of its metrics."""
    if listen is None:
        yield
        return
    registry = CollectorRegistry()
    Gauge("swarmentum_disk_full", "1: this peer waits for room on its disk", registry=registry).set(1)
    host, _, port = listen.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry=registry)
    except OSError as error:
        log.warning("no metrics while the disk is full", listen=listen, why=error.strerror)
        yield
        return
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
