"""Where the operator's page of a home is: a file that the page writes, and that `swarmentum-coordinator web login` reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from protos.disk import replace_bytes, writing
from protos.errors import OperatorError

PLACE_FILE: Final = "operator-page.json"


class PageAddress:
    """The address of the page, in the home, while the page is served."""

    def __init__(self, home: Path) -> None:
        self._home, self._path = home, home / PLACE_FILE

    def write(self, url: str) -> None:
        """The page is at this address. Raises DiskError."""
        with writing(self._path):
            replace_bytes(self._path, json.dumps({"url": url, "pid": os.getpid()}).encode(), synced=False)

    def remove(self) -> None:
        """The page is served no more."""
        self._path.unlink(missing_ok=True)

    def read(self) -> str:
        """The address. OperatorError if there is no page."""
        try:
            values = json.loads(self._path.read_bytes())
            url, pid = str(values["url"]), int(values["pid"])
        except (OSError, ValueError, TypeError, KeyError):
            url, pid = "", 0
        if not url or not _lives(pid):
            raise OperatorError(
                f"the coordinator of {self._home} serves no operator's page: start it with "
                "`swarmentum-coordinator serve --operator-web-listen 127.0.0.1:7781`"
            )
        return url


def _lives(pid: int) -> bool:
    """Whether a process has this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's
    return True
