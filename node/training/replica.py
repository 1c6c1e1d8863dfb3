"""The replica: the model's parameters after a step, this peer's momentum, and where in the log they are.

Only `vote`, `apply` and `load` change a replica; its snapshots are files of pieces that anyone can check. This class serves one
device; `node.ranks` has a replica over several. Knows no network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn

from node.data.samples import Samples
from node.model.gradients import GradResult
from node.optim.demo import DeMo
from node.optim.laid_out import ParameterChanged
from node.optim.local import LocalSteps
from node.optim.second_moment import Kind
from node.optim.spread import Pieces, whole
from node.snapshot.image import Image, Spare, SpareDisk, SpareMemory
from node.snapshot.pieces import SnapshotManifest, describe, load, pack, parameters_of
from node.snapshot.private import PrivateState, image_of, load_private, write_private
from node.training.maker import BuiltIn, GradientMaker
from node.training.optimizers import LocalOptimizer, Optimizer, local_config, own_optimizer
from node.wire import encode
from protos.assignment import Range, split_samples
from protos.errors import OperatorError
from protos.limits import SNAPSHOT_PIECE_BYTES
from protos.log import SignedEntry
from protos.optimizer_config import OptimizerConfig
from protos.slices import Update, hash_of

Describe = Callable[[tuple[bytes, ...]], SnapshotManifest]
BASE_PREFIX = "swarmentum.base."
FP32_BYTES: Final = 4
THREAD_SAFE: Final = ("cpu", "cuda")
"""Devices whose tensors another thread may read while the training computes. Metal's may crash the process (pytorch#197805)."""


