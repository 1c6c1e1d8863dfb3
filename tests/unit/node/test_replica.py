"""The replica: private state, open votes, snapshots; on a tiny model."""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from node.data.samples import Samples
from node.model.gradients import GradResult
from node.model.spec import ModelSpec, build
from node.snapshot.pieces import iterate_pieces
from node.snapshot.private import write_private
from node.snapshot.store import SnapshotStore
from node.training.host_maker import HostMaker
from node.training.replica import Replica
from node.wire import UpdateDoor
from protos.assignment import Range
from protos.disk import DiskError
from protos.errors import OperatorError
from protos.identity import Identity
from protos.log import Contribution, Entry, SignedEntry, lr_to_bits, seal_entry
from protos.optimizer_config import OptimizerConfig
from tests.unit.model.test_spec import TINY

RUN = b"r" * 32
COORDINATOR, ADA, BOB = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
LR = 2.0**-9


def replica(seed: int = 0) -> Replica:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = torch.nn.Linear(70, 65)
    return Replica(RUN, model, OptimizerConfig(), 128)


def gradient(of: Replica, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in of.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


Payload = tuple[Identity, bytes, bytes]


def contributions(payloads: Sequence[Payload]) -> tuple[Contribution, ...]:
    found = sorted((who.public_key, sha256, len(data)) for who, sha256, data in payloads)
    return tuple(Contribution(key, sha256, size, 1, 1, 1.0) for key, sha256, size in found)


def entry(at: Replica, *payloads: Payload, trials: Sequence[Payload] = ()) -> SignedEntry:
    made = Entry(
        at.step + 1, at.head, contributions(payloads), lr_to_bits(LR), b"", (), 1, trials=contributions(trials)
    )
    return seal_entry(COORDINATOR, RUN, made)


def vote(of: Replica, seed: int) -> tuple[bytes, bytes]:
    gradient(of, seed)
    data = of.vote(of.step + 1, LR)
    return of.published[1], data


def apply(to: Replica, signed: SignedEntry, *data: bytes) -> bool:
    door = UpdateDoor(RUN, to.layout_digest, to.demo.layout.chunks)
    return to.apply(signed, [door.open(payload, signed.entry.step) for payload in data])


def test_momentum_is_spent_only_on_votes_that_the_log_accepted() -> None:
    ada, bob = replica(), replica()
    sha_a, data_a = vote(ada, 1)
    sha_b, data_b = vote(bob, 2)
    before = bob.demo.momentum.clone()
    signed = entry(ada, (ADA, sha_a, data_a))
    assert apply(ada, signed, data_a)
    assert not apply(bob, signed, data_a)
    assert torch.equal(bob.demo.momentum, before), "votes that did not count were spent"
    assert int((ada.demo.momentum == 0).sum()) >= ada.demo.layout.chunks * 32
    assert ada.digest() == bob.digest()
    assert sha_b != sha_a
    assert data_b != data_a


def test_votes_on_trial_leave_the_momentum_and_change_no_parameter() -> None:
    """A newcomer that kept them would vote for them again and again, and fail the checks of newer samples (ADR 16)."""
    ada, bob = replica(), replica()
    sha_a, data_a = vote(ada, 1)
    sha_b, data_b = vote(bob, 2)
    signed = entry(ada, (ADA, sha_a, data_a), trials=((BOB, sha_b, data_b),))
    assert apply(ada, signed, data_a)
    assert not apply(bob, signed, data_a), "they do not count"
    assert int((bob.demo.momentum == 0).sum()) >= bob.demo.layout.chunks * 32
    assert ada.digest() == bob.digest()


@pytest.mark.parametrize("published", [False, True])
def test_private_state_comes_back_with_and_without_open_votes(tmp_path: Path, published: bool) -> None:
    ada = replica()
    sha256, data = vote(ada, 1) if published else (b"", b"")
    ada.announcement = b"\x08\x01" if published else b""
    ada.save_private(tmp_path / "private.pt")
    again = replica()
    assert again.load_private(tmp_path / "private.pt")
    assert torch.equal(again.demo.momentum, ada.demo.momentum)
    assert again.open_payload() == (data if published else None)
    if published:
        assert again.announcement == ada.announcement
        assert apply(again, entry(again, (ADA, sha256, data)), data), "its votes from the earlier life did not count"


def test_open_votes_of_a_decided_step_go_back_into_the_momentum(tmp_path: Path) -> None:
    ada, bob = replica(), replica()
    vote(ada, 1)
    ada.save_private(tmp_path / "private.pt")
    again = replica()
    sha256, data = vote(bob, 2)
    apply(again, entry(again, (BOB, sha256, data)), data)
    assert again.load_private(tmp_path / "private.pt")
    assert not again.demo.pending
    assert again.open_payload() is None
    assert torch.equal(again.demo.momentum, ada.demo.momentum)


def test_an_image_is_the_state_as_it_was(tmp_path: Path) -> None:
    """Read before, while and after the replica goes on: the same bytes, and those that a file in memory has."""
    for read_first in (0, 1, 3):
        ada, store = replica(), SnapshotStore(tmp_path / f"pieces-{read_first}", 1 << 20)
        manifest, packed = ada.packed()
        image = ada.image()
        pieces = image.pieces(1000)
        found = [bytes(next(pieces)) for _ in range(read_first)]
        sha256, data = vote(ada, 1)
        assert apply(ada, entry(ada, (ADA, sha256, data)), data)
        assert image.detached
        assert b"".join([*found, *map(bytes, pieces)]) == packed
        late = replica(seed=9)
        described = partial(replace, manifest)
        stored = store.write(
            iterate_pieces(packed, manifest.piece_bytes),
            len(packed),
            lambda hashes, of=described: of(piece_hashes=hashes),  # type: ignore[misc]
        )
        late.load(manifest, store.file(stored.root))
        assert late.whole_digest() == replica().whole_digest()
        assert late.packed()[0].root == manifest.root


def test_an_image_that_nobody_reads_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer asked one for its size at its start: the first update copied the whole state, and kept it."""
    ada = replica()
    assert ada.image().total_bytes
    monkeypatch.setattr("node.snapshot.image.SpareMemory.take", raising(AssertionError("it was copied")))
    sha256, data = vote(ada, 1)
    assert apply(ada, entry(ada, (ADA, sha256, data)), data)


def test_momentum_that_is_being_saved_is_as_it_was(tmp_path: Path) -> None:
    ada = replica()
    vote(ada, 1)
    ada.demo.settle(True)
    before = ada.demo.momentum.clone()
    image = ada.private_image()
    vote(ada, 2)
    assert not torch.equal(ada.demo.momentum, before)
    write_private(image.pieces, tmp_path / "private.pt")
    again = replica()
    assert again.load_private(tmp_path / "private.pt")
    assert torch.equal(again.demo.momentum, before)


class Hungry(torch.nn.Module):
    """A model for which there is no room beyond `room` samples: it then asks torch for more memory than any machine has."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.inner, self.room = build(ModelSpec(TINY), 1), room
        self.seen: list[int] = []

    def forward(self, input_ids: torch.Tensor, **given: Any) -> Any:
        self.seen.append(len(input_ids))
        if len(input_ids) > self.room:
            torch.empty(1 << 52)
        return self.inner(input_ids=input_ids, **given)


def over(model: torch.nn.Module, samples: int, at_a_time: int) -> tuple[Replica, GradResult]:
    of = Replica(RUN, model, OptimizerConfig(), 128)
    text = Samples(np.arange(4000) % 250, 16, seed=1)
    return of, of.gradients(text, [Range(0, samples)], at_a_time, None, lambda: False)


def test_with_too_little_memory_fewer_samples_go_through_at_a_time() -> None:
    model = Hungry(room=3)
    of, result = over(model, samples=7, at_a_time=16)
    assert model.seen == [7, 3, 3, 1], "7 do not fit, half as many do"
    whole = Hungry(room=7)
    _, alike = over(whole, samples=7, at_a_time=7)
    assert (result.samples, result.tokens) == (alike.samples, alike.tokens)
    assert result.loss_mean == pytest.approx(alike.loss_mean, rel=1e-5)
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-6)
    model.seen.clear()
    of.gradients(Samples(np.arange(4000) % 250, 16, seed=1), [Range(7, 12)], 16, None, lambda: False)
    assert model.seen == [3, 2], "it remembers"


