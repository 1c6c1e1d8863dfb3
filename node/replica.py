"""The replica: the model's parameters after a step, this peer's momentum, and where in the log they are.

`vote` and `apply` are all that happens to a replica; its snapshots are files of pieces that anyone can check. On one device
by itself; `node.ranks` has one over several. Knows no network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor, nn

from node.data.samples import Samples
from node.model.gradients import GradResult, accumulate_gradients, free_cache, no_room
from node.optim.base import BaseConfig
from node.optim.demo import DeMo, DeMoConfig, Votes
from node.optim.digest import state_digest
from node.optim.layout import Layout
from node.optim.local import LocalConfig, LocalSteps
from node.optim.spread import Pieces, whole
from node.snapshot.pieces import Manifest, describe, iterate_pieces, load, pack, parameters_of
from node.snapshot.private import PrivateState, load_private, save_private
from node.snapshot.store import PieceStore
from node.wire.codec import Update, encode_update, payload_hash
from protos.assignment import Range, take
from protos.errors import OperatorError
from protos.log import SignedEntry
from protos.run_config import OptimizerConfig

SNAPSHOTS_KEPT = 3
# A joiner that has heard of a snapshot gets this long to load it, if the disk has room (settings.RETAIN_SECONDS).
RETAIN_SECONDS = 60.0

BASE_PREFIX = "swarmentum.base."


def demo_config(optimizer: OptimizerConfig, size: int) -> DeMoConfig:
    """A run's settings as the optimizer takes them; `size` is this peer's group size or k."""
    base = optimizer.base
    return DeMoConfig(
        beta=optimizer.beta,
        beta2=optimizer.beta2,
        weight_decay=optimizer.weight_decay,
        clip_norm=None if optimizer.local.steps > 1 else optimizer.clip_norm,  # local steps clip their own gradients
        group_size=size if optimizer.selection == "groups" else optimizer.group_size,
        selection=optimizer.selection,
        top_k=size if optimizer.selection == "topk" else optimizer.top_k,
        values=optimizer.values,
        transform=optimizer.transform,
        magnitudes=optimizer.magnitudes,
        refused=optimizer.refused,
        base=BaseConfig(base.name, base.momentum, base.nesterov, base.beta1, base.beta2, base.eps, tuple(base.tables)),
    )


def local_config(optimizer: OptimizerConfig) -> LocalConfig:
    """A run's local steps, as `LocalSteps` takes them."""
    local = optimizer.local
    return LocalConfig(local.steps, local.lr, local.beta1, local.beta2, local.weight_decay, optimizer.clip_norm)


