"""The state digest: every bit counts, and the parts of a large model cover it."""

import pytest
import torch

from node.optim.digest import DIGEST_BYTES_MAX, part_bytes, part_of, state_digest


def test_every_bit_counts():
    tensors = [torch.arange(6.0).view(2, 3), torch.zeros(3)]
    digest = state_digest(tensors)
    tensors[1][2] = -0.0
    assert state_digest(tensors) != digest


def test_the_digest_is_pinned():
    assert (
        state_digest([torch.arange(6.0), torch.ones(2, 2)]).hex()
        == "d29e848b22e93ff5e0f09549c0974a1e0da401a44585afbe048165e14e36654d"
    )


def test_parts_cover_every_element_once_in_a_round():
    tensors = [torch.arange(10.0), torch.arange(7.0), torch.tensor(3.0)]
    parts = 5  # 18 elements, 4 at a time
    before = [state_digest(tensors, step, bytes_max=16) for step in range(parts)]
    assert len(set(before)) == parts
    assert state_digest(tensors, parts, bytes_max=16) == before[0]
    for tensor in tensors:
        for index in range(tensor.numel()):
            changed = [tensor.clone() for tensor in tensors]
            which = next(i for i, t in enumerate(tensors) if t is tensor)
            changed[which].view(-1)[index] += 1
            after = [state_digest(changed, step, bytes_max=16) for step in range(parts)]
            assert sum(left != right for left, right in zip(before, after, strict=True)) == 1


def test_the_parts_of_a_large_state_grow_until_all_are_covered_in_time():
    tensors = [torch.arange(1000.0), torch.arange(30.0)]
    size = 4 * 1030
    assert part_of(size, 5, bytes_max=64) == (5, 65)
    assert part_of(size, 5, 16, bytes_max=64) == (5, 16)
    assert part_of(size, 5, 1000, bytes_max=64) == (5, 65), "parts never shrink"
    changed = [tensors[0], tensors[1].clone()]
    changed[1][-1] = -1.0
    pairs = [[state_digest(it, step, 16, bytes_max=64) for step in range(16)] for it in (tensors, changed)]
    assert [left == right for left, right in zip(*pairs, strict=True)] == [True] * 15 + [False]


def test_states_of_up_to_a_gibibyte_keep_the_digests_of_before():
    for size in (4, DIGEST_BYTES_MAX, 16 * DIGEST_BYTES_MAX):
        assert part_of(size, 7) == part_of(size, 7, 16)
    large = 16 * DIGEST_BYTES_MAX + 4
    assert part_of(large, 16)[1] == 17
    assert part_of(large, 16, 16)[1] == 16
    for size in (large, 4 * 1_235_814_400, 4 * 8_030_261_248):
        assert part_bytes(size, 16) * 16 >= size
        assert part_bytes(size, 16) % 4 == 0


def test_a_small_model_is_hashed_whole_at_every_step():
    tensors = [torch.randn(5)]
    assert state_digest(tensors, 3) == state_digest(tensors)


def test_other_dtypes_are_our_own_mistake():
    with pytest.raises(AssertionError):
        state_digest([torch.zeros(2, dtype=torch.bfloat16)])
