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
GroupSize = Literal[8, 16, 32, 64, 128]
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

    context: int = Field(default=128, ge=2, le=1 << 20)
    """Tokens a sample."""


class OptimizerConfig(_Section):
    """DeMo with group votes (arXiv 2411.19870; docs/architecture.md)."""

    lr: float = Field(default=2e-3, gt=0, lt=1)
    """Peak learning rate; 2e-3 beat 1e-3 and 3e-3 at 0.66 M parameters."""

    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""

    warmup_steps: int = Field(default=10, ge=0)
    """Steps of linear warm-up."""

    lr_final_ratio: float = Field(default=0.1, ge=0, le=1)
    """Where the cosine ends, as a part of lr."""

    beta: float = Field(default=0.95, ge=0, lt=1)
    """Momentum decay; .95 and .999 made no difference at 0.66 M parameters."""

    weight_decay: float = Field(default=0.0, ge=0, lt=1)
    """Decoupled weight decay."""

    clip_norm: float = Field(default=1.0, gt=0)
    """Gradient norm a peer clips to before its momentum sees the gradient."""

    group_size: GroupSize = 128
    """Coefficients a vote chooses from, unless a peer sets its own: 128 is one byte a vote, 16 costs 5 times that."""


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
    """deadline = median of past steps + this * their median absolute deviation."""

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

    mode: Literal["open", "allow_list"] = "open"
    """`open`: whoever holds the invite; `allow_list`: only the peer ids below."""

    allowed: list[str] = Field(default_factory=list, max_length=ENTRY_CONTRIBUTIONS_MAX)
    """Peer ids (12D3Koo...)."""

    @field_validator("allowed")
    @classmethod
    def _peer_ids(cls, allowed: list[str]) -> list[str]:
        for peer in allowed:
            public_key_of(peer)  # an OperatorError is a ValueError: it becomes an error of this key
        return allowed


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
    overlay: OverlayConfig = OverlayConfig()

    def canonical_json(self) -> str:
        """One spelling for one configuration: sorted keys, no spaces."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def config_from_json(text: str) -> RunConfig:
    """Read a stranger's configuration; raises `Refusal`."""
    if len(text) > CONFIG_JSON_BYTES_MAX:
        raise Refusal(Reason.TOO_LARGE, f"configuration of {len(text)} characters, at most {CONFIG_JSON_BYTES_MAX}")
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        raise Refusal(
            Reason.OUT_OF_RANGE, f"configuration: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
        ) from error
