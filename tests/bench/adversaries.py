"""What adversaries cost a run, and what tells them from honest peers: peers of every kind in one process, on a real model.

A line-up trains its honest peers and lets the others vote for nothing: their votes are measured, not counted. A run counts
everybody's. `--figures` writes every observation, one JSON object a line. Decides nothing: that is coordinator/clock/trust.py.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from coordinator.clock.effects import EntryCommitted
from coordinator.clock.events import Claim, Connected, JoinAsked, Reported
from node.data.corpus import open_corpus
from node.data.samples import Samples
from node.model.gradients import loss
from node.model.spec import build
from node.optim.base import BY_CHUNKS, BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE
from node.optim.local import LocalConfig, LocalSteps
from node.optim.parameter_groups import author_of
from node.optim.votes import bits
from node.optim.votes import groups as votes
from node.optim.votes.payload import Format
from node.optim.votes.places import Draw
from node.optim.votes.values import EIGHT_BIT
from node.training import vote_checks as checking
from node.training.replica import cut
from node.training.vote_checks import Seen, agreement, difference, gain, overlap, seen_votes, transformed
from protos.assignment import Range, assign, split_samples
from protos.log import Entry, SignedEntry, Verdict
from protos.optimizer_config import OptimizerConfig
from protos.run_config import ClockConfig, RunConfig, TrustConfig
from protos.tick import Tick
from tests.bench.convergence import SHAKESPEARE
from tests.bench.readers import READERS, Known, forged
from tests.bench.trial import model_spec, validation_loss
from tests.unit.coordinator.driver import LAYOUT, Harness, digest_of, snapshot_at

T = TypeVar("T")
BASES: Final = {"sign": BaseConfig(), "default": BY_CHUNKS}
BETA, BETA2 = 0.95, 0.99
IDLE: Final = ("echo", "lie", "inflate")
"""These vote for what the run did lately; the last two lie as checkers, too."""
CHANGED: Final = 0.3
"""Of a copied payload's chunks, how many the copier makes up."""


def flipped(form: Format, payload: bytes, group_size: int) -> bytes:
    """The same coefficients, every sign turned."""
    if form.drawn:
        return bytes(byte ^ 0xFF for byte in payload)
    width = group_size.bit_length()
    every = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little")
    every[width - 1 :: width] ^= 1
    return np.packbits(every, bitorder="little").tobytes()


def settled(form: Format, payload: bytes, chunks: int, g: int) -> bytes:
    """The same with the codes of votes of size 0 (8 bits) put to 0: a door takes them no other way."""
    if form.grid is not EIGHT_BIT:
        return payload
    count, width = chunks * votes.groups(g), votes.bits(g)
    front = len(payload) - votes.vote_bytes(chunks, g)
    raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    sizes = bits.unpack(raw[front - bits.packed_bytes(count, 7) : front], 7, count)
    codes = bits.unpack(raw[front:], width, count).masked_fill(sizes == 0, 0)
    return payload[:front] + votes.to_bytes(bits.pack(codes, width))


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
    parser.add_argument(
        "--what", choices=("losses", "lineup", "trial"), nargs="+", default=["losses", "lineup", "trial"]
    )
    parser.add_argument("--rows", nargs="+", help="of `losses` and `trial`, by name (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--lr-final-ratio", type=float, default=0.1)
    parser.add_argument("--peers", type=int, default=10)
    parser.add_argument("--bad", type=int, default=3, help="of the peers, in `losses` (default 3)")
    parser.add_argument("--group-size", type=int, default=16, help="group size, or one in so many at random places")
    parser.add_argument("--selection", choices=("groups", "random", "independent"), default="groups")
    parser.add_argument("--cap", type=int, default=2, help="of the sums (default 2)")
    parser.add_argument("--base", choices=BASES, default="sign", help="'default' is that of a run (default sign)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--speeds", type=float, nargs="+", help="of the peers of `trial`, relative (default: all equal)"
    )
    parser.add_argument(
        "--wobble", type=float, default=0.0, help="deviation of the logarithm of a peer's time for a step (default 0)"
    )
    parser.add_argument("--local-steps", type=int, default=1, help="AdamW steps on a batch (default 1: none)")
    parser.add_argument("--local-lr", type=float, default=1e-3)
    parser.add_argument("--checked", type=int, default=32, help="samples that a check looks at, at most")
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
        name: getattr(options, name)
        for name in (
            "seeds",
            "steps",
            "lr",
            "lr_final_ratio",
            "peers",
            "selection",
            "group_size",
            "cap",
            "batch",
            "width",
            "checked",
            "local_steps",
            "local_lr",
        )
    }
    if "losses" in options.what:
        result["losses"] = losses(options, tokens)
    if "lineup" in options.what:
        found = [line for seed in options.seeds for line in lineup(options, tokens, seed)]
        if options.figures:
            options.figures.write_text("".join(json.dumps(line) + "\n" for line in found))
        result["lineup"] = summary(found)
    if "trial" in options.what:
        result["trial"] = trials(options, tokens)
    return result


