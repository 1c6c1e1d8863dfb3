"""Archives in other places: the copies that `swarmentum mirror` makes, and that `swarmentum verify ADDRESS` reads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from protos.errors import OperatorError
from protos.text import print_json

if TYPE_CHECKING:
    from node.mirror.archive_copy import Told

T = TypeVar("T")


@contextmanager
def archive_at(run: str, into: Path | None) -> Iterator[Path]:
    """The folder of an archive; a copy of it where `run` is an address. `into`: the folder of the copy, which stays."""
    from node.mirror.archive_copy import fetch

    if "://" not in run:
        if into is not None:
            raise OperatorError(
                f"--into {into}: {run} is a folder of this machine, and nothing is copied; leave --into out"
            )
        yield Path(run)
        return
    with tempfile.TemporaryDirectory(prefix="swarmentum-verify-") as own:
        folder = into or Path(own) / "archive"  # beside it there is no model of somebody else
        _with_progress(f"copying {run}", lambda told: fetch(run, folder, told))
        yield folder


def copy_archive(run: Path, address: str, *, as_json: bool) -> None:
    """Copy the archive in or at `run`, and say how to verify it there."""
    from node.archive.files import find
    from node.mirror.archive_copy import copy_to

    folder = find(run)
    index = _with_progress(f"copying {folder}", lambda told: copy_to(folder, address, told))
    if as_json:
        print_json({"address": address, "files": len(index.files), "bytes": index.total_bytes})
    else:
        print(
            f"{len(index.files)} files, {index.total_bytes} bytes. Anybody verifies it with: swarmentum verify {address}"
        )


def _with_progress(what: str, work: Callable[[Told], T]) -> T:
    """What `work` returns; a bar on stderr meanwhile."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as progress:
        task = progress.add_task(what, total=None)
        return work(lambda done, of: progress.update(task, completed=done, total=of))
