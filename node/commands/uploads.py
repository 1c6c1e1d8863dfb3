"""Uploads of a series of exports to the hub, on a thread of their own: the program follows its run meanwhile.

Refuses to queue: if exports come faster than the hub takes them, only the newest one waits. An upload that fails costs a line
of the log, and the next one is tried.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.commands import hugging_face
from protos.errors import SwarmentumError


class Uploads:
    """To one repository. `done` gets the folder, step and address of each upload, on the thread."""

    def __init__(self, repo_id: str, done: Callable[[Path, int, str], None], log: Any, *, public: bool) -> None:
        self._repo_id, self._public, self._done, self._log = repo_id, public, done, log
        self._changed = threading.Condition()
        self._waiting: tuple[Path, int] | None = None
        self._over = False
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        self._thread.start()

    def put(self, path: Path, step: int) -> None:
        """An export is there. Returns at once."""
        with self._changed:
            self._waiting = path, step
            self._changed.notify()

    def close(self) -> None:
        """Upload what waits, and end."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._waiting is not None)
                if self._waiting is None:
                    return
                (path, step), self._waiting = self._waiting, None
            try:
                self._done(path, step, hugging_face.push(path, self._repo_id, public=self._public))
            except SwarmentumError as error:
                self._log.warning("the export is not on the hub", step=step, why=str(error))