def test_no_room_for_one_sample_is_a_clear_error() -> None:
    with pytest.raises(OperatorError, match=r"cpu has no room for one sample of this model \(.*; close other programs"):
        over(Hungry(room=0), samples=4, at_a_time=4)


def test_other_failures_of_torch_are_not_taken_for_want_of_memory() -> None:
    class Wrong(Hungry):
        def forward(self, input_ids: torch.Tensor, **given: Any) -> Any:
            return torch.ones(2, 3) @ torch.ones(2, 3)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        over(Wrong(room=0), samples=4, at_a_time=4)


def test_a_model_that_casts_itself_ends_the_peer_with_a_sentence() -> None:
    """Not with a traceback, and not with a heap that is written over."""
    it = replica()
    for parameter in it.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    it.model.double()
    with pytest.raises(OperatorError, match=r"the model changes while it trains: parameter .* is float64"):
        it.vote(1, 2.0**-10)


Making = Callable[..., Replica]


@pytest.fixture(params=["small", "host", "host, behind", "stream"])
def small(request: pytest.FixtureRequest) -> Making:
    """As a peer that saves memory has it, on a card (`behind`) or on a CPU."""

    def make(model: torch.nn.Module, overlap: bool = False, copy_folder: Path | None = None) -> Replica:
        own: dict[str, Any] = {"second": "factored", "copy_folder": copy_folder}
        if request.param != "small":
            behind, stream = request.param == "host, behind", request.param == "stream"
            own["maker"] = HostMaker(model, torch.device("cpu"), behind=behind, stream=stream)
        return Replica(RUN, model, OptimizerConfig(overlap=overlap), 128, **own)

    return make


