"""The settings of a run, as people write them (`run.toml`) and as they travel (canonical JSON in the genesis).

Frozen, unknown keys refused. Defaults are the measured ones; where a number has a source, its field says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from protos.assignment import phases
from protos.errors import Reason, Refusal
from protos.identity import public_key_of
from protos.limits import (
    ADDRESS_BYTES_MAX,
    ADDRESSES_MAX,
    AGGREGATORS_MAX,
    CONFIG_JSON_BYTES_MAX,
    ENTRY_CONTRIBUTIONS_MAX,
    RANGES_MAX,
)
from protos.mistakes import PEER_ADDRESS, RUN_NAME, SHA256, SOURCE_NAME, WEB, Mistake, check_web, own_text_misfits
from protos.optimizer_config import OptimizerConfig, Section
from protos.run_sections import AdmissionConfig, ModelConfig, OperatorsConfig, SnapshotsConfig
from protos.toml_file import wrongs

BASE_STEPS_MAX = 2**24 - 1
SOURCE_CHARACTERS_MAX = 2048
MIRRORS_MAX = 8
MIX_MAX = 32
CHANGES_MAX = 64
Address = Annotated[str, Field(max_length=ADDRESS_BYTES_MAX, pattern=PEER_ADDRESS)]


class WeightChange(Section):
    """Another weight of a source from a step on."""

    step: int = Field(ge=2, le=1 << 32)
    """The first step with this weight. A step counts as `clock.batch_samples` samples."""

    weight: float = Field(ge=0, le=1e6)
    """As `weight`."""


class MixSource(Section):
    """One source of a mixture."""

    name: str = Field(pattern=SOURCE_NAME)
    """What messages call it, and its name in the folder that a peer gives with `swarmentum join --data`."""

    source: str = Field(max_length=SOURCE_CHARACTERS_MAX)
    """As `data.source`."""

    sha256: str | None = Field(default=None, pattern=SHA256)
    """As `data.sha256`."""

    mirrors: tuple[Annotated[str, Field(max_length=SOURCE_CHARACTERS_MAX, pattern=WEB)], ...] = Field(
        default=(), max_length=MIRRORS_MAX
    )
    """As `data.mirrors`."""

    weight: float = Field(ge=0, le=1e6)
    """Its part of the samples, against the weights of the others."""

    changes: tuple[WeightChange, ...] = Field(default=(), max_length=CHANGES_MAX)
    """Other weights from later steps on."""

    @model_validator(mode="after")
    def _right(self) -> MixSource:
        check_web(self.source, self.sha256, self.mirrors)
        steps = [change.step for change in self.changes]
        if steps != sorted(set(steps)):
            raise Mistake(f"the steps of `changes` have to grow, and are {steps}", "changes")
        return self

    def weight_at(self, step: int) -> float:
        """Its weight in a step."""
        return next((change.weight for change in reversed(self.changes) if change.step <= step), self.weight)


class DataConfig(Section):
    """The text that the model is trained on. Every peer reads its own copy; the samples of a step are ranges of indices."""

    source: str = Field(default="stdlib", max_length=SOURCE_CHARACTERS_MAX)
    """`stdlib` (the Python standard library's own sources), a text file, a folder, a .npy or .bin token file, or the http(s)
    address of token shards that `swarmentum data build` made. A peer points to its own copy with `swarmentum join --data`.
    `own`: each peer brings other text, which stays with it, and nobody can check the votes."""

    sha256: str | None = Field(default=None, pattern=SHA256)
    """The hash of the shards' manifest.json, which `swarmentum data build` prints. All peers then train on the same tokens."""

    mirrors: tuple[Annotated[str, Field(max_length=SOURCE_CHARACTERS_MAX, pattern=WEB)], ...] = Field(
        default=(), max_length=MIRRORS_MAX
    )
    """Other http(s) addresses of the same shards. A peer takes the next one if one does not answer."""

    tokenizer: str = "bytes"
    """`bytes` (256 tokens), the path of a tokenizer.json, or the name or folder of a Hugging Face tokenizer."""

    tokenizer_sha256: str | None = Field(default=None, pattern=SHA256)
    """The hash that `swarmentum data tokenizer NAME` prints. A peer whose tokenizer encodes differently does not join."""

    mix: tuple[MixSource, ...] = Field(default=(), max_length=MIX_MAX)
    """Several sources instead of `source`: tables [[data.mix]] with `name`, `source`, `weight`, and `changes` of the weight at
    later steps."""

    dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """The type of the tokens in a raw .bin, little-endian. Other sources define it themselves."""

    context: int = Field(default=128, ge=2, le=1 << 20)
    """Tokens a sample."""

    @model_validator(mode="after")
    def _named(self) -> DataConfig:
        check_web(self.source, self.sha256, self.mirrors)
        if self.mix and (self.source != "stdlib" or self.sha256 is not None):
            raise Mistake("give either `source` or tables [[data.mix]], not both", "source", "mix")
        names = [each.name for each in self.mix]
        if len(names) != len(set(names)):
            raise Mistake(f"the sources of [[data.mix]] need different names, and are {', '.join(names)}", "mix")
        if self.mix:
            phases(self.weights(), 1)
        return self

    def weights(self) -> list[tuple[int, tuple[float, ...]]]:
        """(first step, weights of the sources from there on) of a mixture, in order."""
        steps = sorted({1, *(change.step for each in self.mix for change in each.changes)})
        return [(step, tuple(each.weight_at(step) for each in self.mix)) for step in steps]

    def sources(self) -> tuple[tuple[str, tuple[str, ...], str | None], ...]:
        """(source, mirrors, sha256) of all that the run trains on."""
        return tuple((each.source, each.mirrors, each.sha256) for each in (self.mix or (self,)))


class ClockConfig(Section):
    """The clock: how many steps, what a step waits for, how often a snapshot is taken."""

    steps: int = Field(default=1000, ge=1, le=1 << 32)
    """Steps of the run."""

    batch_samples: int = Field(default=64, ge=1, le=1 << 20)
    """Samples a step, shared among the peers in proportion to their measured speed."""

    min_peers: int = Field(default=1, ge=1, le=ENTRY_CONTRIBUTIONS_MAX)
    """No step opens with fewer peers ready."""

    max_peers: int = Field(default=256, ge=1, le=ENTRY_CONTRIBUTIONS_MAX)
    """Peers admitted at once."""

    strict: bool = False
    """Equal shares, and every step waits for every peer of its roster: the same seed gives the same weights."""

    quorum: float = Field(default=0.5, gt=0, le=1)
    """A payload counts once more than this part of the roster holds it."""

    aggregators: int = Field(default=0, ge=0, le=AGGREGATORS_MAX)
    """So many peers add a step's votes up, anchors first, and every peer takes the sum: its traffic does not grow with the
    swarm (docs/scale.md). Only with optimizer.selection random, where `run create` sets 3. 0: every peer takes all payloads."""

    ranges: int = Field(default=1, ge=1, le=RANGES_MAX)
    """With aggregators: into so many ranges the model is divided, each with aggregators of its own, so that none of them takes
    whole payloads. With anchors, each range has one of them. 1: an aggregator takes and adds up whole payloads."""

    deadline_ms_min: int = Field(default=2_000, ge=100, le=3_600_000)
    """No step closes on a missing peer before this."""

    deadline_ms_max: int = Field(default=60_000, ge=100, le=3_600_000)
    """The deadline before there is a history, and its upper bound."""

    deadline_mad_factor: float = Field(default=6.0, gt=0, le=100)
    """deadline = median + max(this * median absolute deviation, median / 2). The times are those in which past steps counted
    more than half of the peers that they waited for."""

    snapshot_every: int = Field(default=25, ge=1)
    """Steps between snapshots; a joiner loads one and replays what follows."""

    digest_steps: int = Field(default=16, ge=0, le=1024)
    """The digests of so many steps together cover every bit of the state. 0, as in earlier runs: each covers 64 MiB."""

    @model_validator(mode="after")
    def _consistent(self) -> ClockConfig:
        if self.deadline_ms_min > self.deadline_ms_max:
            raise Mistake(
                f"deadline_ms_min {self.deadline_ms_min} exceeds deadline_ms_max {self.deadline_ms_max}",
                "deadline_ms_min",
                "deadline_ms_max",
            )
        if self.min_peers > self.max_peers:
            raise Mistake(f"min_peers {self.min_peers} exceeds max_peers {self.max_peers}", "min_peers", "max_peers")
        if self.batch_samples < self.min_peers:
            raise Mistake(
                f"batch_samples {self.batch_samples} is less than one sample a peer ({self.min_peers})",
                "batch_samples",
                "min_peers",
            )
        return self


TRUSTED_PEERS_MIN = 3
"""The least number of peers in the first step of a run with checks: two have to check the third."""
ANCHORS_MAX = 16


class TrustConfig(Section):
    """Anchors, whose reports on states count, and checks of the peers' votes. docs/security.md has measurements."""

    anchored: bool = False
    """State digests and snapshots count only from anchors. `swarmentum-coordinator run create --anchor` sets it."""

    anchors: list[str] = Field(default_factory=list, max_length=ANCHORS_MAX)
    """Peer ids (12D3Koo...) of anchors that the operator runs; `run create --anchor` needs none: it prints a link for them."""

    enabled: bool = False
    """Peers check each other's votes, and a peer that does not work is excluded. `run create` turns it on for an open run
    with an anchor, where the checks can judge the model's votes. It needs at least 3 peers to decide anything."""

    probation_steps: int = Field(default=10, ge=0, le=10_000)
    """The number of good checks after which a newcomer's votes count. Votes of the first step's peers count at once."""

    checkers: int = Field(default=3, ge=2, le=8)
    """Peers that check one peer's votes."""

    check_samples: int = Field(default=32, ge=1, le=1024)
    """The most samples of the checked peer that a check looks at, and as many of the checker's own to compare. Where a peer
    votes on four times as many, checks find only copies and votes at random or against the loss (ADR 16)."""

    agreement_min: float = Field(default=3.0, gt=0, le=1000)
    """How well votes have to fit their author's own samples, in standard deviations of votes that know nothing."""

    overlap_max: float = Field(default=0.5, gt=0, le=1)
    """A payload of which so much is in an earlier one is a copy; honest ones were at most 0.47 alike. Not used where all peers
    vote for the same coefficients: there a copy is half of the way from the usual overlap to a whole one (ADR 33)."""

    exclude_at: float = Field(default=6.0, gt=1, le=1000)
    """A peer is excluded at this score: each bad check adds 1, each good one takes 1."""

    @field_validator("anchors")
    @classmethod
    def _peer_ids(cls, anchors: list[str]) -> list[str]:
        for peer in anchors:
            public_key_of(peer)
        return anchors


class EvaluationConfig(Section):
    """The held-out loss: volunteers evaluate agreed states on samples that no peer trains on."""

    every: int = Field(default=0, ge=0, le=1 << 32)
    """Steps between two evaluations, a multiple of clock.snapshot_every; the last state is evaluated, too. 0: none."""

    samples: int = Field(default=64, ge=1, le=1 << 16)
    """Samples of the held-out end of the run's text: each has data.context tokens. Fewer, if the end has fewer."""

    sample_tokens: int = Field(default=0, ge=0, le=256)
    """Tokens that the model writes after each evaluation; the page shows them. 0: none."""

    prompt: str = Field(default="", max_length=200)
    """The text that the model goes on with in these samples."""


class OverlayConfig(Section):
    """How peers find each other."""

    bootstrap: list[Address] = Field(default_factory=list, max_length=ADDRESSES_MAX)
    """Multiaddresses of public peers (`swarmentum relay` prints its own); peers that joined before are added."""


class RunConfig(Section):
    """The whole of run.toml."""

    name: str = Field(default="swarm", min_length=1, max_length=64, pattern=RUN_NAME)
    """The name of the run, for people."""

    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """The seed of the initial weights and of the order of samples."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    clock: ClockConfig = ClockConfig()
    admission: AdmissionConfig = AdmissionConfig()
    operators: OperatorsConfig = OperatorsConfig()
    trust: TrustConfig = TrustConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    snapshots: SnapshotsConfig = SnapshotsConfig()
    overlay: OverlayConfig = OverlayConfig()

    @model_validator(mode="after")
    def _countable(self) -> RunConfig:
        if self.optimizer.base.counts and self.clock.steps > BASE_STEPS_MAX:
            raise Mistake(
                f"base {self.optimizer.base.name} counts at most {BASE_STEPS_MAX} steps, not {self.clock.steps}",
                "clock.steps",
                "optimizer.base",
            )
        if self.optimizer.local.steps * self.clock.min_peers > self.clock.batch_samples:
            raise Mistake(
                f"batch_samples {self.clock.batch_samples} is less than one sample for each of {self.optimizer.local.steps} "
                f"local steps of {self.clock.min_peers} peers",
                "clock.batch_samples",
                "optimizer.local",
                "clock.min_peers",
            )
        if self.evaluation.every % self.clock.snapshot_every:
            raise Mistake(
                f"evaluation.every {self.evaluation.every} is no multiple of clock.snapshot_every {self.clock.snapshot_every}: "
                "only states of snapshots are evaluated",
                "evaluation.every",
                "clock.snapshot_every",
            )
        if self.clock.aggregators and not self.optimizer.summable:
            raise Mistake(
                f"clock.aggregators {self.clock.aggregators} needs sums of few bits: optimizer.selection random, values sign, "
                "and base sign or muon with a block; remove it, or set these",
                "clock.aggregators",
                "optimizer.selection",
            )
        if self.clock.ranges > 1 and not self.clock.aggregators:
            raise Mistake(
                f"clock.ranges {self.clock.ranges} divides what aggregators add up: set clock.aggregators, or remove it",
                "clock.ranges",
                "clock.aggregators",
            )
        if self.trust.enabled and self.optimizer.method == "paper":
            raise Mistake(
                '`trust.enabled` does not work with `optimizer.method = "paper"`: a mean is as large as its largest sender '
                "wants, and the checks judge signs; set trust.enabled to false, or use method demo",
                "trust.enabled",
                "optimizer.method",
            )
        if self.trust.enabled and self.optimizer.overlap:
            raise Mistake(
                "`trust` checks votes on the samples of their step: not with `overlap`, which votes a step later",
                "trust.enabled",
                "optimizer.overlap",
            )
        return self

    def misfits(self) -> Iterator[Mistake]:
        """The rules for a run that is made now; a run in a journal may be older than a rule."""
        if self.optimizer.overlap and self.optimizer.magnitudes:
            yield Mistake(
                "`overlap` looks ahead by lr times a sign, which is no step of a run with `magnitudes`: "
                "set one of them to false",
                "optimizer.overlap",
                "optimizer.magnitudes",
            )
        if self.trust.enabled and self.clock.min_peers < TRUSTED_PEERS_MIN:
            yield Mistake(
                f"`trust` needs clock.min_peers of at least {TRUSTED_PEERS_MIN}, not {self.clock.min_peers}: "
                "those of the first step are believed, and check each other and all who come later",
                "trust.enabled",
                "clock.min_peers",
            )

        data = self.data
        yield from own_text_misfits(data.sources(), data.mix, data.sha256, self.trust.enabled, self.evaluation.every)

    def check_new(self) -> None:
        """Raises `Refusal` for the first of the `misfits`."""
        for mistake in self.misfits():
            raise Refusal(Reason.OUT_OF_RANGE, f"configuration: {mistake}")

    def canonical_json(self) -> str:
        """One spelling for one configuration: sorted keys, no spaces. Earlier versions read a run without operators' keys, or
        with one range."""
        values = self.model_dump(mode="json")
        if self.operators == OperatorsConfig():
            del values["operators"]
        if self.clock.ranges == 1:
            del values["clock"]["ranges"]
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


SETTINGS_NAMED_MAX = 5


class UnknownSetting(Refusal):
    """A configuration has settings that this version does not know, which the detail names: a newer one made it."""


def config_from_json(text: str) -> RunConfig:
    """Read a stranger's configuration; raises `Refusal`. One without `clock.digest_steps` is of an earlier version: 0."""
    if len(text) > CONFIG_JSON_BYTES_MAX:
        raise Refusal(Reason.TOO_LARGE, f"configuration of {len(text)} characters, at most {CONFIG_JSON_BYTES_MAX}")
    try:
        config = RunConfig.model_validate_json(text)
    except ValidationError as error:
        unknown = [".".join(map(str, item["loc"])) for item in error.errors() if item["type"] == "extra_forbidden"]
        if unknown:
            raise UnknownSetting(Reason.OUT_OF_RANGE, ", ".join(unknown[:SETTINGS_NAMED_MAX])) from error
        raise Refusal(Reason.OUT_OF_RANGE, f"configuration: {wrongs(error)[0].text}") from error
    if "digest_steps" in config.clock.model_fields_set:
        return config
    return config.model_copy(update={"clock": config.clock.model_copy(update={"digest_steps": 0})})
