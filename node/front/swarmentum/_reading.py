"""What a run leaves behind, for programs: its verified log, and the replay of its archive. Joins nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from node.archive import ledger
from protos.accounts import NOBODY, Account, Excluded, Owner, loss_of, owners_of
from protos.changes import with_settings
from protos.errors import OperatorError, Refusal
from protos.identity import peer_id
from protos.invite import Invite, is_link
from protos.log import SignedEntry, run_id_of
from protos.run_config import RunConfig, config_from_json
from protos.text import printable
from protos.v1 import log_pb2
from protos.version import own_misfit

if TYPE_CHECKING:
    from node.archive.verify import Verification

T = TypeVar("T")


def in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which runs in a loop and a thread of its own."""
    with ThreadPoolExecutor(1, "swarmentum") as pool:
        return pool.submit(asyncio.run, work).result()


@dataclass(frozen=True)
class Vote:
    """One peer's accepted votes in a step, as the log has them. Samples, tokens and loss are the author's claims.

    `payload_sha256` is empty where the step has the sum of its votes: such an entry names all payloads by one hash."""

    peer: str
    payload_sha256: str
    payload_bytes: int
    samples: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class Step:
    """One entry of the log. `loss` is the mean over the samples; one liar cannot move it far."""

    step: int
    entry_hash: str
    learning_rate: float
    loss: float
    samples: int
    tokens: int
    payload_bytes: int
    votes: tuple[Vote, ...]
    state_digest_before: str
    """Of the state after the step before, as the run agreed on it; empty if it did not agree on one."""


@dataclass(frozen=True)
class Peer:
    """One identity: the sums of its accepted votes. `owner` is a claim that the coordinator tells; an archive has none."""

    id: str
    votes_accepted: int
    samples: int
    tokens: int
    payload_bytes: int
    first_step: int
    last_step: int
    owner: str = ""


@dataclass(frozen=True)
class Run:
    """A run as its log tells it. Each entry was verified: its signature, its place in the chain, and the run's id."""

    id: str
    name: str
    settings: dict[str, Any]
    """As in run.toml, by section, with the changes that count in the last step."""
    steps: tuple[Step, ...]
    """Oldest first. Those of an archive begin where the archive does."""
    peers: tuple[Peer, ...]
    """The most accepted votes first."""
    exclusions: tuple[Excluded, ...]
    head: str
    """The hash of the last entry; of a run without one, the run's id."""

    @property
    def step(self) -> int:
        """The last step; 0 before the first."""
        return self.steps[-1].step if self.steps else 0

    @property
    def loss(self) -> float | None:
        """Of the last step; None before the first."""
        return self.steps[-1].loss if self.steps else None


def verify(
    archive: str | os.PathLike[str],
    *,
    run_id: str = "",
    from_step: int | None = None,
    model: str | os.PathLike[str] | None = None,
) -> Verification:
    """Replay the archive of a run, and say whether each step holds: `ok`, `reason`, `first_bad_step` and more.

    `archive` is the folder, or one that has it (`./swarmentum-out`). `run_id`: the start of the id that the run has to have.
    `from_step`: begin at the last snapshot before this step. `model`: compare an exported model with the last state.
    Raises OperatorError if there is nothing to verify.
    """
    from node.archive.verify import verify as replay

    return replay(Path(archive), from_step, None if model is None else Path(model), expected=run_id)


def read_run(run: str | os.PathLike[str]) -> Run:
    """The verified log of a run: settings, steps, peers.

    `run` is an invite link, whose coordinator is asked; the folder of an archive; or a file of `swarmentum export-log`.
    Raises OperatorError for a log that does not hold, NetworkError for a coordinator that cannot be reached, RefusedError.
    """
    text = os.fspath(run)
    try:
        if is_link(text):
            facts, entries = in_own_loop(ledger.read_log(Invite.parse(text)))
            return _run(facts.genesis, entries, owners_of(facts.peers))
        return _run(*ledger.kept(Path(text)), {})
    except Refusal as refusal:
        raise OperatorError(f"{text[:80]}: the run's own words do not hold: {refusal}") from refusal


def _run(genesis: log_pb2.Genesis, entries: Iterable[SignedEntry], owners: Mapping[bytes, Owner]) -> Run:
    if why := own_misfit(genesis):
        raise OperatorError(why)
    run_id, log = run_id_of(genesis), list(entries)
    config = config_from_json(genesis.config_json)
    config = with_settings(config, log[-1].entry.settings) if log else config
    book = ledger.ledger(run_id, log)
    names = {peer_id(key): owner.name for key, owner in owners.items()}
    return Run(
        run_id.hex(),
        printable(config.name),
        _settings(config),
        _steps(log),
        tuple(_peer(account, names) for account in book.accounts),
        book.exclusions,
        book.head.hex(),
    )


def _settings(config: RunConfig) -> dict[str, Any]:
    values: dict[str, Any] = config.model_dump(mode="json")
    return values


def _steps(log: list[SignedEntry]) -> tuple[Step, ...]:
    found: list[Step] = []
    for signed in log:
        entry = signed.entry
        votes = tuple(
            Vote(peer_id(c.public_key), c.payload_sha256.hex(), c.payload_bytes, c.samples, c.tokens, c.loss)
            for c in entry.contributions
        )
        found.append(
            Step(
                entry.step,
                signed.hash.hex(),
                entry.lr,
                loss_of(entry.contributions, found[-1].loss if found else 0.0),
                sum(vote.samples for vote in votes),
                sum(vote.tokens for vote in votes),
                sum(vote.payload_bytes for vote in votes),
                votes,
                entry.parent_state_digest.hex(),
            )
        )
    return tuple(found)


def _peer(account: Account, owners: Mapping[str, str]) -> Peer:
    return Peer(
        account.id,
        account.votes_accepted,
        account.samples,
        account.tokens,
        account.payload_bytes,
        account.first_step,
        account.last_step,
        owners.get(account.id, NOBODY.name),
    )