def text() -> Samples:
    return Samples(np.arange(4000) % 250, 16, seed=1)


def test_a_peer_that_saves_memory_has_no_gradients_and_the_votes_of_one_that_keeps_them(small: Making) -> None:
    whole, folded = (small(build(ModelSpec(TINY), 1)) for _ in range(2))
    for step in (1, 2):
        for of, lr in ((whole, None), (folded, LR)):
            result = of.gradients(text(), [Range(8 * step, 8 * step + 8)], 8, None, lambda: False, 1.0, lr)
            assert result.samples == 8
            assert all((parameter.grad is None) is (of is folded) for parameter in of.model.parameters())
        assert whole.vote(step, LR) == folded.vote(step, LR)
        for of in (whole, folded):
            of.demo.settle(step == 1)
    assert folded.demo.momentum.equal(whole.demo.momentum)  # type: ignore[union-attr]
    assert folded.demo.momentum.dtype == torch.bfloat16  # type: ignore[union-attr]


@pytest.mark.parametrize("at_a_time", [1, 3])
def test_several_micro_batches_make_nearly_the_momentum_of_one(small: Making, at_a_time: int) -> None:
    one, several = (small(build(ModelSpec(TINY), 1)) for _ in range(2))
    for of, size in ((one, 8), (several, at_a_time)):
        assert of.gradients(text(), [Range(0, 8)], size, None, lambda: False, 1.0, LR).samples == 8
        assert all(parameter.grad is None for parameter in of.model.parameters())
    expected, found = one.demo.momentum.float(), several.demo.momentum.float()  # type: ignore[union-attr]
    assert float((found - expected).norm() / expected.norm()) < 0.02


def test_a_late_gradient_stays_in_the_momentum_and_a_stopped_one_leaves_it(small: Making) -> None:
    it = small(build(ModelSpec(TINY), 1))
    assert not it.gradients(text(), [Range(0, 8)], 3, None, lambda: True, 1.0, LR).samples
    assert not it.demo.momentum.any(), "it stopped before the first sample"  # type: ignore[union-attr]
    answers = iter([False, False, True])
    assert it.gradients(text(), [Range(0, 8)], 3, None, lambda: next(answers), 1.0, LR).samples == 6
    assert not it.demo.momentum.any(), "it stopped before the last one"  # type: ignore[union-attr]
    assert it.gradients(text(), [Range(0, 8)], 3, None, lambda: False, 1.0, LR).samples
    late = it.demo.momentum.clone()  # type: ignore[union-attr]
    assert late.any()
    it.gradients(text(), [Range(8, 16)], 3, None, lambda: False, 1.0, LR)
    assert not it.demo.momentum.equal(late)  # type: ignore[union-attr]
    assert it.vote(2, LR)


