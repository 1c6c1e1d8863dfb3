"""`memory = "stream"`: the gradients of `host`, with the weights of two blocks at a time."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from node.model.size import blocks_of, no_stream, size_of
from node.model.spec import ModelSpec, build
from node.optim.step import NonFiniteGradient
from node.training.block_stream import BlockStream, Fetched
from node.training.host_maker import HostMaker
from node.training.replica import Replica
from protos.errors import OperatorError
from protos.optimizer_config import OptimizerConfig
from tests.unit.node.test_host_maker import CPU, PARTS, TEXT, TIED, Plain, equal, gradients, maker, never, short
from tests.unit.node.test_replica import LR, RUN

LAYERS = 5
DEEP = {**TIED, "num_hidden_layers": LAYERS}
GPT2 = {
    "model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 4, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.2,
    "attn_pdrop": 0.2, "embd_pdrop": 0.2, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS = {"tied": DEEP, "one layer": TIED, "untied": {**DEEP, "tie_word_embeddings": False}, "dropout": GPT2}


class Own(nn.Module):
    """Blocks of a person's own, in a list: `use` of their results, `named` by keyword."""

    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor] = lambda _, hidden: hidden) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.use = nn.Embedding(256, 64), nn.Linear(64, 256), use
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3)) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = hidden + layer(input=hidden)
        logits: Tensor = self.head(self.use(self, hidden))
        return logits


def replica(model: nn.Module, *, stream: bool = True, behind: bool = False) -> Replica:
    made = HostMaker(model, CPU, behind=behind, stream=stream)
    return Replica(RUN, model, OptimizerConfig(), 128, second="factored", maker=made)


def pair(make: Callable[[], nn.Module], *, behind: bool = False) -> tuple[Replica, Replica]:
    return replica(make(), stream=False, behind=behind), replica(make(), behind=behind)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("at_a_time", [8, 3])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_host_bit_for_bit(model: str, at_a_time: int, behind: bool) -> None:
    both = pair(lambda: build(ModelSpec(MODELS[model]), 1), behind=behind)
    for step in range(2):
        found = []
        for of in both:
            with torch.no_grad():
                for parameter in of.model.parameters():
                    parameter.mul_(1.1)  # what was brought for the step before is old
            torch.manual_seed(step)
            found.append(gradients(of, at_a_time))
        assert equal(*found)


@pytest.mark.parametrize("frozen", ["table", "layers.1", "layers", "model.layers.2"])
def test_own_blocks_and_frozen_ones(frozen: str) -> None:
    """A norm's frozen weight was gone in the backward pass: every gradient was NaN, in each step."""

    def make() -> nn.Module:
        model = build(ModelSpec(DEEP), 1) if "model" in frozen else Own()
        model.get_submodule(frozen).requires_grad_(requires_grad=False)
        return model

    found = []
    for of in pair(make):
        maker(of).ready(16)
        torch.manual_seed(3)
        found.append(gradients(of, 4))
    assert equal(*found)


@pytest.mark.parametrize("behind", [False, True])
def test_a_whole_step_makes_the_votes_of_host(behind: bool) -> None:
    both = pair(lambda: build(ModelSpec(DEEP), 1), behind=behind)
    votes = []
    for of in both:
        assert of.gradients(TEXT, PARTS, 3, short(), never, 1.0, LR).samples == 8
        of.rest()
        votes.append(of.vote(1, LR))
    assert votes[0] == votes[1]


# ---- what is on the device -------------------------------------------------------------------------------------------


class Watch:
    """Counts the blocks whose weights are in memory each time when one more is brought."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.there: list[int] = []
        self._storages: list[list[StorageWeakRef]] = []
        fetch = BlockStream._fetch

        def watched(of: BlockStream, block: int) -> Fetched:
            found = fetch(of, block)
            self.asked.append(block)
            self._storages.append([StorageWeakRef(own.untyped_storage()) for own in found.weights])
            self.there.append(self.blocks())
            return found

        monkeypatch.setattr(BlockStream, "_fetch", watched)

    def blocks(self) -> int:
        return sum(any(not storage.expired() for storage in block) for block in self._storages)


@pytest.mark.parametrize("behind", [False, True])
def test_two_blocks_at_a_time_are_on_the_device_each_brought_twice(
    behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, of = Watch(monkeypatch), replica(build(ModelSpec(DEEP), 1), behind=behind)
    gradients(of)
    assert watch.asked == [0, 1, 2, 3, 4, 3, 2, 1, 0], "the next one; at the turn it is there"
    assert max(watch.there) == 2
    assert watch.blocks() == 1, "the last one stays"
    blocks = {name for name, _ in of.model.named_parameters() if ".layers." in name}
    copies = dict(maker(of)._model.named_parameters())
    own = {name: copies[name].untyped_storage().nbytes() for name in copies}
    assert {own[name] for name in blocks} == {2}, "one number in bf16 stands for each"
    assert {own[name] == 2 * copies[name].numel() for name in own.keys() - blocks} == {True}
    of.rest()
    assert watch.blocks() == 0
    watch.asked.clear()
    gradients(of, 4)
    assert watch.asked == [0, 1, 2, 3, 4, 3, 2, 1, 0, 1, 2, 3, 4, 3, 2, 1, 0], "two micro-batches"


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
def test_a_pass_that_ends_in_the_middle_leaves_nothing_old(
    error: type[BaseException], behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a block is computed again, in the backward pass. Torch's own error means: take fewer samples."""
    watch, (plain, of) = Watch(monkeypatch), pair(lambda: build(ModelSpec(DEEP), 1), behind=behind)
    arrived, left = BlockStream._arrived, [9]

    def interrupted(stream: BlockStream, block: int) -> Fetched:
        left[0] -= 1
        if left[0] == 1:
            raise error("CUDA out of memory")
        return arrived(stream, block)

    monkeypatch.setattr(BlockStream, "_arrived", interrupted)
    if error is torch.OutOfMemoryError:
        assert equal(gradients(of), gradients(plain, 4))
    else:
        with pytest.raises(error):
            gradients(of)
    left[0] = 0
    for each in (plain, of):
        with torch.no_grad():
            for parameter in each.model.parameters():
                parameter.mul_(1.5)
    assert equal(gradients(of, 4), gradients(plain, 4))
    assert max(watch.there) == 2


