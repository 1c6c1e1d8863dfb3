"""The sections of run.toml that all optimizers of the library read: `[optimizer]`, with its base and its local steps.

Frozen, unknown keys refused. Defaults are the measured ones; where a number has a source, its field says so.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

GROUP_SIZES = (8, 16, 32, 64, 128)

TOP_K_SIZES = (4, 8, 16, 32, 64, 128, 256, 512)

GroupSize = Literal[8, 16, 32, 64, 128]

TopK = Literal[4, 8, 16, 32, 64, 128, 256, 512]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


PAPER_SETS: dict[str, Any] = {"beta": 0.999, "beta2": 0.0, "selection": "topk", "values": "16bit"}
"""Defaults of `optimizer` with `method = "paper"`, if they differ from those of `demo`: the published ones."""

PAPER_HAS_NOT: dict[str, tuple[Any, str]] = {
    "beta2": (0.0, "the paper has no second moment"),
    "selection": ("topk", "the paper sends the largest coefficients of a chunk, wherever they are"),
    "values": ("16bit", "the paper sends values, here with 16 bits"),
    "transform": ("dct", "the paper's transform is the DCT"),
    "magnitudes": (False, "the paper takes the sign at the end"),
    "overlap": (False, "the paper has no look-ahead"),
    "decay": ("all", "the paper decays all parameters"),
}
"""Settings of `optimizer` that `paper` has not: the only value that is accepted, and the reason."""


class BaseOptimizerConfig(Section):
    """The rule that changes the parameters, given the votes of all peers (arXiv 2411.19870v2). Its state is replicated."""

    name: Literal["sign", "sgd", "adamw", "muon"] = "sign"
    """`sign` (Signum, no state), `sgd`, `adamw` (second moment of the aggregate), `muon` (orthogonalised matrices)."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    """For sgd and muon: momentum of the aggregate, beside each peer's own."""

    nesterov: bool = False
    """For sgd and muon: look ahead by one step of that momentum."""

    beta1: float = Field(default=0.0, ge=0, lt=1)
    """Of adamw."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Of adamw."""

    eps: float = Field(default=1e-8, gt=0, lt=1)
    """Of adamw."""

    tables: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(
        default=["embed", "lm_head", "wte", "wpe", "tok_emb", "pos_emb"], max_length=64
    )
    """Matrices with one of these in their names are tables (embeddings, heads), as are those of an embedding module: muon gives
    them the sign as it does vectors, and `decay = "matrices"` leaves them out."""


class LocalConfig(Section):
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


class OptimizerConfig(Section):
    """The DeMo family (arXiv 2411.19870 and its successors; docs/optimizers.md). By default group votes and signs."""

    method: Literal["demo", "paper"] = "demo"
    """`demo`: the family with its parts below. `paper`: DeMo v1 as published, which has beta 0.999, beta2 0 and top_k 32 unless
    they are set, and refuses the parts that it does not have."""

    chunk: Literal[8, 16, 32, 64, 128] = 64
    """Of method paper: the longest side of a chunk."""

    lr: float = Field(default=2e-3, gt=0, le=2)
    """Peak learning rate; 2e-3 beat 1e-3 and 3e-3 at 0.66 M parameters. With local steps it is the outer one: about 0.7."""

    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""

    warmup_steps: int = Field(default=10, ge=0)
    """Steps of linear warm-up."""

    lr_final_ratio: float = Field(default=0.1, ge=0, le=1)
    """The end of the cosine, as a part of lr."""

    beta: float = Field(default=0.95, ge=0, lt=1)
    """Momentum decay; .95 and .999 made no difference at 0.66 M parameters."""

    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of each peer's private second moment: gradients are divided by it before they become momentum (as in Adam). 0
    for none; it learns better (docs/benchmarks.md), and costs a peer 4 bytes a parameter."""

    weight_decay: float = Field(default=0.0, ge=0, lt=1)
    """Decoupled weight decay."""

    decay: Literal["all", "matrices"] = "all"
    """Which parameters it reaches: all, or those of two and more dimensions that are no tables (`base.tables`)."""

    clip_norm: float = Field(default=1.0, gt=0)
    """Gradient norm a peer clips to before its momentum sees the gradient."""

    selection: Literal["groups", "topk"] = "groups"
    """`groups`: the largest coefficient of every group; `topk`: the largest of a chunk, wherever they are."""

    group_size: GroupSize = 128
    """For groups: the number of coefficients that a vote chooses from, unless a peer sets its own. 128 is a byte a vote; 16
    costs 5 times as many bytes."""

    top_k: TopK = 32
    """For topk: components of a chunk of 4096, unless a peer sets its own."""

    values: Literal["sign", "2bit", "8bit", "16bit"] = "sign"
    """The value of a vote, beside its place. `16bit` belongs to method paper, which has it unless it is set."""

    transform: Literal["dct", "hadamard", "identity"] = "dct"
    """The transform of a chunk before peers vote on it."""

    magnitudes: bool = False
    """Updates have the size that peers vote for (one byte more a chunk, the median counts). Only with base sgd."""

    refused: Literal["restore", "drop"] = "restore"
    """Votes that the log did not accept stay in the momentum (`restore`), or leave it as if accepted (`drop`)."""

    overlap: bool = False
    """Compute the next step's gradient while this step is exchanged, at a look-ahead point. Steps are faster on slow links,
    and the loss is a little worse (docs/benchmarks.md)."""

    base: BaseOptimizerConfig = BaseOptimizerConfig()
    local: LocalConfig = LocalConfig()

    @model_validator(mode="before")
    @classmethod
    def _published(cls, values: Any) -> Any:
        """The paper's defaults in place of the settings that are not given."""
        paper = isinstance(values, dict) and values.get("method") == "paper"
        return {**PAPER_SETS, **values} if paper else values

    @model_validator(mode="after")
    def _of_the_method(self) -> OptimizerConfig:
        if self.method == "demo":
            if self.values == "16bit":
                raise ValueError('`values = "16bit"` belongs to `method = "paper"`: set the method, or other values')
            if self.chunk != 64:
                raise ValueError(f'`chunk = {self.chunk}` belongs to `method = "paper"`: method demo has chunks of 64')
            return self
        for key, (only, why) in PAPER_HAS_NOT.items():
            if getattr(self, key) != only:
                given = json.dumps(getattr(self, key))
                raise ValueError(f'`{key} = {given}` does not work with `method = "paper"`: {why}; remove the setting')
        if self.base != BaseOptimizerConfig():
            raise ValueError(
                '`base` does not work with `method = "paper"`: the paper applies the sign; remove the setting'
            )
        if self.local.steps > 1:
            raise ValueError(
                '`local.steps` does not work with `method = "paper"`: the paper votes on gradients; remove the setting'
            )
        return self

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