def test_a_step_that_is_asked_for_again_joins_the_momentum_once(small: Making) -> None:
    """The owner paused the peer after the last pass, and let it go on while the step was open."""
    once, again = (small(build(ModelSpec(TINY), 1)) for _ in range(2))
    for of, times in ((once, 1), (again, 2)):
        for _ in range(times):
            result = of.gradients(text(), [Range(0, 8)], 8, None, lambda: False, 1.0, LR)
            assert (result.samples, result.tokens) == (8, 8 * 16)
            of.rest()
    assert again.demo.momentum.equal(once.demo.momentum)  # type: ignore[union-attr]
    assert once.vote(1, LR) == again.vote(1, LR)
    once.demo.settle(True)
    once.gradients(text(), [Range(0, 8)], 8, None, lambda: False, 1.0, LR)
    assert not once.demo.momentum.equal(again.demo.momentum), "after votes, it is another gradient"  # type: ignore[union-attr]


def test_a_saved_momentum_is_that_of_its_step_while_the_next_gradients_join(small: Making, tmp_path: Path) -> None:
    it = small(build(ModelSpec(TINY), 1))
    it.gradients(text(), [Range(0, 8)], 8, None, lambda: False, 1.0, LR)
    it.vote(1, LR)
    it.demo.settle(True)
    before, image = it.demo.momentum.clone(), it.private_image()  # type: ignore[union-attr]
    it.gradients(text(), [Range(8, 16)], 8, None, lambda: False, 1.0, LR)
    write_private(image.pieces, tmp_path / "private")
    other = small(build(ModelSpec(TINY), 1))
    assert other.load_private(tmp_path / "private")
    assert other.demo.momentum.equal(before)  # type: ignore[union-attr]


def test_a_full_disk_in_the_middle_of_a_backward_pass_is_a_disk_error_and_changes_nothing(
    small: Making, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = small(build(ModelSpec(TINY), 1), copy_folder=tmp_path / "run")
    image, before = it.private_image(), it.demo.state_dict()
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", raising(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(DiskError, match="No space left"):
            it.gradients(text(), [Range(0, 8)], 8, None, lambda: False, 1.0, LR)
    assert not it.demo.state_dict()["momentum"].any()
    assert it.demo.state_dict()["second"]["counts"] == before["second"]["counts"]
    it.gradients(text(), [Range(0, 8)], 8, None, lambda: False, 1.0, LR)
    assert it.demo.state_dict()["momentum"].any()
    write_private(image.pieces, tmp_path / "private")
    other = small(build(ModelSpec(TINY), 1))
    assert other.load_private(tmp_path / "private")
    assert not other.demo.state_dict()["momentum"].any(), "what was to be saved"


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_an_old_momentum_of_a_whole_state_is_taken_up_by_one_that_saves_memory(small: Making, tmp_path: Path) -> None:
    long = Replica(RUN, build(ModelSpec(TINY), 1), OptimizerConfig(), 128)
    long.gradients(text(), [Range(0, 8)], 8, None, lambda: False)
    long.vote(1, LR)
    long.save_private(tmp_path / "private")
    short = small(build(ModelSpec(TINY), 1))
    assert short.load_private(tmp_path / "private")
    assert short.open_payload() == long.open_payload()
    assert short.demo.momentum.equal(long.demo.momentum.bfloat16())  # type: ignore[union-attr]
    short.save_private(tmp_path / "private")
    assert long.load_private(tmp_path / "private")


def test_with_overlap_gradients_stay_whole(small: Making) -> None:
    it = small(build(ModelSpec(TINY), 1), overlap=True)
    it.gradients(text(), [Range(0, 8)], 8, None, lambda: False, 1.0, LR)
    assert all(parameter.grad is not None for parameter in it.model.parameters())


def test_a_pass_that_ran_out_of_memory_joins_the_momentum_once(small: Making) -> None:
    hungry, fed = (small(Hungry(room)) for room in (3, 7))
    for of in (hungry, fed):
        assert of.gradients(text(), [Range(0, 7)], 7, None, lambda: False, 1.0, LR).samples == 7
    found, expected = hungry.demo.momentum.float(), fed.demo.momentum.float()  # type: ignore[union-attr]
    assert float((found - expected).norm() / expected.norm()) < 0.02