@pytest.mark.parametrize("behind", [False, True])
def test_what_is_not_finite_makes_no_votes_and_the_next_step_does(behind: bool) -> None:
    both = pair(lambda: build(ModelSpec(DEEP), 1), behind=behind)
    votes = []
    for of in both:
        weight = dict(of.model.named_parameters())["model.layers.2.mlp.up_proj.weight"]
        with torch.no_grad():
            kept, weight[0, 0] = weight[0, 0].clone(), float("inf")
        with pytest.raises(NonFiniteGradient):
            of.gradients(TEXT, PARTS, 8, short(), never, 1.0, LR)
        with torch.no_grad():
            weight[0, 0] = kept
        of.gradients(TEXT, PARTS, 8, short(), never, 1.0, LR)
        votes.append(of.vote(1, LR))
    assert votes[0] == votes[1]


def test_a_copy_to_evaluate_reads_another_state_as_it_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, tokens = Watch(monkeypatch), torch.arange(32)[None]
    plain, of = pair(lambda: build(ModelSpec(DEEP), 1))
    (snapshot := tmp_path / "state").write_bytes(replica(build(ModelSpec(DEEP), 2)).packed()[1])
    copies = [maker(each).to_evaluate(safe_open(snapshot, "pt").get_tensor) for each in (plain, of)]  # type: ignore[no-untyped-call]
    snapshot.unlink()  # newer ones took its room
    with torch.no_grad(), short():
        found = [model(tokens).logits for model in copies]
    assert found[0].equal(found[1])
    assert not found[0].equal(build(ModelSpec(DEEP), 1)(tokens).logits)
    assert watch.asked == list(range(LAYERS))
    assert max(watch.there) == 2


# ---- what cannot stream ----------------------------------------------------------------------------------------------


def test_a_copy_that_has_evaluated_is_gone_at_once() -> None:
    """No waiting for the collector of cycles: each evaluation makes a copy, with weights, pinned room and a thread."""
    of = replica(build(ModelSpec(DEEP), 1), behind=True)
    gc.collect()
    gc.disable()
    try:
        before = threading.active_count()
        model = maker(of).to_evaluate(dict(of.whole_model().named_parameters()).__getitem__)
        with torch.no_grad(), short():
            model(torch.arange(32)[None])
        [block, *_] = [weakref.ref(block) for _, block in blocks_of(model)]
        del model
        assert block() is None
        until = time.monotonic() + 240
        while threading.active_count() > before and time.monotonic() < until:
            time.sleep(0.01)
        assert threading.active_count() == before
    finally:
        gc.enable()


def tied_layers() -> nn.Module:
    model = Own()
    layers: Any = model.layers
    layers[2][0].weight = layers[0][0].weight
    return model


def one_layer_three_times() -> nn.Module:
    model = Own()
    model.layers = nn.ModuleList([model.layers[0]] * 3)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Plain, r"the model has no repeated blocks \(modules of an nn.ModuleList\)"),
        (tied_layers, r"parameter layers\.0\.0\.weight is tied to one outside of its block"),
        (one_layer_three_times, r"parameter layers\.0\.0\.weight is tied to one outside of its block"),
    ],
)
def test_a_model_without_blocks_of_its_own_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(OperatorError, match=f"memory = stream: {words}; set memory to host or auto"):
        replica(make())
    assert no_stream(make())


def reads_outside(model: nn.Module, hidden: Tensor) -> Tensor:
    own: Any = model
    return hidden @ own.layers[0][0].weight


def test_a_model_that_reads_a_blocks_weights_elsewhere_is_refused_before_others_wait() -> None:
    with torch.no_grad():
        for parameter in (of := replica(Own(reads_outside))).model.parameters():
            parameter.fill_(torch.nan)  # as a late joiner's are
    with pytest.raises(OperatorError, match=r"memory = stream: .*outside of the block's forward.*set memory to host"):
        maker(of).ready(16)
    maker(replica(Own())).ready(16)


def test_sizes_of_blocks() -> None:
    size = size_of(ModelSpec(DEEP))
    assert size is not None
    assert size.outside + LAYERS * size.block == size.parameters
    assert size.no_stream == ""
