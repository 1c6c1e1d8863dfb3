"""The replay of a run from its archive checks every step: the log, its signatures, and its effect on the weights.

The replay trusts only the run's genesis, which the run id names. The replay needs no network, no data and no code of the run,
because the state is tensors by name. The replay stops at the first step that does not hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from node.archive import files
from node.archive.confirmed import BadStepError, Confirmed
from node.archive.files import Genesis, Segment
from node.optim.digest import part_of, state_digest
from node.snapshot.image import Image
from node.snapshot.pieces import SnapshotManifest, check_piece, is_start, load, open_manifest
from node.training.optimizers import optimizer_of
from node.training.replica import BASE_PREFIX
from node.wire import UpdateDoor, longest_sums, open_aggregate
from protos.changes import Settings, with_settings
from protos.checks import VERDICTS_NEEDED
from protos.envelope import parse
from protos.equivocation import open_announcement, prove_exclusion
from protos.errors import OperatorError, Reason, Refusal
from protos.identity import peer_id, short
from protos.log import Chain, Contribution, SignedEntry
from protos.orders import SignedOrder
from protos.slices import Aggregate, Update, hash_of
from protos.start import StartingState
from protos.v1 import archive_pb2


@dataclass(frozen=True)
class Replayed:
    """A step that holds.

    `proven`: how many of its `votes` payloads carry their author's own signature. `summed`: how many of the votes are only in
    a sum, whose hash the coordinator signed. `digest_checked`: whether an entry names the
    digest of the state before. `excluded_proven`: how many of the `excluded` peers signed two announcements for one step.
    `excluded_by_operator`: how many the operator excluded without other evidence. Verdicts exclude the other peers, as the
    coordinator recorded them. `readmitted`: how many peers the operator admits again.
    """

    step: int
    votes: int
    proven: int
    entry_hash: bytes
    digest: bytes
    digest_checked: bool
    excluded: int
    excluded_proven: int
    excluded_by_operator: int = 0
    readmitted: int = 0
    changed: Settings = ()
    """Settings that the operator changed, and that count from this step on."""
    summed: int = 0
    orders: tuple[SignedOrder, ...] = ()
    """Of the run's operators, behind what it excludes and changes."""


