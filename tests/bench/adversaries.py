"""What adversaries cost a run, and what tells them from honest peers: peers of every kind in one process, on a real model.

A line-up trains its honest peers and lets the others vote for nothing: their votes are measured, not counted. A run counts
everybody's. `--figures` writes every observation, one JSON object a line. Decides nothing: that is coordinator/trust.py.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from node.audit import Seen, agreement, overlap, seen_votes, transformed
from node.data.corpus import open_corpus
from node.data.samples import Samples
from node.model.loss import loss
from node.model.spec import build, parameter_count
from node.optim.demo import DeMo, DeMoConfig
from tests.bench.convergence import SHAKESPEARE, model_spec, validation_loss

BETA, BETA2 = 0.95, 0.99
CHANGED: Final = 0.3
"""Of a copied payload's chunks, how many the copier makes up."""


@dataclass(frozen=True)
class Kind:
    """What a peer does. `forge(own votes, all honest votes, random)` gives the bytes it sends."""

    works: bool
    forge: Callable[[bytes, Sequence[bytes], np.random.Generator], bytes]


def _signs(group_size: int) -> int:
    """Which bits of a byte string of votes are signs, as one period: the top bit of every `bits(g)`."""
    return group_size.bit_length()


def flipped(payload: bytes, group_size: int) -> bytes:
    """The same coefficients, every sign turned."""
    width = _signs(group_size)
    bits = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little")
    bits[width - 1 :: width] ^= 1
    return np.packbits(bits, bitorder="little").tobytes()


def made_up(payload: bytes, random: np.random.Generator) -> bytes:
    """As many random bytes: every byte string of the right length is a valid payload."""
    return random.bytes(len(payload))


def partly(payload: bytes, chunks: int, part: float, random: np.random.Generator) -> bytes:
    """A payload of which `part` of the chunks are made up."""
    rows = np.frombuffer(payload, np.uint8).reshape(chunks, -1).copy()
    for row in random.choice(chunks, int(part * chunks), replace=False):
        rows[row] = np.frombuffer(random.bytes(rows.shape[1]), np.uint8)
    return rows.tobytes()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--what", choices=("lineup", "losses", "both"), default="both")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--peers", type=int, default=10)
    parser.add_argument("--bad", type=int, default=3, help="of the peers, in `losses` (default 3)")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--checked", type=int, default=4, help="samples that a check looks at")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64, help="of the model; with 2 layers 0.13 million parameters")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--every", type=int, default=2, help="of a line-up's steps one in so many is measured")
    parser.add_argument("--data", type=Path, help="a text file (default: tinyshakespeare, or the standard library)")
    parser.add_argument("--figures", type=Path, help="every observation of the line-ups, as JSON lines")
    parser.add_argument("--out", type=Path, default=Path("swarmentum-out/adversaries"))