@dataclass
class Crowd:
    """Replicas of one model. Peers `kinds[i]`: honest, flip, collude, random, echo, copy, changed, idle.

    `lie` and `inflate` vote as `echo` does, and lie as checkers.
    """

    options: argparse.Namespace
    samples: Samples
    seed: int
    kinds: Sequence[str]
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        o = self.options
        self.model = build(model_spec(o.width, o.layers, o.context), self.seed, context=o.context)
        chosen: dict[str, Any] = {"selection": o.selection, "seed": str(self.seed).encode(), "cap": o.cap}
        chosen["group_size" if o.selection == "groups" else "one_in"] = o.group_size
        config = DeMoConfig(beta=BETA, beta2=BETA2, base=BASES[o.base], **chosen)
        if o.local_steps > 1:
            sized: dict[str, Any] = {"values": "8bit", "magnitudes": True, "base": BaseConfig("sgd")}
            config = DeMoConfig(group_size=o.group_size, beta=BETA, clip_norm=None, **sized)
        self.peers = [DeMo(self.model, replace(config, author=author_of(n))) for n in range(len(self.kinds))]
        local = LocalConfig(o.local_steps, o.local_lr)
        self.local = [LocalSteps(list(self.model.parameters()), local) for _ in self.kinds if o.local_steps > 1]
        self.random = np.random.default_rng(self.seed)
        self.taken = 0
        self.past: Tensor | None = None
        self.usual = (0.0, -1.0, -1.0)
        """The typical difference of checks and the least gains, as everybody can estimate them."""
        self.scores = [0.0] * len(self.kinds)
        self.step = 0
        self.layout = self.peers[0].layout

    def draw(self, n: int) -> Draw:
        """What the places of peer n's votes of the step follow from."""
        return Draw(self.peers[0].config.seed, self.step, (author_of(n),))

    def seen(self, n: int, payload: bytes) -> Seen:
        """The votes of peer n's payload of the present step."""
        form, chunks = self.peers[0].config.form, self.layout.chunks
        return seen_votes(form, payload, self.options.group_size, chunks, self.draw(n))

    def encoded(self, n: int, momentum: Tensor) -> bytes:
        """A payload of peer n, of the present step."""
        form, size = self.peers[0].config.form, self.options.group_size
        return form.encode([form.choose(momentum, size, None, self.draw(n))], size)

    def gradient(self, ranges: Sequence[Range]) -> None:
        self.model.zero_grad()
        rows = np.concatenate([self.samples.batch(part.start, part.stop) for part in ranges])
        loss(self.model, torch.from_numpy(rows)).backward()  # type: ignore[no-untyped-call]

    def seen_gradient(self, ranges: Sequence[Range]) -> Tensor:
        """As votes see it."""
        self.gradient(ranges)
        return transformed(self.layout, [p.grad for p in self.model.parameters()])

    def next_ranges(self) -> list[tuple[Range, ...]]:
        """Equal parts of what comes next, one a peer."""
        batch, first = self.options.batch, self.taken
        self.taken += batch * len(self.peers)
        return [(Range(first + i * batch, first + (i + 1) * batch),) for i in range(len(self.peers))]

    def propose(self, lr: float, ranges: Sequence[Sequence[Range]]) -> list[bytes]:
        """Everybody's payload of a step, on the samples of each; without samples none (empty)."""
        payloads = []
        self.step += 1
        for n, (peer, part) in enumerate(zip(self.peers, ranges, strict=True)):
            if part and self.local:
                self.local[n].borrow()
                for few in cut(part, self.options.local_steps):
                    self.gradient(few)
                    self.local[n].step(lr / self.options.lr)
                self.local[n].give_back()
            elif part:
                self.gradient(part)
            payloads.append(peer.propose(lr, self.step).payload if part else b"")
        honest = [payload for payload, kind in zip(payloads, self.kinds, strict=True) if kind == "honest" and payload]
        if any(kind in READERS for kind in self.kinds):
            payloads = self.read_rules(payloads, ranges)
        return [payload and self.forged(n, payload, honest) for n, payload in enumerate(payloads)]

    def read_rules(self, payloads: Sequence[bytes], ranges: Sequence[Sequence[Range]]) -> list[bytes]:
        """The payloads with those of attackers that read the rules in place of their honest ones."""
        g = self.options.group_size if not self.peers[0].config.form.drawn else None
        grads = [self.seen_gradient(part) if part else None for part in ranges]
        there = [gradient for gradient in grads if gradient is not None]
        past = self.past if self.past is not None else torch.stack(there).mean(0)
        made = list(payloads)
        for n, (kind, own) in enumerate(zip(self.kinds, grads, strict=True)):
            if kind not in READERS or own is None:
                continue
            others = [gradient for m, gradient in enumerate(grads) if m != n and gradient is not None]
            known = Known(self.step, own, others, past, *self.usual, self.scores[n], g)
            made_votes = forged(kind, self.seen(n, payloads[n]), known)
            meant = torch.zeros(self.layout.chunks, CHUNK_ELEMENTS)
            meant.scatter_(1, made_votes.where, made_votes.values.sign())
            made[n] = self.encoded(n, meant.view(-1, CHUNK_SIDE, CHUNK_SIDE))
        return made

    def forged(self, n: int, own: bytes, honest: Sequence[bytes]) -> bytes:
        kind = self.kinds[n]
        if kind in {"honest", "idle", *READERS}:
            return own
        made = self.echo(n) if kind in IDLE and self.past is not None else self._made(kind, own, honest)
        return settled(self.peers[0].config.form, made, self.layout.chunks, self.options.group_size)

    def _made(self, kind: str, own: bytes, honest: Sequence[bytes]) -> bytes:
        chunks, g = self.layout.chunks, self.options.group_size
        form = self.peers[0].config.form
        body = form.body_bytes(chunks, g)  # which votes are silent is behind it: a forger leaves none out
        # what says how large the votes are, where they have a size
        front = 0 if form.drawn else body - votes.vote_bytes(chunks, g)
        own, honest = own[:body], [payload[:body] for payload in honest]
        match kind:
            case "flip":
                return own[:front] + flipped(form, own[front:], g)
            case "collude":  # all against the same honest peer: its votes are cancelled twice over
                return honest[0][:front] + flipped(form, honest[0][front:], g)
            case "random":
                return own[:front] + made_up(own[front:], self.random)
            case "copy":
                return honest[0]
            case "changed":
                return honest[0][:front] + partly(honest[0][front:], chunks, CHANGED, self.random)
        return own

    def echo(self, n: int) -> bytes:
        """No work: votes for what the log has moved lately."""
        assert self.past is not None
        return self.encoded(n, self.past)

    def commit(self, payloads: Sequence[bytes], counted: Sequence[bool], lr: float) -> None:
        idle = any(kind in (*IDLE, *READERS) for kind in self.kinds)
        before = [parameter.detach().clone() for parameter in self.model.parameters()] if idle else []
        for peer, accepted in zip(self.peers, counted, strict=True):
            if peer.pending:
                peer.settle(accepted)
        authors = [n for n, accepted in enumerate(counted) if accepted]
        taken = [(self.options.group_size, payloads[n]) for n in authors]
        self.peers[0].apply(taken, lr, self.step, list(map(author_of, authors)))
        if before:
            moved = [b - p.detach() for b, p in zip(before, self.model.parameters(), strict=True)]
            here = transformed(self.layout, moved)
            self.past = here if self.past is None else self.past.mul_(BETA).add_(here)


