"""The runs that this home's key has made, in a file beside the journal. So the coordinator notices a new or older journal.

A coordinator with an empty journal would serve nothing, and tell its peers that their run is unknown. Refuses to guess which
journal is the right one. A coordinator with a shared database, which is backed up as a whole, does not use the file.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from protos.disk import check_no_folder, write_bytes
from protos.errors import OperatorError

NAME = "runs.json"
NAMED_MAX = 5


class KnownRuns:
    """One home's. Raises OperatorError for a damaged file."""

    def __init__(self, home: Path) -> None:
        self._path = home / NAME
        self._names: dict[str, str] = {}
        check_no_folder(self._path)
        if not self._path.exists():
            return
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise OperatorError(f"{self._path} cannot be read: {error}; delete it, it is written again") from error
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values.values()):
            raise OperatorError(f"{self._path} is not a list of runs; delete it, it is written again")
        self._names = values

    def check(self, journal: str, there: Collection[bytes]) -> None:
        """Raises OperatorError if the journal lacks runs that were made here."""
        found = {run_id.hex() for run_id in there}
        missing = [f"{name} ({run_id[:16]})" for run_id, name in self._names.items() if run_id not in found]
        if missing:
            named = ", ".join(missing[:NAMED_MAX]) + (" ..." if len(missing) > NAMED_MAX else "")
            raise OperatorError(
                f"the journal {journal} does not have {len(missing)} of the runs that were made here: {named}. Restore it, "
                f"with its -wal file if there is one. To give these runs up for ever, delete {self._path}"
            )

    def add(self, run_id: bytes, name: str) -> None:
        """Add a run; the disk has it on return."""
        if self._names.get(run_id.hex()) == name:
            return
        self._names[run_id.hex()] = name
        write_bytes(self._path, json.dumps(self._names, indent=1).encode())