def measure(options: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.data or (SHAKESPEARE if SHAKESPEARE.exists() else None)
    tokens = open_corpus(data, options.out).tokens
    result: dict[str, object] = {
        name: getattr(options, name) for name in ("seeds", "steps", "lr", "peers", "group_size", "batch", "width")
    }
    if options.what in ("losses", "both"):
        result["losses"] = losses(options, tokens)
    if options.what in ("lineup", "both"):
        found = [line for seed in options.seeds for line in lineup(options, tokens, seed)]
        if options.figures:
            options.figures.write_text("".join(json.dumps(line) + "\n" for line in found))
        result["lineup"] = summary(found)
    return result


@dataclass
class Crowd:
    """Replicas of one model. Peers `kinds[i]`: honest, flip, collude, random, echo, copy, changed, idle."""

    options: argparse.Namespace
    samples: Samples
    seed: int
    kinds: Sequence[str]
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        o = self.options
        self.model = build(model_spec(o.width, o.layers, o.context), self.seed, context=o.context)
        config = DeMoConfig(group_size=o.group_size, beta=BETA, beta2=BETA2)
        self.peers = [DeMo(self.model, config) for _ in self.kinds]
        self.random = np.random.default_rng(self.seed)
        self.taken = 0
        self.past: Tensor | None = None
        self.layout = self.peers[0].layout
        self.gradients: list[Tensor] = []

    def gradient(self, first: int, count: int) -> None:
        self.model.zero_grad()
        rows = torch.from_numpy(self.samples.batch(first, first + count))
        loss(self.model, rows).backward()  # type: ignore[no-untyped-call]

    def propose(self, lr: float, *, watched: bool = False) -> list[bytes]:
        """Everybody's payload of a step. With `watched`, `gradients` are those on the samples of each, transformed."""
        o, payloads = self.options, list[bytes]()
        self.gradients, self.first = [], self.taken
        for peer in self.peers:
            self.gradient(self.taken, o.batch)
            self.taken += o.batch
            if watched:
                self.gradients.append(transformed(self.layout, [p.grad for p in self.model.parameters()]))
            payloads.append(peer.propose(lr).payload)
        honest = [payload for payload, kind in zip(payloads, self.kinds, strict=True) if kind == "honest"]
        return [self.forged(kind, payload, honest) for kind, payload in zip(self.kinds, payloads, strict=True)]

    def forged(self, kind: str, own: bytes, honest: Sequence[bytes]) -> bytes:
        chunks, g = self.layout.chunks, self.options.group_size
        match kind:
            case "flip":
                return flipped(own, g)
            case "collude":  # all against the same honest peer: its votes are cancelled twice over
                return flipped(honest[0], g)
            case "random":
                return made_up(own, self.random)
            case "copy":
                return honest[0]
            case "changed":
                return partly(honest[0], chunks, CHANGED, self.random)
            case "echo":
                return own if self.past is None else self.echo()
        return own

    def echo(self) -> bytes:
        """No work: votes for what the log has moved lately."""
        form = self.peers[0].config.form
        assert self.past is not None
        return form.encode([form.choose(self.past, self.options.group_size)], self.options.group_size)

    def commit(self, payloads: Sequence[bytes], counted: Sequence[bool], lr: float) -> None:
        before = [parameter.detach().clone() for parameter in self.model.parameters()] if "echo" in self.kinds else []
        for peer, accepted in zip(self.peers, counted, strict=True):
            peer.settle(accepted)
        taken = [(self.options.group_size, p) for p, accepted in zip(payloads, counted, strict=True) if accepted]
        self.peers[0].apply(taken, lr)
        if before:
            moved = [b - p.detach() for b, p in zip(before, self.model.parameters(), strict=True)]
            here = transformed(self.layout, moved)
            self.past = here if self.past is None else self.past.mul_(BETA).add_(here)


def schedule(options: argparse.Namespace, step: int) -> float:
    """Linear warm-up over a tenth, then a cosine to a tenth, as in a run's defaults."""
    warmup = max(1, options.steps // 10)
    if step < warmup:
        return float(np.float32(options.lr * (step + 1) / warmup))
    done = (step - warmup) / (options.steps - warmup)
    return float(np.float32(options.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))))


# ---- what it costs ---------------------------------------------------------------------------------------------------


def losses(options: argparse.Namespace, tokens: object) -> dict[str, object]:
    """Held-out loss after a run, by what the bad peers do; the mean over the seeds, and against the honest run's."""
    good = options.peers - options.bad
    rows = {
        "honest": (["honest"] * options.peers, None),
        "honest, fewer": (["honest"] * good, None),
        **{f"{kind} x{options.bad}": (["honest"] * good + [kind] * options.bad, None)
           for kind in ("flip", "collude", "random", "copy")},
        **{f"{kind} x{options.bad} until step {n}": (["honest"] * good + [kind] * options.bad, n)
           for kind in ("flip", "collude") for n in (20, 50)},
    }  # fmt: skip
    table: dict[str, object] = {}
    base = 0.0
    for name, (kinds, until) in rows.items():
        found = [run(options, tokens, seed, kinds, until) for seed in options.seeds]
        mean = statistics.fmean(found)
        base = base or mean
        table[name] = {"loss": round(mean, 4), "to_honest": round(mean / base - 1, 4), "seeds": found}
        print(name, table[name], flush=True)
    return table