@dataclass
class Replay:
    """The state of a run at some step, moved by `steps`. Made by `Replay.of`."""

    genesis: Genesis
    segments: Sequence[Segment]
    step: int = 0
    state: Mapping[str, Tensor] = field(default_factory=dict)
    confirmed: Confirmed = field(default_factory=Confirmed)
    began: bytes = b""
    """The digest of the whole state that the replay began with."""

    @classmethod
    def of(cls, folder: Path, from_step: int | None = None) -> Replay:
        """A replay from the archive's first segment, or from the last one that begins at or before `from_step`.

        Raises OperatorError if there is no such segment, Refusal for bytes that are no genesis.
        """
        genesis, found = Genesis.read(folder), files.segments(folder)
        if from_step is not None:
            before = [segment for segment in found if segment.step <= from_step]
            found = found[len(before) - 1 :] if before else []
        if not found:
            what = "is empty" if from_step is None else f"holds no state of step {from_step} or before"
            raise OperatorError(f"{folder}: the archive {what}")
        return cls(genesis, found)

    def __post_init__(self) -> None:
        tensors = [(place.name, torch.zeros(place.shape, requires_grad=True)) for place in self.genesis.layout.places]
        optimizer = self.genesis.config.optimizer
        self.demo = optimizer_of(
            tensors, optimizer, optimizer.vote_size, self.genesis.run_id, self.genesis.layout.kinds
        )
        self.settings: Settings | None = () if self.segments[0].step == 0 else None
        ranges, of = self.genesis.config.clock.ranges, (self.genesis.run_id, self.genesis.layout.digest())
        self._door = UpdateDoor(*of, self.demo.layout.chunks, self.demo.form, optimizer.cap, ranges)
        self.confirmed.layout = self.genesis.layout_named
        self._digest_steps = self.genesis.config.clock.digest_steps
        self._bytes = 4 * sum(tensor.numel() for tensor in self.demo.replicated)
        base = {f"{BASE_PREFIX}{name}": tensor for name, tensor in self.demo.base_state.items()}
        self.state = {name: tensor.detach() for name, tensor in tensors} | base

    @property
    def digest(self) -> bytes:
        """The digest of the whole state."""
        return state_digest(self.demo.replicated)

    @property
    def entries(self) -> int:
        """The number of steps to replay, at most."""
        return max(sum(1 for _ in _log_of(segment)) + segment.step for segment in self.segments) - self.segments[0].step

    def steps(self) -> Iterator[Replayed]:
        """Apply every step to the state, in order. Raises BadStepError at the first step that does not hold."""
        chain: Chain | None = None
        for segment in self.segments:
            manifest = self._manifest(segment)
            if chain is None:
                self._begin(segment, manifest)
                run_id, operators = self.genesis.run_id, self.genesis.config.operators
                head = manifest.entry_hash if manifest.step else run_id
                chain = Chain(run_id, self.genesis.coordinator, manifest.step, head, operators)
            elif segment.step != self.step:
                raise BadStepError(self.step + 1, f"steps {self.step + 1} to {segment.step} are not in this archive")
            elif manifest.root != self._root(manifest, chain.head):
                raise BadStepError(self.step, f"the archived state after step {self.step} is not what the log leads to")
            yield from self._segment(segment, chain)

    def _manifest(self, segment: Segment) -> SnapshotManifest:
        try:
            manifest = open_manifest(segment.path(files.MANIFEST).read_bytes())
        except (Refusal, OSError) as error:
            raise BadStepError(segment.step, f"the archived state's manifest: {error}") from error
        if manifest.run_id != self.genesis.run_id or manifest.step != segment.step:
            raise BadStepError(segment.step, "the archived state is of another run or step")
        if manifest.layout_digest != self.genesis.layout.digest():
            raise BadStepError(segment.step, f"the archived state has another parameter layout than {files.LAYOUT}")
        return manifest

    def _begin(self, segment: Segment, manifest: SnapshotManifest) -> None:
        self.step = segment.step
        try:
            path = segment.path(files.STATE)
            with path.open("rb") as file:
                for number, _ in enumerate(manifest.piece_hashes):
                    check_piece(manifest, number, file.read(manifest.piece_bytes))
                if file.read(1):
                    raise Refusal(Reason.OUT_OF_RANGE, "more bytes than the manifest says")
            self.state = {**self.state, **self._frozen(path)}
            load(path, self.state)
        except (Refusal, OSError) as error:
            raise BadStepError(segment.step, f"the archived state: {error}") from error
        self.began = self.digest
        if self.genesis.start is not None and segment.step == 0:
            self._check_start(self.genesis.start, manifest)

    def _frozen(self, path: Path) -> dict[str, Tensor]:
        """Room for parameters that the run does not train. No digest covers them; the root of a fork's start does."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                names = sorted(name for name in file.keys() - self.state.keys() if not name.startswith(BASE_PREFIX))
                found = {name: torch.empty(file.get_slice(name).get_shape()) for name in names}
        except SafetensorError:
            return {}  # `load` says so
        self.confirmed.frozen = tuple(names)
        return found

    def _check_start(self, start: StartingState, manifest: SnapshotManifest) -> None:
        """A fork's state of step 0 is the one that its genesis names; BadStepError if not."""
        if not is_start(manifest, start):
            raise BadStepError(0, f"the archived state of step 0 is not the one that the genesis names: {start}")
        digest = state_digest(self.demo.replicated, start.step, self._digest_steps)
        # `start-from` knows no run, and parent runs may be of an earlier version
        if start.state_digest and start.state_digest not in (digest, state_digest(self.demo.replicated, start.step)):
            raise BadStepError(
                0,
                f"the starting state has digest {digest.hex()[:16]}; the genesis says {start.state_digest.hex()[:16]}",
                self.genesis.coordinator,
            )
        self.confirmed.by_genesis(0)
        self.confirmed.frozen = ()

    def _root(self, like: SnapshotManifest, head: bytes) -> bytes:
        """The root that a snapshot of the present state has. `head`: the hash of the newest entry."""
        image = Image(self.state, live=False)
        hashes = tuple(hashlib.sha256(piece).digest() for piece in image.pieces(like.piece_bytes))
        of = self.step, head, self.genesis.layout.digest(), image.total_bytes, like.piece_bytes, hashes
        return SnapshotManifest(like.run_id, *of).root

    def _segment(self, segment: Segment, chain: Chain) -> Iterator[Replayed]:
        payloads = _payloads_of(segment)
        for envelope in _log_of(segment):
            step = self.step + 1
            try:
                signed = chain.extend(envelope)
            except Refusal as refusal:
                raise BadStepError(step, f"its entry: {refusal}") from refusal
            yield self._apply(signed, payloads)

    def _apply(self, signed: SignedEntry, payloads: Iterator[archive_pb2.ArchivedPayload]) -> Replayed:
        entry = signed.entry
        before = state_digest(self.demo.replicated, self.step, self._digest_steps)
        if entry.parent_state_digest and entry.parent_state_digest != before:
            raise BadStepError(
                self.step,
                f"the state after step {self.step} has digest {before.hex()[:16]}; entry {entry.step}, which the coordinator "
                f"signed, says {entry.parent_state_digest.hex()[:16]}",
                self.genesis.coordinator,
            )
        if entry.parent_state_digest:
            self.confirmed.by_entry(self.step, *part_of(self._bytes, self.step, self._digest_steps))
        excluded_proven, changed = _check_exclusions(self.genesis, signed), self._changed(signed)
        updates, authors, proven = self._votes(signed, payloads)
        self.demo.apply([(update.size, update.votes) for update in updates], entry.lr, entry.step, authors)
        self.step = entry.step
        digest = state_digest(self.demo.replicated, self.step, self._digest_steps)
        checked = bool(entry.parent_state_digest)
        return Replayed(
            entry.step,
            len(entry.contributions),
            proven,
            signed.hash,
            digest,
            checked,
            len(entry.exclusions),
            excluded_proven,
            sum(exclusion.by_operator for exclusion in entry.exclusions),
            len(entry.readmitted),
            changed,
            0 if entry.aggregate is None else len(entry.contributions),
            entry.orders,
        )

    def _votes(
        self, signed: SignedEntry, payloads: Iterator[archive_pb2.ArchivedPayload]
    ) -> tuple[list[Update], list[bytes], int]:
        """What an entry's payloads, or their sum, say; the authors of the payloads; how many authors signed here."""
        entry = signed.entry
        if entry.aggregate is not None:
            return self._sum(entry.step, entry.aggregate, payloads), [], 0
        updates, authors, proven = [], [], 0
        for contribution in entry.contributions:
            update, signed_by_author = self._vote(entry.step, contribution, payloads)
            if update is not None:
                updates.append(update)
                authors.append(contribution.public_key)
            proven += signed_by_author
        return updates, authors, proven

    def _sum(self, step: int, aggregate: Aggregate, payloads: Iterator[archive_pb2.ArchivedPayload]) -> list[Update]:
        """Votes that add up to a sum (none, if it counts as nothing on every replica)."""
        name = f"the sum of its votes, {aggregate.sha256.hex()[:16]},"
        record = next((found for found in payloads if found.payload_sha256 == aggregate.sha256), None)
        if record is None:
            raise BadStepError(step, f"{name} is not in this archive")
        longest = longest_sums(self._door)
        if self._door.ranges == 1 and aggregate.total_bytes > longest[0]:
            return []
        data = self._unpacked(step, name, record, aggregate.sha256, aggregate.total_bytes, longest)
        told = list[Refusal]()
        try:
            updates = open_aggregate(self._door, data, step, aggregate.total_bytes, told.append)
        except Refusal:
            self.confirmed.votes_misfit += 1
            return []
        self.confirmed.votes_misfit += bool(told)
        self.confirmed.votes_fit += not told
        return list(updates)

    def _unpacked(
        self,
        step: int,
        name: str,
        record: archive_pb2.ArchivedPayload,
        sha256: bytes,
        named_bytes: int,
        longest: Sequence[int] = (),
    ) -> bytes:
        """The bytes of a record that have the hash in the log; BadStepError for others. `longest`: see `hash_of`."""
        try:
            data = files.payload_of(record)
        except Refusal as refusal:
            raise BadStepError(step, f"{name}: {refusal}") from refusal
        if hash_of(data, self._door.ranges, named_bytes, longest) != sha256:
            raise BadStepError(
                step, f"{name} does not have the hash that the coordinator signed", self.genesis.coordinator
            )
        return data

    def _changed(self, signed: SignedEntry) -> Settings:
        """The settings that change with an entry. Raises BadStepError for settings that the run cannot have there."""
        entry, genesis = signed.entry, self.genesis
        lost = {key for key, _ in self.settings or ()} - {key for key, _ in entry.settings}
        try:
            steps = with_settings(genesis.config, entry.settings).clock.steps
            why = f"{min(lost)} was changed, and is not named any more" if lost else ""
            why = f"the run has {steps} steps" if entry.step > steps else why
        except Refusal as refusal:
            why = refusal.detail
        if why:
            raise BadStepError(entry.step, f"the settings of its entry: {why}", genesis.coordinator)
        # an archive that begins later does not have the entry before
        before, self.settings = self.settings, entry.settings
        return tuple(it for it in entry.settings if before is not None and it not in before)

    def _vote(
        self, step: int, contribution: Contribution, payloads: Iterator[archive_pb2.ArchivedPayload]
    ) -> tuple[Update | None, bool]:
        """A contribution's votes (None: they count as nothing on every replica), and whether the author's signature is here."""
        author = contribution.public_key
        name = f"the payload of {peer_id(author)}"
        record = next((found for found in payloads if found.payload_sha256 == contribution.payload_sha256), None)
        if record is None:
            raise BadStepError(step, f"{name}, {contribution.payload_sha256.hex()[:16]}, is not in this archive")
        if record.announcement:
            _check_announcement(self.genesis.run_id, step, contribution, record.announcement)
        proven = bool(record.announcement)
        if contribution.payload_bytes > self._door.bytes_max:
            return None, proven
        data = self._unpacked(step, name, record, contribution.payload_sha256, contribution.payload_bytes)
        try:
            update = self._door.open(data, step, contribution.payload_bytes)
        except Refusal:
            self.confirmed.votes_misfit += 1
            return None, proven
        self.confirmed.votes_fit += 1
        return update, proven