def cut(ranges: Iterable[Range], parts: int) -> Iterator[tuple[Range, ...]]:
    """The samples of `ranges`, in order, in `parts` runs of nearly equal length; empty ones are left out."""
    rest = [part for part in ranges if len(part)]
    total = sum(map(len, rest))
    for part in range(parts):
        run, rest = split_samples(rest, total * (part + 1) // parts - total * part // parts)
        if run:
            yield run


class Replica:
    """Parameters after step `step`, whose entry has hash `head` (the run id before the first).

    A thread that reads an `image` reads the state as it was, even if the replica changes meanwhile.
    """

    knows_start = True
    """Whether it begins with the state that the run's seed gives. A program's model may not: it takes an agreed state."""
    is_blank = False
    """Whether its parameters are no state of the run until it loads one."""
    first_model: Callable[[], nn.Module]
    """Builds the run's model from its seed anew. Set where a peer may have to compare an initial state of others with it."""
    ranges = 1
    """Into how many ranges the run divides the model (`clock.ranges`): a payload has a slice for each."""
    live = True
    """Whether a thread may read an image later on: the tensors are on this process's own device."""

    def __init__(
        self,
        run_id: bytes,
        model: nn.Module,
        optimizer: OptimizerConfig,
        size: int,
        *,
        demo: Optimizer | None = None,
        local: LocalOptimizer | None = None,
        author: bytes = b"",
        second: Kind = "whole",
        maker: GradientMaker | None = None,
        digest_steps: int = 0,
        copy_folder: Path | None = None,
    ) -> None:
        """`author`: this peer's public key, for votes whose places follow from it. `second`: how it keeps its second moment.
        `maker`: of its gradients. `digest_steps`: of the run's clock. `copy_folder`: for what images copy, if
        it saves memory; else copies are in memory. A peer of several ranks gives `demo` and `local` (None
        without local steps); for one device they are made here."""
        self.run_id, self.model, self.digest_steps = run_id, model, digest_steps
        self.step = 0
        self.head = run_id
        self.published: tuple[int, bytes] | None = None
        self.announcement = b""
        if demo is None:
            demo = own = own_optimizer(model, optimizer, size, run_id, author, second)
            several = optimizer.local.steps > 1
            local = LocalSteps(own.parameters, local_config(optimizer), own.layout.places) if several else None
        self.demo, self.local = demo, local
        self.layout_digest = self.demo.layout.digest()
        # of state and momentum: one may be read when the other is made
        copies_to = copy_folder if second == "factored" else None
        self._spares: dict[bool, Spare] = {
            private: SpareMemory() if copies_to is None else SpareDisk(copies_to) for private in (False, True)
        }
        # of the state, and of what is private; weak, because nobody needs a copy for an image that nobody reads
        self._images: dict[bool, WeakSet[Image]] = {False: WeakSet(), True: WeakSet()}
        self._digest: bytes | None = None
        self._hashing: Future[bytes] | None = None
        self.maker = BuiltIn(model) if maker is None else maker
        self._folds = second == "factored" and self.local is None and not optimizer.overlap
        self._folded_in: tuple[bytes, tuple[Range, ...], GradResult] | None = None
        """The gradient that the momentum has and no votes have yet: at which entry, over which samples."""

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.model.parameters()).device

    @property
    def size(self) -> int:
        """This peer's group size, k or `one_in`, for its next votes."""
        return self.demo.size

    @size.setter
    def size(self, size: int) -> None:
        self.demo.size = size

    @property
    def payload_bytes(self) -> dict[int, int]:
        """The longest payload without silent votes of each size that this peer may choose, header not counted."""
        form = self.demo.form
        return {size: form.body_bytes(self.demo.layout.chunks, size) for size in form.sizes}

    # ---- a clock step ------------------------------------------------------------------------------------------------

    def vote(self, step: int, lr: float) -> bytes:
        """Turn the gradients in `.grad` into this peer's payload of a step, and free them. The momentum keeps the votes."""
        self._detach(private=True)
        self._folded_in = None
        with self._unchanged():
            votes = self.demo.propose(lr, step)
        self.model.zero_grad(set_to_none=True)
        data = self._encoded(Update(step, votes.size, votes.payload))
        self.published = (step, hash_of(data, self.ranges))
        return data

    def _encoded(self, update: Update) -> bytes:
        return encode(self.run_id, self.layout_digest, update, self.demo.layout.chunks, self.ranges)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Raises `OperatorError` if the model, or the program that has it, casts, freezes or replaces its parameters."""
        try:
            yield
        except ParameterChanged as error:
            raise OperatorError(
                f"the model changes while it trains: {error}. A model.factory, and a program's own loop, have to leave it alone"
            ) from error

    def apply(self, signed: SignedEntry, updates: Iterable[Update], authors: Sequence[bytes] = ()) -> bool:
        """Apply the next entry, with the `authors` of its `updates`. True if it counts this peer's own votes.

        Votes that the entry has leave the momentum: those on trial, too. Otherwise a newcomer votes for the same components
        again and again, which fit its newest samples less with each step, and honest work fails the checks (ADR 16).
        """
        entry = signed.entry
        assert entry.step == self.step + 1, f"entry {entry.step} on the state of step {self.step}"
        mine = self.published[1] if self.published is not None and self.published[0] == entry.step else None
        accepted, tried = (
            mine is not None and any(c.payload_sha256 == mine for c in part)
            for part in (entry.contributions, entry.trials)
        )
        if self.demo.pending and self.published is not None and self.published[0] <= entry.step:
            self._detach(private=True)
            self.demo.settle(accepted or tried)
        self._detach()
        with self._unchanged():
            self.demo.apply([(update.size, update.votes) for update in updates], entry.lr, entry.step, authors)
        self.step, self.head, self._digest = entry.step, signed.hash, None
        return accepted

    def digest(self) -> bytes:
        """Digest of this step's state (a rotating part of it for large models)."""
        if self._digest is None:
            hashing, self._hashing = self._hashing, None
            self._digest = self.demo.state_digest(self.step, self.digest_steps) if hashing is None else hashing.result()
        return self._digest

    def hashes_behind(self, bytes_min: int) -> bool:
        """Whether another thread may hash the state, and the state has `bytes_min` or more."""
        return self.live and self.device.type in THREAD_SAFE and FP32_BYTES * self.demo.layout.parameters >= bytes_min

    def hash_in(self, pool: Executor) -> Future[bytes]:
        """Compute the digest in a thread. The replica waits for it before the state changes."""
        self._hashing = pool.submit(self.demo.state_digest, self.step, self.digest_steps)
        return self._hashing

    def whole_digest(self) -> bytes:
        """Digest of every parameter bit."""
        return self.demo.state_digest(None)

    def gradients(
        self,
        samples: Samples,
        ranges: Iterable[Range],
        micro_batch: int,
        autocast: Any,
        should_stop: Callable[[], bool],
        lr_factor: float = 1.0,
        lr: float | None = None,
    ) -> GradResult:
        """Put the mean gradient of this peer's samples into `.grad`, or the change that local steps on the samples made.

        `lr_factor` is the schedule's, for the local steps. `lr`: of the votes that come next. A peer that saves memory then
        takes each gradient into its momentum as it is made, and leaves none in `.grad`. They stay there if the step goes on
        without its votes, and join once if the step is asked for again. What was done before `should_stop` does not join, so
        there is nothing to vote for. Raises `NonFiniteGradient`, the parameters untouched.
        """
        if (
            lr is not None
            and self._folds
            and not self.demo.pending
            and isinstance(self.maker, BuiltIn)
            and isinstance(self.demo, DeMo)
        ):
            return self._folded(self.maker, self.demo, lr, samples, tuple(ranges), micro_batch, autocast, should_stop)
        if self.local is None:
            return self.mean_gradient(samples, ranges, micro_batch, autocast, should_stop)
        done: list[GradResult] = []
        self._detach()
        self._detach(private=True)
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

    def _folded(
        self,
        maker: BuiltIn,
        demo: DeMo,
        lr: float,
        samples: Samples,
        ranges: tuple[Range, ...],
        micro_batch: int,
        autocast: Any,
        should_stop: Callable[[], bool],
    ) -> GradResult:
        """As `gradients`, into the momentum."""
        if self._folded_in is not None and self._folded_in[:2] == (self.head, ranges):
            return self._folded_in[2]
        with self._unchanged():
            folding = demo.folding(lr, changes=lambda: self._detach(private=True))
            result = maker.mean_gradient(samples, ranges, micro_batch, autocast, should_stop, folding)
            if result.samples == sum(map(len, ranges)):
                folding.finish(result.samples)
                self._folded_in = self.head, ranges, result
        return result

    def mean_gradient(
        self,
        samples: Samples,
        ranges: Iterable[Range],
        micro_batch: int,
        autocast: Any,
        should_stop: Callable[[], bool],
        by: GradientMaker | None = None,
    ) -> GradResult:
        """Put the mean gradient over the samples of `ranges` at the state that is here into `.grad`; no local steps."""
        with self._unchanged():
            return (by or self.maker).mean_gradient(samples, tuple(ranges), micro_batch, autocast, should_stop)

    def rest(self) -> None:
        """Give the device's memory back that only training needs: the gradients, and what torch keeps for later."""
        self.model.zero_grad(set_to_none=True)
        self.maker.rest()

    def whole_gradients(self) -> list[Tensor | None]:
        """The gradients that `mean_gradient` left in `.grad`, in the layout's order; None counts as zeros."""
        return self.demo.whole_gradients()

    @property
    def state(self) -> Mapping[str, Tensor | Pieces]:
        """The replicated state by name, fp32: every parameter, and the base optimizer's state."""
        base = {f"{BASE_PREFIX}{name}": tensor for name, tensor in self.demo.base_state.items()}
        return {**parameters_of(self.model), **base}

    def whole_model(self) -> nn.Module:
        """The model with all of its parameters in one place."""
        return self.model

    def model_to_evaluate(self) -> nn.Module | None:
        """A model on the CPU for evaluations, without numbers of its own; None: they copy this one."""
        return None

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    def packed(self) -> tuple[SnapshotManifest, bytes]:
        """The state as a safetensors file in memory, and its manifest; `image` gives the same file piece by piece."""
        data = pack({name: whole(tensor) for name, tensor in self.state.items()})
        run_id, layout_digest = self.run_id, self.layout_digest
        return describe(data, run_id=run_id, step=self.step, entry_hash=self.head, layout_digest=layout_digest), data

    def image(self) -> Image:
        """The same file, for one reading, on any thread, while the replica continues."""
        return self._remember(Image(self.state, live=self.live, spare=self._spares[False]), private=False)

    def describer(self, total_bytes: int) -> Describe:
        """A function that makes the manifest of the present state, now or later, from the sha256 of its pieces."""
        run_id, layout_digest, step, head = self.run_id, self.layout_digest, self.step, self.head
        return lambda hashes: SnapshotManifest(
            run_id, step, head, layout_digest, total_bytes, SNAPSHOT_PIECE_BYTES, hashes
        )

    def _remember(self, image: Image, *, private: bool) -> Image:
        self._images[private].add(image)
        return image

    def _detach(self, *, private: bool = False) -> None:
        """Let every image keep the state (the momentum) as it was, because the replica is about to change it."""
        if self._hashing is not None and not private:
            self.digest()
        for image in self._images[private]:
            image.detach()
        self._images[private].clear()

    @contextmanager
    def ahead(self, lr: float) -> Iterator[None]:
        self._detach()
        with self.demo.ahead(lr):
            yield

    def load(self, manifest: SnapshotManifest, data: bytes | Path) -> None:
        """Load the state of a verified snapshot, which may be a file. Published votes go back to the momentum."""
        self._detach()
        self._detach(private=True)
        load(data, self.state)
        self.step, self._digest = manifest.step, None
        self.head = manifest.entry_hash if manifest.step else self.run_id
        if self.demo.pending:
            self.demo.settle(False)
        self.published = None

    # ---- private state -----------------------------------------------------------------------------------------------

    def private_image(self) -> Image:
        """This peer's momentum and open votes as a file's content, read in the same way as an `image`."""
        step, sha256 = self.published or (0, b"")
        bookkeeping = {"published_step": step, "published": sha256.hex(), "announcement": self.announcement.hex()}
        self._detach(private=True)
        own = self.demo.state_dict()
        if self.local is not None:
            own["local"] = self.local.state_dict()
        state = PrivateState(self.run_id, self.layout_digest, self.step, own, bookkeeping)
        return self._remember(image_of(state, live=self.live, spare=self._spares[True]), private=True)

    def save_private(self, path: Path) -> None:
        """This peer's momentum and open votes, atomically, now."""
        write_private(self.private_image().pieces, path)

    def load_private(self, path: Path) -> bool:
        """Load the saved momentum. Open votes of a step that is decided already go back into it."""
        state = load_private(path, self.run_id, self.layout_digest)
        if state is None:
            return False
        self._detach(private=True)
        self._folded_in = None
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
        """The payload of votes that an earlier life published and the log has not decided on, or None."""
        votes = self.demo.open_votes
        if self.published is None or votes is None:
            return None
        data = self._encoded(Update(self.published[0], votes.size, votes.payload))
        assert hash_of(data, self.ranges) == self.published[1], "the open votes are not those that were published"
        return data
