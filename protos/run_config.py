"""What a run is, as people write it (`run.toml`) and as it travels (canonical JSON in the genesis).

Frozen, unknown keys refused. Defaults are the measured ones; where a number has a source, its field says so.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from protos.errors import Reason, Refusal
from protos.identity import public_key_of
from protos.limits import ADDRESS_BYTES_MAX, ADDRESSES_MAX, CONFIG_JSON_BYTES_MAX, ENTRY_CONTRIBUTIONS_MAX

GROUP_SIZES = (8, 16, 32, 64, 128)
TOP_K_SIZES = (4, 8, 16, 32, 64, 128, 256, 512)
GroupSize = Literal[8, 16, 32, 64, 128]
TopK = Literal[4, 8, 16, 32, 64, 128, 256, 512]
BASE_STEPS_MAX = 2**24 - 1
Address = Annotated[str, Field(max_length=ADDRESS_BYTES_MAX, pattern=r"^/.+/p2p/[1-9A-HJ-NP-Za-km-z]+$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(_Section):
    """Which network is trained; by default a small byte-level Llama of 0.89 M parameters."""

    config: dict[str, Any] | None = None
    """A transformers AutoConfig as a table: `model_type` and whatever that type takes."""

    factory: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`module:function` that returns a torch.nn.Module; every peer must have the module installed."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.config is not None and self.factory is not None:
            raise ValueError("give either `config` or `factory`, not both")
        if self.kwargs and self.factory is None:
            raise ValueError("`kwargs` are the factory's: give `factory` too")
        return self


class DataConfig(_Section):
    """What it is trained on. Every peer reads its own copy; the samples of a step are ranges of indices."""

    source: str = "stdlib"
    """`stdlib` (the Python standard library's own sources), or a text file, a folder, a .npy or .bin token file.
    A peer can point to its own copy with `swarmentum join --data`."""

    tokenizer: str = "bytes"
    """`bytes` (256 tokens), or the name or path of a Hugging Face tokenizer."""

    dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """Of a raw .bin: the type of its tokens, little-endian. Other sources say it themselves."""

    context: int = Field(default=128, ge=2, le=1 << 20)
    """Tokens a sample."""


class BaseOptimizerConfig(_Section):
    """What moves the parameters, given everybody's votes (arXiv 2411.19870v2). Its state is replicated."""

    name: Literal["sign", "sgd", "adamw", "muon"] = "sign"
    """`sign` (Signum, no state), `sgd`, `adamw` (second moment of the aggregate), `muon` (orthogonalised matrices)."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Of sgd and muon: momentum of the aggregate, beside each peer's own."""

    nesterov: bool = False
    """Of sgd and muon: look ahead by one step of that momentum."""

    beta1: float = Field(default=0.0, ge=0, lt=1)
    """Of adamw."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Of adamw."""

    eps: float = Field(default=1e-8, gt=0, lt=1)
    """Of adamw."""

    tables: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(
        default=["embed", "lm_head", "wte", "wpe"], max_length=64
    )
    """Of muon: matrices with one of these in their names are tables (embeddings, heads), and get the sign as vectors do."""


class LocalConfig(_Section):
    """Local steps (DiLoCo, arXiv 2311.08105): peers take AdamW steps of their own and vote on where these led."""

    steps: int = Field(default=1, ge=1, le=10_000)
    """Local steps in a clock step; 1 is none: votes are on the gradient. The samples of a clock step are cut in as many."""

    lr: float = Field(default=1e-3, gt=0, lt=1)
    """Peak learning rate of the local AdamW; it follows the shape of the run's schedule."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Of the local AdamW."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Of the local AdamW."""

    weight_decay: float = Field(default=0.0, ge=0, lt=1)
    """Of the local AdamW."""


class OptimizerConfig(_Section):
    """The DeMo family (arXiv 2411.19870 and its successors; docs/optimizers.md). By default group votes and signs."""

    lr: float = Field(default=2e-3, gt=0, le=2)
    """Peak learning rate; 2e-3 beat 1e-3 and 3e-3 at 0.66 M parameters. With local steps it is the outer one: about 0.7."""

    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""

    warmup_steps: int = Field(default=10, ge=0)
    """Steps of linear warm-up."""

    lr_final_ratio: float = Field(default=0.1, ge=0, le=1)
    """Where the cosine ends, as a part of lr."""

    beta: float = Field(default=0.95, ge=0, lt=1)
    """Momentum decay; .95 and .999 made no difference at 0.66 M parameters."""

    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of each peer's private second moment: gradients are divided by it before they become momentum (as in Adam). 0
    for none; it learns better (docs/benchmarks.md), and costs a peer 4 bytes a parameter."""

    weight_decay: float = Field(default=0.0, ge=0, lt=1)
    """Decoupled weight decay."""

    clip_norm: float = Field(default=1.0, gt=0)
    """Gradient norm a peer clips to before its momentum sees the gradient."""

    selection: Literal["groups", "topk"] = "groups"
    """`groups`: the largest coefficient of every group; `topk`: the largest of a chunk, wherever they are."""

    group_size: GroupSize = 128
    """Of groups: coefficients a vote chooses from, unless a peer sets its own; 128 is a byte a vote, 16 costs 5 times that."""

    top_k: TopK = 32
    """Of topk: components of a chunk of 4096, unless a peer sets its own."""

    values: Literal["sign", "2bit", "8bit"] = "sign"
    """What a vote says beside where it is."""

    transform: Literal["dct", "hadamard", "identity"] = "dct"
    """What parameters look like to the votes."""

    magnitudes: bool = False
    """Updates have the size that peers vote for (one byte more a chunk, the median counts). Only with base sgd."""

    refused: Literal["restore", "drop"] = "restore"
    """What becomes of votes that the log did not accept: they stay in the momentum, or leave it as if accepted."""

    overlap: bool = False
    """Compute the next step's gradient while this step is exchanged, at a look-ahead point: faster steps on slow links,
    for a loss that is a little worse (docs/benchmarks.md)."""

    base: BaseOptimizerConfig = BaseOptimizerConfig()
    local: LocalConfig = LocalConfig()

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerConfig:
        if self.magnitudes and self.base.name != "sgd":
            raise ValueError(f"`magnitudes` have no effect with base {self.base.name!r}: only sgd keeps sizes")
        if self.magnitudes and self.beta2:
            raise ValueError("`magnitudes` needs `beta2 = 0`: divided gradients have no size of their own")
        if self.local.steps > 1 and not self.magnitudes:
            raise ValueError(
                "local steps need `magnitudes = true` and base sgd: how far a peer went is the update's size"
            )
        if self.local.steps > 1 and self.overlap:
            raise ValueError("`overlap` is for gradients; local steps wait for the network once in many steps anyway")
        return self

    @property
    def vote_size(self) -> int:
        """Group size or k, whichever the selection has."""
        return self.group_size if self.selection == "groups" else self.top_k


class ClockConfig(_Section):
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

    deadline_ms_min: int = Field(default=2_000, ge=100, le=3_600_000)
    """No step closes on a missing peer before this."""

    deadline_ms_max: int = Field(default=60_000, ge=100, le=3_600_000)
    """The deadline before there is a history, and its upper bound."""

    deadline_mad_factor: float = Field(default=6.0, gt=0, le=100)
    """deadline = median + max(this * median absolute deviation, median / 2) of the times in which more than half of the peers
    that past steps waited for were counted."""

    snapshot_every: int = Field(default=25, ge=1)
    """Steps between snapshots; a joiner loads one and replays what follows."""

    @model_validator(mode="after")
    def _consistent(self) -> ClockConfig:
        if self.deadline_ms_min > self.deadline_ms_max:
            raise ValueError(f"deadline_ms_min {self.deadline_ms_min} exceeds deadline_ms_max {self.deadline_ms_max}")
        if self.min_peers > self.max_peers:
            raise ValueError(f"min_peers {self.min_peers} exceeds max_peers {self.max_peers}")
        if self.batch_samples < self.min_peers:
            raise ValueError(f"batch_samples {self.batch_samples} is less than one sample a peer ({self.min_peers})")
        return self


class AdmissionConfig(_Section):
    """Who may take part."""

    mode: Literal["open", "allow_list", "invite"] = "open"
    """`open`: whoever holds the invite; `allow_list`: only the peer ids below; `invite`: only with a ticket, which
    `swarmentum-coordinator invite create` makes (docs/operating.md)."""

    allowed: list[str] = Field(default_factory=list, max_length=ENTRY_CONTRIBUTIONS_MAX)
    """Peer ids (12D3Koo...)."""

    @field_validator("allowed")
    @classmethod
    def _peer_ids(cls, allowed: list[str]) -> list[str]:
        for peer in allowed:
            public_key_of(peer)  # an OperatorError is a ValueError: it becomes an error of this key
        return allowed


TRUSTED_PEERS_MIN = 3
"""Of the first step in a run with checks: two have to check the third."""
ANCHORS_MAX = 16


class TrustConfig(_Section):
    """Whose word counts about states (anchors), and whose votes count (checks); docs/security.md, with measurements."""

    anchored: bool = False
    """State digests and snapshots count only from anchors. `swarmentum-coordinator run create --anchor` sets it."""

    anchors: list[str] = Field(default_factory=list, max_length=ANCHORS_MAX)
    """Peer ids (12D3Koo...) of anchors that the operator runs; `run create --anchor` needs none: it prints a link for them."""

    enabled: bool = False
    """Peers check each other's votes, and a peer that does not work is excluded. `run create` turns it on for an open run
    with an anchor, where the checks can judge the model's votes. It needs at least 3 peers to decide anything."""

    probation_steps: int = Field(default=10, ge=0, le=10_000)
    """A newcomer's votes count after so many good checks; those of the first step's peers at once."""

    checkers: int = Field(default=3, ge=2, le=8)
    """Peers that check one peer's votes."""

    check_samples: int = Field(default=4, ge=1, le=1024)
    """Samples that a check looks at, and as many of the checker's own to compare."""

    agreement_min: float = Field(default=3.0, gt=0, le=1000)
    """How well votes have to fit their author's own samples, in standard deviations of votes that know nothing."""

    overlap_max: float = Field(default=0.5, gt=0, le=1)
    """A payload of which so much is in an earlier one is a copy; honest ones were at most 0.47 alike."""

    exclude_at: float = Field(default=5.0, gt=1, le=1000)
    """A peer is excluded at this score: each bad check adds 1, each good one takes a half."""

    @field_validator("anchors")
    @classmethod
    def _peer_ids(cls, anchors: list[str]) -> list[str]:
        for peer in anchors:
            public_key_of(peer)
        return anchors


class OverlayConfig(_Section):
    """How peers find each other."""

    bootstrap: list[Address] = Field(default_factory=list, max_length=ADDRESSES_MAX)
    """Multiaddresses of public peers (`swarmentum relay` prints its own); peers that joined before are added."""


class RunConfig(_Section):
    """The whole of run.toml."""

    name: str = Field(default="swarm", min_length=1, max_length=64, pattern=r"^[\w .-]+$")
    """For people."""

    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Of the initial weights and of the order of samples."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    clock: ClockConfig = ClockConfig()
    admission: AdmissionConfig = AdmissionConfig()
    trust: TrustConfig = TrustConfig()
    overlay: OverlayConfig = OverlayConfig()

    @model_validator(mode="after")
    def _countable(self) -> RunConfig:
        if self.optimizer.base.name != "sign" and self.clock.steps > BASE_STEPS_MAX:
            raise ValueError(
                f"base {self.optimizer.base.name} counts at most {BASE_STEPS_MAX} steps, not {self.clock.steps}"
            )
        if self.optimizer.local.steps * self.clock.min_peers > self.clock.batch_samples:
            raise ValueError(
                f"batch_samples {self.clock.batch_samples} is less than one sample for each of {self.optimizer.local.steps} "
                f"local steps of {self.clock.min_peers} peers"
            )
        if self.trust.enabled and self.optimizer.overlap:
            raise ValueError(
                "`trust` checks votes on the samples of their step: not with `overlap`, which votes a step later"
            )
        return self

    def check_new(self) -> None:
        """What a run has to meet that is made now; one in a journal may be older than the rule. Raises `Refusal`."""
        if self.trust.enabled and self.clock.min_peers < TRUSTED_PEERS_MIN:
            raise Refusal(
                Reason.OUT_OF_RANGE,
                f"configuration: `trust` needs clock.min_peers of at least {TRUSTED_PEERS_MIN}, not {self.clock.min_peers}: "
                "those of the first step are believed, and check each other and all who come later",
            )

    def canonical_json(self) -> str:
        """One spelling for one configuration: sorted keys, no spaces."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)


SETTINGS_NAMED_MAX = 5


class UnknownSetting(Refusal):
    """A configuration has settings that this version does not know, which the detail names: a newer one made it."""


def config_from_json(text: str) -> RunConfig:
    """Read a stranger's configuration; raises `Refusal`."""
    if len(text) > CONFIG_JSON_BYTES_MAX:
        raise Refusal(Reason.TOO_LARGE, f"configuration of {len(text)} characters, at most {CONFIG_JSON_BYTES_MAX}")
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        unknown = [".".join(map(str, item["loc"])) for item in error.errors() if item["type"] == "extra_forbidden"]
        if unknown:
            raise UnknownSetting(Reason.OUT_OF_RANGE, ", ".join(unknown[:SETTINGS_NAMED_MAX])) from error
        raise Refusal(
            Reason.OUT_OF_RANGE, f"configuration: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
        ) from error
