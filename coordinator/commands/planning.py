"""Decisions of `run create` before a run is made: its parameter layout, and whether peers check each other's votes.

Pure but for `layout_of_run` and `text_of`, which ask the node package in a process (the coordinator needs no torch). Refuses
to change the operator's settings: only settings that run.toml leaves open are decided here, and each decision is printed.

Also the run.toml files for models that people ask for first, and how fast common cards train one: text and arithmetic.
Nobody has trained these models with this project yet, and each file says so. Refuses names that it does not have.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import tomli_w

from protos.errors import OperatorError
from protos.example import MEASURED
from protos.limits import PAYLOADS_GB, PERIODS_KEPT
from protos.mistakes import has_own_text
from protos.optimizer_defaults import MUON_LR_PARAMETERS, RECIPES, muon_lr
from protos.process import python_command
from protos.run_config import TRUSTED_PEERS_MIN, RunConfig
from protos.run_sections import LayoutFacts
from protos.text import count

LAYOUT_SECONDS_MAX = 300.0
"""The process itself stops after 20 s of computing for each of its two parts. This is for machines that others use, too."""
PATIENCE_SECONDS = 2.0
NOT_INSTALLED = "swarmentum[node] is not installed here"
ERROR = "error: "
TEXT_SECONDS_MAX = 120.0
OWN_A_ROOT_VOTE = 0.177
"""The least `own` of an honest peer in docs/security.md, divided by the root of the votes, because `own` grows with that root.
The figure is 14, of 6,250 votes, with 4 checked samples of a share of 32. With more samples `own` is larger."""
SHARE_MEASURED = 32
AGGREGATORS = 3
"""Where votes add up: one may be gone, and two equal sums count."""
RANGES = 8
"""Without an anchor, whose uplink is its operator's business: of 32 peers none takes more than four or five payloads a step."""
RANGED_VOTES = 8_000_000
"""Of one payload, a bit each: a home line of 20 Mbit/s takes a payload of 1 MB from each of 32 peers in 13 s."""
KEPT_BESIDE_GB = 30
"""What a peer keeps beside others' votes: its archive and its text (`disk_gb` is for all three)."""
BYTES_A_GB = 10**9


@dataclass(frozen=True)
class TextFacts:
    """What `swarmentum data survey` printed of a text on this machine. `values`: None if it could not look."""

    place: str
    lines: tuple[str, ...]
    values: dict[str, Any] | None = None


def layout_of_run(
    file: Path, *, allow_code: bool = False, told: Callable[[str], None] = lambda line: None
) -> tuple[LayoutFacts | None, str]:
    """The layout of a run.toml's model, or None and why it is not known here. OperatorError if no run should have the model.

    `allow_code`: the operator trusts the code that `model.factory` names. `told`: gets a line when it takes longer than
    PATIENCE_SECONDS.
    """
    if any(find_spec(name) is None for name in ("torch", "transformers", "node")):
        return None, NOT_INSTALLED
    command = python_command("-m", "node", "layout", str(file), "--json", *["--allow-code"] * allow_code)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            out, err = _waited(child, told)
        except subprocess.TimeoutExpired:
            child.kill()
            return None, f"building its model took more than {LAYOUT_SECONDS_MAX:.0f} s"
    if child.returncode:
        raise OperatorError(_said(err, child.returncode))
    values = json.loads(out.splitlines()[-1])
    if "unknown" in values:
        return None, str(values["unknown"])
    return LayoutFacts(**values | {"notes": tuple(values["notes"])}), ""


def _waited(child: subprocess.Popen[str], told: Callable[[str], None]) -> tuple[str, str]:
    """What a process printed until it ended. Raises TimeoutExpired after LAYOUT_SECONDS_MAX."""
    try:
        return child.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        told("building the model to count it, and running a small copy of it ...")
    return child.communicate(timeout=LAYOUT_SECONDS_MAX)


def _said(err: str, returncode: int) -> str:
    """The error in what a process printed, without the log lines of libraries before it."""
    found = err.rpartition(f"\n{ERROR}") if f"\n{ERROR}" in err else err.partition(ERROR)
    if found[1]:
        return found[2].strip()
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "")
    return f"model: it cannot be built: {last or f'its process ended with {returncode}'}"


def text_of(place: str) -> TextFacts:
    """What a text of this machine has, and what peers would leave out of it, as the node package counts it."""
    if any(find_spec(name) is None for name in ("torch", "transformers", "node")):
        return TextFacts(place, (f"not looked at: {NOT_INSTALLED}",))
    command = python_command("-m", "node", "data", "survey", "--json", "--", place)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TEXT_SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired:
        return TextFacts(place, (f"not looked at: it took more than {TEXT_SECONDS_MAX:.0f} s",))
    if done.returncode:
        return TextFacts(place, tuple(done.stderr.strip().removeprefix("error: ").splitlines()))
    values = json.loads(done.stdout.splitlines()[-1])
    return TextFacts(place, tuple(values.pop("lines")), values)


