"""Tiles of chunks against the whole layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.optim.backends.portable import Portable
from node.optim.base import Base, BaseConfig
from node.optim.layout import Layout, core_pairs

CPU = torch.device("cpu")
SHAPES = [(130, 200), (5,), (64, 64), (), (0, 4), (200, 330), (63, 300), (64, 1), (256, 128)]


def layout_of(shapes):
    return Layout.of_shapes((f"p{index}", shape) for index, shape in enumerate(shapes))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([(64, 64), (130, 200), (200, 330), (5,), (320, 65)]), min_size=1, max_size=5),
    st.integers(1, 20),
)
def test_tiles_hold_what_the_whole_buffer_does(shapes, size):
    layout = layout_of(shapes)
    tensors = [torch.randn(shape) for shape in shapes]
    whole = layout.gather(tensors, layout.empty(CPU))
    for first in range(0, layout.core_chunks, size):
        last = min(first + size, layout.chunks)
        own = torch.full((last - first, 64, 64), torch.nan)
        for part, chunk in core_pairs(layout, tensors, slice(first, last), own):
            chunk.copy_(part)
        cores = min(last, layout.core_chunks) - first
        assert torch.equal(own[:cores], whole[first : first + cores])
        assert own[cores:].isnan().all(), "the pool was written"


def test_a_missing_tensor_gives_its_places():
    layout = layout_of(SHAPES)
    own = torch.ones(layout.core_chunks, 64, 64)
    for part, chunk in core_pairs(layout, [None] * len(SHAPES), slice(0, layout.core_chunks), own):
        assert part is None
        chunk.zero_()
    assert not own.any()


@pytest.mark.parametrize("tile_chunks", [1, 2, 7, 1000])
def test_the_size_of_a_tile_changes_nothing(tile_chunks):
    layout = layout_of(SHAPES)
    generator = torch.Generator().manual_seed(0)
    gradients, start = ([torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(2))
    results = []
    for size in (tile_chunks, layout.chunks):
        portable, momentum = (
            Portable(layout, CPU, size, Base(BaseConfig(), layout, CPU)),
            torch.zeros(layout.chunks, 64, 64),
        )
        parameters = [tensor.clone() for tensor in start]
        packed = portable.vote(gradients, momentum, 0.9, 1.0, 16)
        portable.apply([(16, packed.numpy().tobytes())], parameters, 0.5, 0.1)
        results.append((packed, parameters))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


def test_the_portable_step_holds_no_buffer_of_the_models_size():
    layout = layout_of([(640, 640), (128, 64)])
    portable = Portable(layout, CPU, 4, Base(BaseConfig(), layout, CPU))
    held = sum(value.numel() for value in vars(portable).values() if isinstance(value, torch.Tensor))
    assert held == 4 * 4 * 4096
