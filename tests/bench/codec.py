"""Encoding and decoding votes at every group size, against the reference coding, in one run."""

import argparse

import numpy as np

from node.optim import reference, votes
from tests.bench.timing import medians_ms

REFERENCE_CHUNKS = 20
"""The reference codes this many chunks; rates are compared, not times."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=int, default=50_000_000, help="parameters, about (default 50 million)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; medians are reported (default 7)")


def measure(options: argparse.Namespace) -> dict[str, object]:
    chunks = -(-options.params // 4096)
    result: dict[str, object] = {"params": options.params, "chunks": chunks}
    for group_size in votes.GROUP_SIZES:
        result[f"g{group_size}"] = rates(group_size, chunks, options.rounds)
    return result


def rates(group_size: int, chunks: int, rounds: int) -> dict[str, float]:
    """Million votes a second both ways, and how many times faster than the reference."""
    payload = np.random.default_rng(0).bytes(votes.vote_bytes(chunks, group_size))
    short = payload[: votes.vote_bytes(REFERENCE_CHUNKS, group_size)]
    chosen, listed = votes.decode(payload, group_size, chunks), reference.decode(short, group_size, REFERENCE_CHUNKS)
    times = medians_ms(
        {
            "encode": lambda: votes.encode(*chosen, group_size),
            "decode": lambda: votes.decode(payload, group_size, chunks),
            "reference_encode": lambda: reference.encode(listed, group_size),
            "reference_decode": lambda: reference.decode(short, group_size, REFERENCE_CHUNKS),
        },
        rounds,
    )
    many, few = chunks * votes.groups(group_size), REFERENCE_CHUNKS * votes.groups(group_size)
    speed = {name: (few if "reference" in name else many) / ms / 1e3 for name, ms in times.items()}
    return {
        "bytes": len(payload),
        "encode_mvotes_s": round(speed["encode"], 1),
        "decode_mvotes_s": round(speed["decode"], 1),
        "encode_ratio_to_reference": round(speed["encode"] / speed["reference_encode"], 1),
        "decode_ratio_to_reference": round(speed["decode"] / speed["reference_decode"], 1),
    }