def run(options: argparse.Namespace, tokens: object, seed: int, kinds: Sequence[str], until: int | None) -> float:
    """A whole run; bad peers count until step `until` (None: to the end)."""
    samples = Samples(tokens, options.context, seed)  # type: ignore[arg-type]
    crowd = Crowd(options, samples, seed, kinds)
    for step in range(options.steps):
        lr = schedule(options, step)
        counted = [kind == "honest" or until is None or step < until for kind in kinds]
        crowd.commit(crowd.propose(lr), counted, lr)
    return round(validation_loss(crowd.model, torch.from_numpy(samples.validation(256))), 4)


# ---- what tells them apart -------------------------------------------------------------------------------------------

LINEUP: Final = ("honest",) * 6 + ("flip", "random", "echo", "copy", "changed")


def lineup(options: argparse.Namespace, tokens: object, seed: int) -> list[dict[str, object]]:
    """Every observation of every measured step: a peer by a checker, and a pair of payloads."""
    samples = Samples(tokens, options.context, seed)  # type: ignore[arg-type]
    crowd = Crowd(options, samples, seed, LINEUP)
    found: list[dict[str, object]] = []
    for step in range(options.steps):
        watched, lr = step % options.every == 0, schedule(options, step)
        payloads = crowd.propose(lr, watched=watched)
        if watched:
            found += observations(crowd, payloads, seed, step)
        crowd.commit(payloads, [kind == "honest" for kind in LINEUP], lr)
    return found


def observations(crowd: Crowd, payloads: Sequence[bytes], seed: int, step: int) -> list[dict[str, object]]:
    g, chunks = crowd.options.group_size, crowd.layout.chunks
    form = crowd.peers[0].config.form
    seen: list[Seen] = [seen_votes(form, payload, g, chunks) for payload in payloads]
    found: list[dict[str, object]] = []
    few = []
    for index in range(len(LINEUP)):  # what a checker can afford
        crowd.gradient(crowd.first + index * crowd.options.batch, min(crowd.options.checked, crowd.options.batch))
        few.append(transformed(crowd.layout, [p.grad for p in crowd.model.parameters()]))
    for index, kind in enumerate(LINEUP):
        checker = 1 + index % 5 if kind != "honest" else (index + 1) % 6
        own, theirs, cheap = crowd.gradients[index], crowd.gradients[checker], few[index]
        momentum = crowd.peers[checker].momentum
        found.append({
            "seed": seed, "step": step, "kind": kind,
            "own": agreement(seen[index], own), "random": agreement(seen[index], theirs),
            "difference": agreement(seen[index], own - theirs),
            "own_few": agreement(seen[index], cheap),
            "difference_few": agreement(seen[index], cheap - few[checker]),
            "random_sign": agreement(seen[index], theirs.sign()), "own_sign": agreement(seen[index], own.sign()),
            "momentum_sign": agreement(seen[index], momentum.sign()),
        })  # fmt: skip
    for one, kind in enumerate(LINEUP):
        for other in range(one):
            pair = sorted({kind, LINEUP[other]}, key=("honest", *LINEUP[6:]).index)
            found.append({"seed": seed, "step": step, "pair": "-".join(pair), "original": other == 0,
                          "overlap": overlap(seen[one], seen[other])})  # fmt: skip
    return found


def summary(found: Sequence[dict[str, object]]) -> dict[str, object]:
    """Quantiles of each figure by kind."""
    figures: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in found:
        who = str(line.get("kind") or f"{line['pair']}{' (original)' if line['original'] else ''}")
        for name, value in line.items():
            if isinstance(value, float):
                figures[name, who].append(value)
    return {
        f"{name} {who}": {
            "mean": round(statistics.fmean(values), 3), "deviation": round(statistics.pstdev(values), 3),
            **{f"q{q}": round(float(np.quantile(values, q / 100)), 3) for q in (0, 1, 10, 50, 90, 99, 100)},
            "n": len(values),
        }
        for (name, who), values in sorted(figures.items())
    }  # fmt: skip


def parameters(options: argparse.Namespace) -> int:
    return parameter_count(build(model_spec(options.width, options.layers, options.context), seed=0))
