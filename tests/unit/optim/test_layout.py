"""The layout: every element in one place, little padding, one digest."""

import numpy as np
import pytest
import torch
from torch import nn

from node.optim.layout import CHUNK_ELEMENTS, Layout
from tests.unit.optim import reference

ODD_SHAPES = [
    (257, 130),
    (64, 64),
    (3,),
    (),
    (129, 3, 5, 7),
    (63, 200),
    (200, 63),
    (128, 192),
    (1, 4097),
    (0, 5),
    (67, 64),
]


def tensors_of(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def layout_of(shapes):
    return Layout.of_shapes((f"p{index}", shape) for index, shape in enumerate(shapes))


@pytest.mark.parametrize("shapes", [ODD_SHAPES, [()], [(64, 64)], [(4096,)], [(0,)], [(128, 64, 3, 3), (7,)]])
def test_gather_then_scatter_gives_the_tensors_back_and_padding_is_zero(shapes):
    layout, tensors = layout_of(shapes), tensors_of(shapes)
    buffer = layout.gather(tensors, layout.empty("cpu").fill_(torch.nan))
    back = [torch.full(shape, torch.nan) for shape in shapes]
    layout.scatter(buffer, back)
    assert all(torch.equal(left, right) for left, right in zip(tensors, back, strict=True))
    padding = buffer[layout.core_chunks :].flatten()[layout.pool_elements :]
    assert padding.numel() == layout.chunks * CHUNK_ELEMENTS - layout.parameters < CHUNK_ELEMENTS
    assert not padding.any()


def test_gather_agrees_with_the_reference():
    layout, tensors = layout_of(ODD_SHAPES), tensors_of(ODD_SHAPES)
    expected = np.stack(reference.cut([tensor.numpy() for tensor in tensors]))
    assert np.array_equal(layout.gather(tensors, layout.empty("cpu")).numpy(), expected)


def test_missing_gradients_count_as_zeros_and_other_dtypes_and_strides_are_taken():
    shapes = [(70, 70), (5,), (65, 64, 2, 2)]
    layout, tensors = layout_of(shapes), tensors_of(shapes)
    strided = tensors[2].to(memory_format=torch.channels_last)
    buffer = layout.gather([None, tensors[1].bfloat16(), strided], layout.empty("cpu").fill_(9))
    expected = layout.gather([torch.zeros(70, 70), tensors[1].bfloat16().float(), tensors[2]], layout.empty("cpu"))
    assert torch.equal(buffer, expected)


def test_a_padding_of_a_real_model_stays_below_one_chunk():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(97, 1, 301), 3, enable_nested_tensor=False)
    layout = Layout.of(model)
    assert layout.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert layout.chunks * CHUNK_ELEMENTS - layout.parameters < CHUNK_ELEMENTS


def test_tied_weights_count_once_and_frozen_ones_not_at_all():
    model = nn.Sequential(nn.Embedding(70, 66), nn.Linear(66, 70, bias=False), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    assert [place.name for place in Layout.of(model).places] == ["0.weight"]
    pairs = list(model.named_parameters(remove_duplicate=False))
    shapes = [(place.name, place.shape) for place in Layout.of(pairs).places]
    assert Layout.of_shapes(shapes, {"0.weight": "table"}) == Layout.of(model)


def test_the_digest_covers_names_shapes_and_order():
    base = [("a", (64, 65)), ("b", (3,))]
    digests = {
        Layout.of_shapes(shapes).digest()
        for shapes in (base, base[::-1], [("a", (65, 64)), ("b", (3,))], [("c", (64, 65)), ("b", (3,))], base[:1])
    }
    assert len(digests) == 5
    assert Layout.of_shapes(base).digest() == Layout.of_shapes(base).digest()


def test_the_digest_is_pinned():
    digest = Layout.of_shapes([("a", (64, 65)), ("b", (3,))]).digest().hex()
    assert digest == "f906ac881e505cc4f6df088c20f885013d4edf284060c718ad13dda1fc120182"


def test_two_parameters_of_one_name_are_refused():
    with pytest.raises(ValueError, match="share a name"):
        Layout.of_shapes([("a", (1,)), ("a", (1,))])