def schedule(options: argparse.Namespace, step: int) -> float:
    """Linear warm-up over a tenth, then a cosine, to a tenth as in a run's defaults."""
    warmup = max(1, options.steps // 10)
    if step < warmup:
        return float(np.float32(options.lr * (step + 1) / warmup))
    done = (step - warmup) / (options.steps - warmup)
    final = options.lr_final_ratio
    return float(np.float32(options.lr * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))))


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
    for name, (kinds, until) in chosen(options, rows):
        found = [run(options, tokens, seed, kinds, until) for seed in options.seeds]
        mean = statistics.fmean(found)
        base = base or mean
        table[name] = {"loss": round(mean, 4), "to_honest": round(mean / base - 1, 4), "seeds": found}
        print(name, table[name], flush=True)
    return table


def chosen(options: argparse.Namespace, rows: Mapping[str, T]) -> list[tuple[str, T]]:
    """The rows that were asked for."""
    if unknown := set(options.rows or ()) - rows.keys():
        raise SystemExit(f"no row {', '.join(sorted(unknown))}; there are: {', '.join(rows)}")
    return [(name, row) for name, row in rows.items() if not options.rows or name in options.rows]


def run(options: argparse.Namespace, tokens: object, seed: int, kinds: Sequence[str], until: int | None) -> float:
    """A whole run; bad peers count until step `until` (None: to the end)."""
    samples = Samples(tokens, options.context, seed)  # type: ignore[arg-type]
    crowd = Crowd(options, samples, seed, kinds)
    for step in range(options.steps):
        lr = schedule(options, step)
        counted = [kind == "honest" or until is None or step < until for kind in kinds]
        crowd.commit(crowd.propose(lr, crowd.next_ranges()), counted, lr)
    return round(validation_loss(crowd.model, torch.from_numpy(samples.validation(256))), 4)