def _check_exclusions(genesis: Genesis, signed: SignedEntry) -> int:
    """How many exclusions of an entry their peers' own signatures prove. Raises BadStepError for false evidence."""
    proven, step = 0, signed.entry.step
    for exclusion in signed.entry.exclusions:
        name = f"the exclusion of {peer_id(exclusion.public_key)}"
        if exclusion.equivocation is not None:
            try:
                prove_exclusion(exclusion, genesis.run_id)
            except Refusal as refusal:
                raise BadStepError(
                    step, f"{name}: its evidence proves nothing: {refusal}", genesis.coordinator
                ) from refusal
            proven += 1
        elif exclusion.by_operator:
            continue  # the exclusion claims no evidence: the coordinator signs for the operator's decision
        elif len({v.checker for v in exclusion.evidence if v.subject == exclusion.public_key}) < VERDICTS_NEEDED:
            raise BadStepError(step, f"{name}: no verdicts of {VERDICTS_NEEDED} peers against it", genesis.coordinator)
    return proven


def _check_announcement(run_id: bytes, step: int, contribution: Contribution, envelope: bytes) -> None:
    """Check that the author itself announced this payload for the step. Raises BadStepError if not."""
    author = contribution.public_key
    try:
        _, body = open_announcement(envelope, run_id=run_id, author=author)
    except Refusal as refusal:
        raise BadStepError(step, f"the announcement of {peer_id(author)}: {refusal}") from refusal
    if body.step != step or body.payload_sha256 != contribution.payload_sha256:
        raise BadStepError(
            step, f"{short(author)} announced another payload than the one that the coordinator accepted", author
        )


def _log_of(segment: Segment) -> Iterator[bytes]:
    return files.records(segment.path(files.LOG), files.ENTRY_RECORD_BYTES_MAX)


def _payloads_of(segment: Segment) -> Iterator[archive_pb2.ArchivedPayload]:
    """Every whole record. A damaged record is left out, and counts as missing when an entry names it."""
    for record in files.records(segment.path(files.PAYLOADS), files.PAYLOAD_RECORD_BYTES_MAX):
        try:
            yield parse(archive_pb2.ArchivedPayload, record)
        except Refusal:
            continue