class Optimizer(Protocol):
    """What a replica asks of `DeMo`, or of what stands for one."""

    config: DeMoConfig

    @property
    def layout(self) -> Layout: ...
    @property
    def pending(self) -> bool: ...
    @property
    def open_votes(self) -> Votes | None: ...
    @property
    def base_state(self) -> Mapping[str, Tensor | Pieces]: ...
    def propose(self, lr: float) -> Votes: ...
    def settle(self, accepted: bool) -> None: ...
    def apply(self, contributions: Sequence[tuple[int, bytes]], lr: float) -> None: ...
    def ahead(self, lr: float) -> AbstractContextManager[None]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Local(Protocol):
    """What a replica asks of `LocalSteps`, or of what stands for them."""

    config: LocalConfig

    def borrow(self) -> None: ...
    def step(self, lr_factor: float) -> None: ...
    def give_back(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def cut(ranges: Iterable[Range], parts: int) -> Iterator[tuple[Range, ...]]:
    """The samples of `ranges`, in order, in `parts` runs of nearly equal length; empty ones are left out."""
    rest = [part for part in ranges if len(part)]
    total = sum(map(len, rest))
    for part in range(parts):
        run, rest = take(rest, total * (part + 1) // parts - total * part // parts)
        if run:
            yield run


class Replica:
    """Parameters after step `step`, whose entry has hash `head` (the run id before the first)."""

    def __init__(
        self,
        run_id: bytes,
        model: nn.Module,
        optimizer: OptimizerConfig,
        size: int,
        *,
        demo: Optimizer | None = None,
        local: Local | None = None,
    ) -> None:
        """`demo` and `local` (None without local steps): what stands for those over `model` on this device."""
        self.run_id = run_id
        self.model = model
        self.step = 0
        self.head = run_id
        self.published: tuple[int, bytes] | None = None
        self.announcement = b""
        self.agreed_root = b""
        """Of the newest agreed snapshot: it stays in the store until another one is agreed, whoever else has it."""
        self.demo: Optimizer = demo or DeMo(model, demo_config(optimizer, size))
        self.local = local
        if isinstance(self.demo, DeMo) and optimizer.local.steps > 1:
            self.local = LocalSteps(self.demo.parameters, local_config(optimizer))
        self.layout_digest = self.demo.layout.digest()
        self._manifests: list[Manifest] = []
        self._stored_at: dict[int, float] = {}
        self._digest: bytes | None = None
        self._fits: int | None = None  # samples for which the device had room at a time, as far as is known

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.model.parameters()).device

    @property
    def size(self) -> int:
        """This peer's group size or k, for its next votes."""
        return self.demo.config.size

    @size.setter
    def size(self, size: int) -> None:
        config = self.demo.config
        groups = config.selection == "groups"
        self.demo.config = replace(config, group_size=size) if groups else replace(config, top_k=size)

    @property
    def payload_bytes(self) -> dict[int, int]:
        """The longest payload of each size that this peer may choose, header not counted."""
        form = self.demo.config.form
        return {size: form.bytes_max(self.demo.layout.chunks, size) for size in form.sizes}

    # ---- a clock step ------------------------------------------------------------------------------------------------

    def vote(self, step: int, lr: float) -> bytes:
        """Turn the gradients in `.grad` into this peer's payload of a step. Momentum is not spent yet."""
        votes = self.demo.propose(lr)
        data = encode_update(self.run_id, self.layout_digest, Update(step, votes.size, votes.payload))
        self.published = (step, payload_hash(data))
        return data

    def apply(self, signed: SignedEntry, updates: Iterable[Update]) -> bool:
        """The state after the next entry. True if this peer's own votes were in it; only then they are spent."""
        entry = signed.entry
        assert entry.step == self.step + 1, f"entry {entry.step} on the state of step {self.step}"
        mine = self.published[1] if self.published is not None and self.published[0] == entry.step else None
        accepted = mine is not None and any(c.payload_sha256 == mine for c in entry.contributions)
        if self.demo.pending and self.published is not None and self.published[0] <= entry.step:
            self.demo.settle(accepted)
        self.demo.apply([(update.size, update.votes) for update in updates], entry.lr)
        self.step, self.head, self._digest = entry.step, signed.hash, None
        return accepted

    def digest(self) -> bytes:
        """Digest of this step's state (a rotating part of it for large models)."""
        if self._digest is None:
            self._digest = self._state_digest(self.step)
        return self._digest

    def whole_digest(self) -> bytes:
        """Digest of every parameter bit."""
        return self._state_digest(None)

    def _state_digest(self, step: int | None) -> bytes:
        assert isinstance(self.demo, DeMo), "what stands for it has a digest of its own"
        return state_digest(self.demo.replicated, step)

    def gradients(
        self,
        samples: Samples,
        ranges: Iterable[Range],
        micro_batch: int,
        autocast: Any,
        should_stop: Callable[[], bool],
        lr_factor: float = 1.0,
    ) -> GradResult:
        """What this peer's samples of a step say, into `.grad`: their mean gradient, or where local steps on them led.

        `lr_factor` is the schedule's, for the local steps. Raises `NonFiniteGradient`, the parameters untouched.
        """
        if self.local is None:
            return self.mean_gradient(samples, ranges, micro_batch, autocast, should_stop)
        done: list[GradResult] = []
        self.local.borrow()
        try:
            for part in cut(ranges, self.local.config.steps):
                result = self.mean_gradient(samples, part, micro_batch, autocast, should_stop)
                if not result.samples:
                    break
                self.local.step(lr_factor)
                done.append(result)
        finally:
            self.local.give_back()
        count, tokens = sum(result.samples for result in done), sum(result.tokens for result in done)
        summed = sum(result.loss_mean * result.samples for result in done)
        return GradResult(summed / count if count else math.nan, tokens, count)

    def mean_gradient(
        self,
        samples: Samples,
        ranges: Iterable[Range],
        micro_batch: int,
        autocast: Any,
        should_stop: Callable[[], bool],
    ) -> GradResult:
        """The mean gradient over the samples of `ranges` at the state that is here, into `.grad`; no local steps.

        Fewer samples at a time where the device has no room for `micro_batch`.
        """
        parts = tuple(ranges)
        self._fits = min(self._fits or micro_batch, micro_batch)
        while True:
            size = max(min(self._fits, sum(map(len, parts))), 1)
            try:
                batches = samples.micro_batches(parts, size)
                return accumulate_gradients(self.model, batches, self.device, autocast, should_stop)
            except RuntimeError as error:
                if not no_room(error):
                    raise
                if size == 1:
                    self.model.zero_grad(set_to_none=True)
                    free_cache(self.device)
                    what = str(error).splitlines()[0]
                    raise OperatorError(
                        f"{self.device} has no room for one sample of this model ({what}); close what else uses its memory, "
                        "try --precision bf16, or join with another device (--device)"
                    ) from error
            # after the except: until then the error holds on to the tensors of the pass that failed
            self._fits = size // 2
            self.model.zero_grad(set_to_none=True)
            free_cache(self.device)
            log = structlog.get_logger("peer")
            log.warning("out of memory: going on with fewer samples at a time", step=self.step, micro_batch=self._fits)

    def whole_gradients(self) -> list[Tensor | None]:
        """What `mean_gradient` left in `.grad`, in the layout's order; None counts as zeros."""
        assert isinstance(self.demo, DeMo), "what stands for it gathers them"
        return [parameter.grad for parameter in self.demo.parameters]

    @property
    def state(self) -> Mapping[str, Tensor | Pieces]:
        """The replicated state by name, fp32: every parameter, and what a base optimizer keeps about the aggregate."""
        base = {f"{BASE_PREFIX}{name}": tensor for name, tensor in self.demo.base_state.items()}
        return {**parameters_of(self.model), **base}

    def whole_model(self) -> nn.Module:
        """The model with all of its parameters in one place."""
        return self.model

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """The snapshots of this replica that are in the store, oldest first."""
        return tuple(sorted(self._manifests, key=lambda manifest: manifest.step))

    def packed(self) -> tuple[Manifest, bytes]:
        """The state as a safetensors file, and its manifest."""
        data = pack({name: whole(tensor) for name, tensor in self.state.items()})
        run_id, layout_digest = self.run_id, self.layout_digest
        return describe(data, run_id=run_id, step=self.step, entry_hash=self.head, layout_digest=layout_digest), data

    def snapshot(self, store: PieceStore) -> Manifest:
        """Put the state into the store, as pieces; older snapshots but SNAPSHOTS_KEPT go."""
        manifest, data = self.packed()
        self._manifests = [m for m in self._manifests if m.step != manifest.step]
        self._retain(manifest.total_bytes, store.bytes_max, time.monotonic())
        self.keep(store)
        for piece in iterate_pieces(data, manifest.piece_bytes):
            store.put(piece)
        store.put(manifest.encoded)
        self._manifests.append(manifest)
        self._stored_at[manifest.step] = time.monotonic()
        return manifest

    def _retain(self, following_bytes: int, bytes_max: int, now: float) -> None:
        """Keep the last snapshots, and as long as there is room those that somebody may still be loading."""
        young = [m for m in self._manifests if now - self._stored_at.get(m.step, 0.0) < RETAIN_SECONDS]
        most = max(SNAPSHOTS_KEPT - 1, min(len(young) + 1, bytes_max // (2 * max(following_bytes, 1))))
        agreed = [m for m in self._manifests[:-most] if m.root == self.agreed_root]
        self._manifests = [*agreed, *self._manifests[-most:]]
        self._stored_at = {m.step: self._stored_at.get(m.step, 0.0) for m in self._manifests}

    def keep(self, store: PieceStore) -> None:
        """Delete what no kept snapshot needs."""
        store.keep([digest for m in self._manifests for digest in (m.root, *m.piece_hashes)])

    def load(self, manifest: Manifest, data: bytes) -> None:
        """Become the state of a verified snapshot. Votes that are out are taken back into the momentum."""
        load(data, self.state)
        self.step, self._digest = manifest.step, None
        self.head = manifest.entry_hash if manifest.step else self.run_id
        if self.demo.pending:
            self.demo.settle(False)
        self.published = None
        self._manifests = [m for m in self._manifests if m.step < manifest.step] + [manifest]

    # ---- private state -----------------------------------------------------------------------------------------------

    def save_private(self, path: Path) -> None:
        """This peer's momentum and open votes, atomically."""
        step, sha256 = self.published or (0, b"")
        bookkeeping = {"published_step": step, "published": sha256.hex(), "announcement": self.announcement.hex()}
        own = self.demo.state_dict()
        if self.local is not None:
            own["local"] = self.local.state_dict()
        save_private(PrivateState(self.run_id, self.layout_digest, self.step, own, bookkeeping), path)

    def load_private(self, path: Path) -> bool:
        """Take the momentum up again; open votes of a step that is decided already go back into it."""
        state = load_private(path, self.run_id, self.layout_digest)
        if state is None:
            return False
        self.demo.load_state_dict(state.optimizer)
        if self.local is not None and "local" in state.optimizer:
            self.local.load_state_dict(state.optimizer["local"])
        step = state.bookkeeping["published_step"]
        if self.demo.pending and step <= self.step:
            self.demo.settle(False)
        if self.demo.pending:
            self.published = (step, bytes.fromhex(state.bookkeeping["published"]))
            self.announcement = bytes.fromhex(state.bookkeeping["announcement"])
        return True

    def open_payload(self) -> bytes | None:
        """The payload of votes that an earlier life published and the log has not judged, or None."""
        votes = self.demo.open_votes
        if self.published is None or votes is None:
            return None
        update = Update(self.published[0], votes.size, votes.payload)
        data = encode_update(self.run_id, self.layout_digest, update)
        assert payload_hash(data) == self.published[1], "the open votes are not those that were published"
        return data