# ---- what tells them apart -------------------------------------------------------------------------------------------

LINEUP: Final = ("honest",) * 6 + ("flip", "random", "echo", "copy", "changed")


def lineup(options: argparse.Namespace, tokens: object, seed: int) -> list[dict[str, object]]:
    """Every observation of every measured step: a peer by a checker, and a pair of payloads."""
    samples = Samples(tokens, options.context, seed)  # type: ignore[arg-type]
    crowd = Crowd(options, samples, seed, LINEUP)
    found: list[dict[str, object]] = []
    for step in range(options.steps):
        lr, ranges = schedule(options, step), crowd.next_ranges()
        payloads = crowd.propose(lr, ranges)
        if step % options.every == 0:
            found += observations(crowd, payloads, ranges, seed, step)
        crowd.commit(payloads, [kind == "honest" for kind in LINEUP], lr)
    return found


def observations(
    crowd: Crowd, payloads: Sequence[bytes], ranges: Sequence[Sequence[Range]], seed: int, step: int
) -> list[dict[str, object]]:
    seen: list[Seen] = [crowd.seen(n, payload) for n, payload in enumerate(payloads)]
    found: list[dict[str, object]] = []
    whole = [crowd.seen_gradient(part) for part in ranges]
    # what a checker can afford
    few = [crowd.seen_gradient(split_samples(list(part), crowd.options.checked)[0]) for part in ranges]
    for index, kind in enumerate(LINEUP):
        checker = 1 + index % 5 if kind != "honest" else (index + 1) % 6
        own, theirs, cheap = whole[index], whole[checker], few[index]
        found.append({
            "seed": seed, "step": step, "kind": kind,
            "own": agreement(seen[index], own), "difference": difference(seen[index], own, theirs),
            "own_few": agreement(seen[index], cheap), "difference_few": difference(seen[index], cheap, few[checker]),
            "own_gain": gain(seen[index], own), "other_gain": gain(seen[index], theirs),
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


# ---- what is done about it -------------------------------------------------------------------------------------------

COPIERS: Final = ("copy", "changed")
LIE: Final = 50.0
HUGE: Final = 9e5
"""What `inflate` reports of everybody, so that differences seem to vary too much. Doors take figures below a million."""


def trials(options: argparse.Namespace, tokens: object) -> dict[str, object]:
    """Runs with the real coordinator's machine and real checks: who is excluded, when, and the loss at the end."""
    good = options.peers - options.bad
    rows = {
        "honest": ["honest"] * options.peers,
        **{f"1 of 8 {kind}": ["honest"] * 7 + [kind] for kind in ("random", "echo", "copy", "changed")},
        **{
            f"{kind} x{options.bad}": ["honest"] * good + [kind] * options.bad
            for kind in ("flip", "collude", "lie", "inflate", *READERS)
        },
        "fewer honest": ["honest"] * good,
    }
    table: dict[str, object] = {}
    base = 0.0
    for name, kinds in chosen(options, rows):
        found = [Trial(options, tokens, seed, kinds).play() for seed in options.seeds]
        mean = statistics.fmean(trial.loss for trial in found)
        base = base or mean
        table[name] = {
            "loss": round(mean, 4),
            "to_honest": round(mean / base - 1, 4) if len(kinds) == options.peers else None,
            "losses": [round(trial.loss, 4) for trial in found],
            "excluded_at": [sorted(step for n, step in t.excluded.items() if kinds[n] != "honest") for t in found],
            "honest_excluded": sum(kinds[n] == "honest" for t in found for n in t.excluded),
            "honest_peer_steps": sum(t.honest_peer_steps for t in found),
            "honest_scores": sorted(t.honest_score for t in found),
            "checks_a_peer_step": round(statistics.fmean(t.checks / (options.steps * len(kinds)) for t in found), 3),
        }
        print(name, table[name], flush=True)
    fewer = table.get("fewer honest")
    for row in table.values():
        if isinstance(fewer, dict) and isinstance(row, dict):
            row["to_fewer_honest"] = round(row["loss"] / fewer["loss"] - 1, 4)
    return table


class Trial:
    """A run whose coordinator believes nobody. Bad peers that agree (`flip`, `collude`, `lie`, `inflate`) lie as checkers."""

    def __init__(self, options: argparse.Namespace, tokens: object, seed: int, kinds: Sequence[str]) -> None:
        self.options, self.kinds = options, kinds
        self.samples = Samples(tokens, options.context, seed)  # type: ignore[arg-type]
        self.crowd = Crowd(options, self.samples, seed, kinds)
        self.trust = TrustConfig(enabled=True, check_samples=options.checked)
        clock = {
            "steps": options.steps,
            "batch_samples": options.batch * len(kinds),
            "snapshot_every": options.steps + 1,
            "min_peers": 3,
        }
        method = OptimizerConfig(selection=options.selection)
        settings = RunConfig(clock=ClockConfig.model_validate(clock), trust=self.trust, optimizer=method)
        # names sort in another order than the kinds, and by the seed
        self.keys = [hashlib.sha256(f"{seed} {n}".encode()).digest() for n in range(len(kinds))]
        self.harness = Harness(settings, run_id=hashlib.sha256(f"run {seed}".encode()).digest())
        self.excluded: dict[int, int] = {}
        self.honest_peer_steps = self.checks = 0
        self.honest_score, self.loss = 0.0, math.nan
        self.speeds = options.speeds or [1.0] * len(kinds)
        self.random = np.random.default_rng(seed)
        if len(self.speeds) != len(kinds):
            raise SystemExit(f"--speeds: {len(self.speeds)} of them, for {len(kinds)} peers")

    def play(self) -> Trial:
        for key in self.keys:
            self.harness.feed(JoinAsked(key, "cpu", 100, LAYOUT, ()))
            self.harness.feed(Connected(key))
        for key in self.keys:  # all are ready before the first step opens
            self.harness.feed(Reported(key, applied=((0, digest_of(0)),)))
        for key in self.keys:
            self.harness.feed(Reported(key, snapshots=(snapshot_at(0),)))
        for step in range(self.options.steps):
            self.step(schedule(self.options, step))
        self.loss = validation_loss(self.crowd.model, torch.from_numpy(self.samples.validation(256)))
        return self

    def step(self, lr: float) -> None:
        harness, tick = self.harness, self.harness.ticks[-1]
        shares = assign(tick.pool, tick.roster)
        ranges = [shares.get(key, ()) for key in self.keys]
        usual, known = harness.run.recent_checks, harness.run.standings
        self.crowd.usual = usual.difference(1.0), usual.least_own_gain(1.0), usual.least_other_gain
        self.crowd.scores = [known[key].score if key in known else 0.0 for key in self.keys]
        payloads = self.crowd.propose(lr, ranges)
        held = self.claim(tick, ranges, payloads)
        for key, part in zip(self.keys, ranges, strict=True):
            if part:
                harness.feed(Reported(key, holdings=held))
        entry = harness.entries[-1]
        assert entry.step == tick.step, harness.run.reason
        verdicts = self.verdicts(tick, entry, payloads)
        counted = {contribution.public_key for contribution in entry.contributions}
        self.crowd.commit(payloads, [key in counted for key in self.keys], lr)
        for exclusion in entry.exclusions:
            self.excluded[self.keys.index(exclusion.public_key)] = entry.step
        standings = [harness.run.standings.get(key) for key in self.keys]
        scores = [found.score for kind, found in zip(self.kinds, standings, strict=True) if found and kind == "honest"]
        self.honest_score = max((self.honest_score, *scores))
        self.honest_peer_steps += sum(kind == "honest" and bool(p) for kind, p in zip(self.kinds, ranges, strict=True))
        harness.now += 100
        for key, part in zip(self.keys, ranges, strict=True):
            if part:
                harness.feed(Reported(key, applied=((entry.step, digest_of(entry.step)),), verdicts=verdicts[key]))

    def claim(
        self, tick: Tick, ranges: Sequence[Sequence[Range]], payloads: Sequence[bytes]
    ) -> tuple[tuple[int, bytes, bytes], ...]:
        """Everybody announces, the fastest first; who copies cannot before it has seen what it copies."""
        held = []
        shares = [sum(map(len, part)) for part in ranges]
        wobble = np.exp(self.options.wobble * self.random.standard_normal(len(shares)))
        took = [25.0 * share * w / speed for share, w, speed in zip(shares, wobble, self.speeds, strict=True)]
        for n in sorted(range(len(self.keys)), key=lambda n: (self.kinds[n] in COPIERS, took[n])):
            if ranges[n]:
                sha256, samples = hashlib.sha256(bytes([n]) + payloads[n]).digest(), sum(map(len, ranges[n]))
                size = len(payloads[n])
                claim = Claim(tick.step, tick.parent_hash, sha256, size, samples, samples * 64, 2.0, round(took[n]))
                self.harness.feed(Reported(self.keys[n], claim=claim))
                held.append((tick.step, self.keys[n], sha256))
        return tuple(held)

    def verdicts(self, tick: Tick, entry: Entry, payloads: Sequence[bytes]) -> dict[bytes, tuple[Verdict, ...]]:
        """What the drawn checkers find, by checker."""
        record = next(r for r in reversed(self.harness.journal) if isinstance(r, EntryCommitted))
        signed = SignedEntry(entry, record.hash, b"")
        due = {key: checking.due(key, self.trust, tick, signed) for key in self.keys}
        crowd = self.crowd
        seen = {
            key: crowd.seen(n, payload)
            for n, (key, payload) in enumerate(zip(self.keys, payloads, strict=True))
            if payload and any(due.values())
        }
        gradient = functools.cache(crowd.seen_gradient)
        found = {
            key: checking.verdicts(key, mine, self.trust, tick, signed, seen, gradient)
            for key, mine in due.items()
            if mine
        }
        self.checks += sum(map(len, found.values()))
        return {key: tuple(self.told(key, verdict) for verdict in found.get(key, ())) for key in self.keys}

    def told(self, checker: bytes, verdict: Verdict) -> Verdict:
        """What the checker reports of what it found."""
        kind, of = (self.kinds[self.keys.index(key)] for key in (checker, verdict.subject))
        if kind == "inflate":
            return replace(verdict, difference=HUGE)
        if kind in ("flip", "collude", "lie", *READERS):
            side = -1.0 if of == "honest" else 1.0
            return replace(verdict, own=LIE * side, difference=LIE * side, own_gain=side, other_gain=side)
        return verdict
