"""The door to the Hugging Face hub: an export goes there, a model comes from there. Errors in plain words.

Refuses to write to a repository that is not an export of the same run. Sends an export's own files, and none that others put
beside them. The token and
the address are the library's own: HF_TOKEN or `hf auth login`, and HF_ENDPOINT.
"""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.export.card import MARK, MARK_BYTES_MAX, files_of
from node.imports import slowly
from protos.errors import NetworkError, OperatorError, RefusedError, SwarmentumError

REVISION_MARK: Final = "@"
WEIGHT_PATTERNS: Final = ("*.safetensors", "*.safetensors.index.json")
EMPTY: Final = frozenset({".gitattributes", "README.md"})
"""Files of a repository that nobody has put a model into yet."""


@dataclass(frozen=True)
class HubModel:
    """A model of the hub on this disk. `revision`: the commit, 40 hex digits."""

    repo_id: str
    revision: str
    folder: Path


def facts_of(folder: Path) -> dict[str, Any]:
    """The facts of an export. Raises OperatorError for a folder that is none."""
    try:
        facts = json.loads((folder / MARK).read_bytes()[:MARK_BYTES_MAX])
        return {**facts, "run_id": str(facts["run_id"])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise OperatorError(f"{folder} is not an export of this program: it has no {MARK} that names a run") from error


def check(repo_id: str, run_id: str) -> None:
    """Raises if an export of this run cannot go there: no token, no network, a name that other work has. Writes nothing."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import RepositoryNotFoundError

    with _plain(repo_id):
        api = HfApi()
        api.whoami()
        try:
            info = api.model_info(repo_id)
        except RepositoryNotFoundError:
            return
        files = {it.rfilename for it in info.siblings or ()}
        if MARK not in files:
            if files <= EMPTY:
                return
            raise OperatorError(f"{repo_id}: this name is taken by something that is no export; choose another name")
        there = facts_of(Path(hf_hub_download(repo_id, MARK, revision=info.sha)).parent)
    if there["run_id"] != run_id:
        raise OperatorError(
            f"{repo_id}: this name is taken by the export of another run ({there['run_id'][:16]}); choose another name"
        )


def push(folder: Path, repo_id: str, *, public: bool) -> str:
    """Upload an export as one commit; its address. A repository that is new is private unless `public`.

    The hub keeps what an upload that broke off has sent: `upload_line` sends the rest.
    """
    from huggingface_hub import HfApi

    facts = facts_of(folder)
    check(repo_id, facts["run_id"])
    with _plain(repo_id, folder):
        api = HfApi()
        api.create_repo(repo_id, private=not public, exist_ok=True)
        made = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            allow_patterns=files_of(folder),
            commit_message=f"Step {facts.get('steps')} of run {facts['run_id'][:16]}",
            commit_description=f"State digest {facts.get('state_digest')}",
            delete_patterns=list(WEIGHT_PATTERNS),  # of an earlier export in more files
        )
    return str(made.commit_url)


def upload_line(folder: Path, repo_id: str) -> str:
    """The hub's own command that does the same. `--delete`: weights of an earlier export in more files."""
    return f"hf upload {shlex.quote(repo_id)} {shlex.quote(str(folder))} . --private --delete '{WEIGHT_PATTERNS[0]}'"


def is_hub_id(model: str) -> bool:
    """Whether this names a model of the hub (`owner/name`, or `owner/name@revision`), and nothing on this disk."""
    name = model.partition(REVISION_MARK)[0]
    return not Path(model).exists() and name.count("/") == 1 and not name.startswith((".", "/", "~"))


def download(model: str) -> HubModel:
    """The weights of a model of the hub, at the revision that it names, or the newest one of now."""
    from huggingface_hub import HfApi, snapshot_download

    repo_id, _, wanted = model.partition(REVISION_MARK)
    with _plain(repo_id):
        revision = HfApi().model_info(repo_id, revision=wanted or None).sha
        if revision is None:
            raise RefusedError(f"{repo_id}: the hub names no revision of it")
        folder = snapshot_download(
            repo_id, revision=revision, allow_patterns=[*WEIGHT_PATTERNS, "*config.json", "tokenizer.json"]
        )
    return HubModel(repo_id, revision, Path(folder))


@contextmanager
def _plain(repo_id: str, folder: Path | None = None) -> Iterator[None]:
    """The library's errors as ours. `folder`: the export that is on its way."""
    from huggingface_hub import errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP library, whichever that is
    from huggingface_hub.utils.tqdm import disable_progress_bars

    again = "" if folder is None else f". The export is in {folder}; `{upload_line(folder, repo_id)}` goes on with it"
    if not sys.stderr.isatty():
        disable_progress_bars()  # stderr is a log
    try:
        with slowly(f"waiting for the hub, which is asked about {repo_id} up to six times"):
            yield
    except errors.LocalTokenNotFoundError as error:
        raise OperatorError(f"{repo_id}: no token of the hub is here; run `hf auth login`, or set HF_TOKEN") from error
    except errors.HFValidationError as error:
        raise OperatorError(f"{repo_id!r} is no name of a repository: {_line(error)}") from error
    except errors.OfflineModeIsEnabled as error:
        raise OperatorError(f"{repo_id}: HF_HUB_OFFLINE is set, so the hub is not asked; unset it") from error
    except errors.RevisionNotFoundError as error:
        raise OperatorError(f"{repo_id}: the hub has no such revision of it: {_line(error)}") from error
    except errors.GatedRepoError as error:
        raise RefusedError(f"{repo_id}: the hub asks you to accept its terms first, on its page") from error
    except errors.HfHubHTTPError as error:
        raise _of_status(repo_id, error, again) from error
    except (HTTPError, ConnectionError) as error:
        raise NetworkError(f"{repo_id}: the hub cannot be reached: {_line(error)}{again}") from error
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, OperatorError):
            raise
        inner = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
        raise NetworkError(f"{repo_id}: the transfer broke off: {_line(inner)}{again}") from error


def _of_status(repo_id: str, error: Any, again: str) -> OperatorError | RefusedError | NetworkError:
    status = error.response.status_code
    if status == 401:
        return OperatorError(
            f"{repo_id}: the hub does not take this token, or shows no such model to it; run `hf auth login`, or correct "
            "HF_TOKEN"
        )
    if status == 403:
        return RefusedError(
            f"{repo_id}: this token may not do that there ({_line(error)}); use a token that writes{again}"
        )
    if status == 404:
        return OperatorError(f"{repo_id}: the hub has no such model, or does not show it to this token")
    if status >= 500 or status == 429:
        return NetworkError(f"{repo_id}: the hub has a problem of its own ({status}){again}")
    return RefusedError(f"{repo_id}: the hub refused: {_line(error)}{again}")


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


class Uploads:
    """Uploads of a series of exports to one repository, on a thread: the program follows its run meanwhile.

    `done` gets the folder, step and address of each upload, on the thread. Refuses to queue: if exports come faster than the
    hub takes them, only the newest one waits. An upload that fails costs a line of the log, and the next one is tried.
    """

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
                self._done(path, step, push(path, self._repo_id, public=self._public))
            except SwarmentumError as error:
                self._log.warning("the export is not on the hub", step=step, why=str(error))
