"""Encoding and decoding votes, at every group size and as top-k, on one core: beside the portable code, in one run."""

import argparse
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch

from node.optim.votes import bits, topk
from node.optim.votes import groups as votes
from tests.bench.timing import medians_ms
from tests.unit.optim import reference

REFERENCE_CHUNKS = 20
"""The reference codes this many chunks; rates are compared, not times."""

TOP_K = 32
"""Components of a chunk, as in DeMo's paper."""

IN_A_ROW = 10
"""Calls that are timed together; else each is timed with the caches and the free memory that another one left."""

DISTINCT_CHUNKS = 1000
"""Chunks of indices that are drawn; a model repeats them, since drawing takes longer than coding."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=int, default=50_000_000, help="parameters, about (default 50 million)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; medians are reported (default 7)")


def measure(options: argparse.Namespace) -> dict[str, object]:
    chunks = -(-options.params // 4096)
    result: dict[str, object] = {
        "params": options.params,
        "chunks": chunks,
        "threads": 1,
        "compiled": bits.compiled() is not None,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for group_size in votes.GROUP_SIZES:
            result[f"g{group_size}"] = vote_rates(group_size, chunks, options.rounds)
        result[f"topk{TOP_K}"] = top_k_rates(TOP_K, chunks, options.rounds)
    finally:
        torch.set_num_threads(threads)
    return result


def portably(action: Callable[[], object]) -> Callable[[], object]:
    """As without numba."""

    def run() -> object:
        with mock.patch.object(bits, "compiled", return_value=None):
            return action()

    return run


def repeated(action: Callable[[], object]) -> Callable[[], object]:
    """Many times in a row, as a node codes one peer's votes after the other's."""

    def run() -> None:
        for _ in range(IN_A_ROW):
            action()

    return run


def vote_rates(group_size: int, chunks: int, rounds: int) -> dict[str, float]:
    """Million votes a second both ways, and how many times faster than the portable code and the reference."""
    payload = np.random.default_rng(0).bytes(votes.vote_bytes(chunks, group_size))
    short = payload[: votes.vote_bytes(REFERENCE_CHUNKS, group_size)]
    chosen, listed = votes.decode(payload, group_size, chunks), reference.decode(short, group_size, REFERENCE_CHUNKS)
    many, few = chunks * votes.groups(group_size), REFERENCE_CHUNKS * votes.groups(group_size)
    speed = rates(
        lambda: votes.encode(*chosen, group_size), lambda: votes.decode(payload, group_size, chunks), many, rounds
    )
    slow = medians_ms(
        {
            "encode": lambda: reference.encode(listed, group_size),
            "decode": lambda: reference.decode(short, group_size, REFERENCE_CHUNKS),
        },
        rounds,
    )
    return {
        "bytes": len(payload),
        **{f"{name}_mvotes_s": round(value, 1) for name, value in speed.items()},
        **{f"{way}_ratio_to_portable": round(speed[way] / speed[f"portable_{way}"], 1) for way in slow},
        **{f"{way}_ratio_to_reference": round(speed[way] / (few / ms / 1e3), 1) for way, ms in slow.items()},
    }


def top_k_rates(k: int, chunks: int, rounds: int) -> dict[str, float]:
    """Bits a component with its sign, for uniform indices; million components a second both ways, without the signs."""
    scores = torch.rand(min(chunks, DISTINCT_CHUNKS), 4096, generator=torch.Generator().manual_seed(0))
    drawn = scores.topk(k).indices.sort(1).values
    chosen = drawn.repeat(-(-chunks // len(drawn)), 1)[:chunks]
    data = topk.encode(chosen, k)
    speed = rates(lambda: topk.encode(chosen, k), lambda: topk.decode(data, k, chunks), chunks * k, rounds)
    return {
        "bytes": len(data) + bits.packed_bytes(chunks * k, 1),
        "bits_per_component": round(8 * len(data) / (chunks * k) + 1, 3),
        **{f"{name}_mcomponents_s": round(value, 1) for name, value in speed.items()},
        **{f"{way}_ratio_to_portable": round(speed[way] / speed[f"portable_{way}"], 1) for way in ("encode", "decode")},
    }


def rates(encode: Callable[[], object], decode: Callable[[], object], count: int, rounds: int) -> dict[str, float]:
    """Million numbers a second, each way, compiled and portable."""
    actions = {"encode": encode, "decode": decode}
    actions |= {f"portable_{name}": portably(action) for name, action in actions.items()}
    times = medians_ms({name: repeated(action) for name, action in actions.items()}, rounds)
    return {name: IN_A_ROW * count / ms / 1e3 for name, ms in times.items()}