def votes_needed(config: RunConfig) -> int:
    """How many votes a payload needs so that checks can tell an honest peer's from those that know nothing.

    A check looks at a few samples of a share: the larger the share, the less these say about it.
    """
    share = max(config.clock.batch_samples / config.clock.min_peers, SHARE_MEASURED)
    own = OWN_A_ROOT_VOTE * math.sqrt(SHARE_MEASURED / share)
    return math.ceil((config.trust.agreement_min / own) ** 2)


def room_for_votes(config: RunConfig, payload_bytes: int) -> str:
    """A warning if peers may lack room for the votes that joiners need; empty if they have it.

    A joiner loads the newest agreed snapshot, or the one before, and replays the log after it. That takes two snapshot
    periods, and the one in which the next snapshot is agreed.
    """
    steps = PERIODS_KEPT * config.clock.snapshot_every
    a_peer = steps * payload_bytes
    peers, most = int(PAYLOADS_GB * BYTES_A_GB // a_peer), config.clock.max_peers
    if peers >= most:
        return ""
    fewer = max(int(PAYLOADS_GB * BYTES_A_GB // (PERIODS_KEPT * payload_bytes * most)), 1)
    return (
        f"Joiners need the votes of up to {steps} steps: {payload_bytes / 1e6:.1f} MB of each peer and step, "
        f"{most * a_peer / BYTES_A_GB:.0f} GB with {most} peers. A peer gives them {PAYLOADS_GB:.0f} GB, enough for {peers} "
        f"peers: with more, joiners may find that votes are gone. Set clock.snapshot_every to {fewer}, clock.max_peers to "
        f"{max(peers, 1)}, or have peers set disk_gb = "
        f"{math.ceil(most * a_peer / BYTES_A_GB + KEPT_BESIDE_GB)}."
    )


def measured_of(config: RunConfig) -> str:
    """A note on constants of the protocol that this run changes; empty for most runs."""
    usual = RunConfig()
    changed = [key for key in MEASURED if attrgetter(key)(config) != attrgetter(key)(usual)]
    return f"{', '.join(changed)}: measured; a run that leaves them out has the usual ones." if changed else ""


def with_rate(config: RunConfig, parameters: int | None) -> tuple[RunConfig, str]:
    """The run with the default learning rate of its model's size and step, if known, and what there is to say about it."""
    optimizer = config.optimizer
    if optimizer.base.name != "muon" or "lr" in optimizer.model_fields_set:
        return config, ""
    if parameters is None:
        return config, (
            f"optimizer.lr = {optimizer.lr:g} fits {count(MUON_LR_PARAMETERS)} parameters; the size of this model is not known "
            "here, and larger ones need less (docs/optimizers.md)."
        )
    tokens = config.clock.batch_samples * config.data.context
    rate = muon_lr(parameters, tokens)
    if rate == optimizer.lr:
        return config, ""
    said = (
        f"optimizer.lr = {rate:g}: the default for {count(parameters)} parameters and {tokens:,} tokens a step "
        "(docs/optimizers.md)."
    )
    return config.model_copy(update={"optimizer": optimizer.model_copy(update={"lr": rate})}), said


def recipe_of(config: RunConfig) -> str:
    """The settings that a recipe stands for, with what run.toml set instead; empty without a recipe."""
    optimizer = config.optimizer
    if optimizer.recipe == "none":
        return ""
    said = []
    for key, default in RECIPES[optimizer.recipe].items():
        found = getattr(optimizer, key)
        inner = (
            {f"{key}.{name}": getattr(found, name) for name in default} if isinstance(default, dict) else {key: found}
        )
        said += [f"{name} = {json.dumps(value)}" for name, value in inner.items()]
    return f"Recipe {optimizer.recipe}: {', '.join(said)}."


def planned(config: RunConfig, votes: int | None, *, anchor: bool) -> tuple[RunConfig, str]:
    """The run with what run.toml left open, and what there is to say about it (empty: nothing).

    `votes`: of one payload, if that is known. `anchor`: the operator asked for one.
    """
    trust = config.trust
    if anchor and not trust.anchored:
        trust = trust.model_copy(update={"anchored": True})
    anchored = trust.anchored or bool(trust.anchors)
    said = ""
    if config.admission.mode == "open" and "enabled" not in config.trust.model_fields_set:
        off = _why_no_checks(config, votes) if anchored else _NO_ANCHOR
        said = f"Peers do not check each other's votes ([trust] enabled): {off}." if anchored and off else off
        if anchored and not off:
            trust = trust.model_copy(update={"enabled": True})
            said = "Peers check each other's votes ([trust] enabled), because the run is open and has an anchor."
    clock = config.clock
    if config.optimizer.summable and "aggregators" not in clock.model_fields_set:
        clock = clock.model_copy(update={"aggregators": AGGREGATORS})
    large = (
        clock.aggregators and not anchored and (votes or 0) >= RANGED_VOTES and "ranges" not in clock.model_fields_set
    )
    if large and config.admission.mode != "open":
        clock = clock.model_copy(update={"ranges": RANGES})
        said = f"{said} No peer takes whole payloads: the model has {RANGES} ranges ([clock] ranges).".strip()
    config = config.model_copy(update={"trust": trust, "clock": clock})
    if clock.aggregators and not adds_up(config):
        text = "Votes are added up ([clock] aggregators) only with an anchor: here every peer takes every payload."
        said = f"{said} {text}".strip()
    return config, said


def adds_up(config: RunConfig) -> bool:
    """Whether the run's steps may have aggregators (`coordinator/clock/aggregation.py`)."""
    anchored = config.trust.anchored or bool(config.trust.anchors)
    return config.clock.aggregators > 0 and (anchored or config.admission.mode != "open")


_NO_ANCHOR = (
    "This run is open and has no anchor: strangers with free identities can stop it. For a public run use `run create "
    "--anchor`, and start the anchor that it prints."
)


def _why_no_checks(config: RunConfig, votes: int | None) -> str:
    if has_own_text(config.data.sources()):
        return "they compute with the checked peer's samples, and each peer's own text stays with it (data.source own)"
    if config.clock.min_peers < TRUSTED_PEERS_MIN:
        return f"they need clock.min_peers of at least {TRUSTED_PEERS_MIN}, and it is {config.clock.min_peers}"
    if config.optimizer.method == "paper":
        return "they do not work with optimizer.method paper"
    if config.optimizer.overlap:
        return "they do not work with optimizer.overlap"
    needed = votes_needed(config)
    if votes is not None and votes < needed:
        return f"a payload has {votes} votes, and they need {needed} to judge it"
    return ""


PART_OF_PEAK: Final = 0.35
"""Of a card's peak. Large runs of language models report 0.21 to 0.46 of their chips' (arXiv 2204.02311, table 3). The part on
home cards is not measured here."""
OPERATIONS_A_PARAMETER: Final = 6
"""Of one token: two in the forward pass, four in the backward pass (arXiv 2001.08361, table 1)."""
PEAK_FLOPS: Final = {"RTX 3060": 25.6e12, "RTX 3090": 71e12, "RTX 4090": 165e12, "H100": 989e12}
"""bf16 with fp32 sums, dense, as NVIDIA's data sheets have it."""


@dataclass(frozen=True)
class Recipe:
    """A model and the numbers of a run that trains it on about 20 tokens a parameter or more (arXiv 2203.15556)."""

    config: dict[str, Any]
    tokenizer: str
    batch_samples: int
    steps: int
    deadline_ms_max: int
    context: int = 1024
    dtype: str = "uint16"


_LLAMA: Final = {"model_type": "llama", "tie_word_embeddings": True, "max_position_embeddings": 2048}
MODELS: Final = {
    "gpt2-124m": Recipe(
        {
            "model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
        "openai-community/gpt2", batch_samples=512, steps=19_000, deadline_ms_max=120_000,
    ),
    "smollm2-360m": Recipe(
        {
            **_LLAMA, "vocab_size": 49152, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
            "num_attention_heads": 15, "num_key_value_heads": 5,
        },
        "HuggingFaceTB/SmolLM2-360M", batch_samples=512, steps=19_000, deadline_ms_max=300_000,
    ),
    "llama-3.2-1b": Recipe(
        {
            **_LLAMA, "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8,
        },
        "meta-llama/Llama-3.2-1B", batch_samples=1024, steps=24_000, deadline_ms_max=900_000, dtype="uint32",
    ),
}  # fmt: skip


def run_toml(name: str) -> str:
    """The file for a model. Raises OperatorError for one that is not known."""
    if name not in MODELS:
        raise OperatorError(f"--for {name}: expected one of {', '.join(MODELS)}")
    it = MODELS[name]
    tokens = it.steps * it.batch_samples * it.context / 1e9
    return f"""# {name}: {tokens:.0f} billion tokens. Nobody has trained it with Swarmentum yet:
# batch and steps are a start, not a result.
# `swarmentum-coordinator run check FILE` prints what it takes of each peer: memory, disk, traffic, days.
name = "{name}"

{tomli_w.dumps({"model": {"config": it.config}})}
[data]
# If the hub gates the tokenizer, each machine needs `hf auth login` first, or a copy: tokenizer = "PATH/tokenizer.json".
# Make the shards once: swarmentum data build TEXT --out shards --tokenizer {it.tokenizer}
# Then put them on the web, and write their address and the sha256 that was printed here.
source = "shards"
tokenizer = "{it.tokenizer}"
dtype = "{it.dtype}"
context = {it.context}

[clock]
steps = {it.steps}
batch_samples = {it.batch_samples}
# The slowest peer that still counts has so long for a step.
deadline_ms_max = {it.deadline_ms_max}
snapshot_every = 100

[evaluation]
every = 100
"""


def tokens_a_second(parameters: int, peak_flops: float) -> float:
    """Of one card, by arithmetic alone."""
    return PART_OF_PEAK * peak_flops / (OPERATIONS_A_PARAMETER * parameters)
