"""The sections of run.toml that all optimizers of the library read: `[optimizer]`, with its base and its local steps.

Frozen, unknown keys refused. Defaults are the measured ones; where a number has a source, its field says so.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from protos.errors import OperatorError
from protos.mistakes import Mistake
from protos.optimizer_defaults import with_defaults

GROUP_SIZES = (8, 16, 32, 64, 128)
TOP_K_SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 640, 1024, 1536, 2048)

TOP_K_FEW_BITS_MAX = 512
"""The largest k whose values may be signs or 2 bits; of more coefficients these say too little."""

ONE_IN_SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

GroupSize = Literal[8, 16, 32, 64, 128]
TopK = Literal[4, 8, 16, 32, 64, 128, 256, 512, 640, 1024, 1536, 2048]
OneIn = Literal[2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]

CAP_DEFAULT = 2
CAP_MAX = 127

SHARED = ("random", "striding", "slicing", "full")
"""Selections whose places follow from the run and the step, and so have no bits in a payload (`node/optim/votes/places.py`)."""

DRAWN = (*SHARED, "independent")
"""The same, and those whose places follow from the peer, too."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


PAPER_HAS_NOT: dict[str, tuple[Any, str]] = {
    "beta2": (0.0, "the paper has no second moment"),
    "nesterov": (0.0, "the paper's momentum is plain"),
    "selection": ("topk", "the paper sends the largest coefficients of a chunk, wherever they are"),
    "values": ("16bit", "the paper sends values, here with 16 bits"),
    "transform": ("dct", "the paper's transform is the DCT"),
    "magnitudes": (False, "the paper takes the sign at the end"),
    "overlap": (False, "the paper has no look-ahead"),
    "cap": (CAP_DEFAULT, "the paper takes a mean, which has no cap"),
    "decay": ("all", "the paper decays all parameters"),
}
"""Settings of `optimizer` that `paper` has not: the only value that is accepted, and the reason."""


class BaseOptimizerConfig(Section):
    """The rule that changes the parameters, given the votes of all peers (arXiv 2411.19870v2). Its state is replicated.

    A name alone (`base = "muon"`) is that base with its defaults.
    """

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) else values

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

    block: Literal[0, 64] = 0
    """Of muon: 64 makes each chunk of 64 x 64 orthogonal alone, without state; 0 makes whole matrices orthogonal."""

    iterations: int = Field(default=5, ge=2, le=5)
    """Of muon: Newton-Schulz iterations."""

    output: Literal["real", "sign"] = "real"
    """Of muon with `block = 64`: the orthogonal chunk itself, or its signs."""

    tables: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(
        default=[
            "*emb", "*embed", "*embedding", "*embeddings", "*embedding_table",
            "embed_tokens", "embed_positions", "embed_in", "embed_out", "wte", "wpe",
            "lm_head", "to_logits", "head", "output", "ff_out", "shared",
        ],
        max_length=64,
    )  # fmt: skip
    """Matrices whose names end with one of these before `.weight` are tables (embeddings, heads), as are those of an embedding
    module: muon gives them the sign as it does vectors, and `decay = "matrices"` leaves them out. A convolution is no table."""

    @property
    def counts(self) -> bool:
        """Whether the base counts its steps: it has state of its own."""
        return self.name != "sign" and not self.block

    @model_validator(mode="after")
    def _of_muon(self) -> BaseOptimizerConfig:
        for key, none in {"block": 0, "iterations": 5, "output": "real"}.items():
            if getattr(self, key) != none and self.name != "muon":
                given = json.dumps(getattr(self, key))
                raise Mistake(
                    f'`base.{key} = {given}` has no effect with base {self.name!r}: set `name = "muon"`, or remove it',
                    key,
                    "name",
                )
        if self.output != "real" and not self.block:
            raise Mistake(
                f'`base.output = "{self.output}"` needs `block = 64`: whole matrices stay real', "output", "block"
            )
        if self.block and (self.momentum or self.nesterov):
            raise Mistake(
                f"`base.block = {self.block}` works without momentum of the aggregate: set `momentum = 0` and "
                "`nesterov = false`, or `block = 0`",
                "block",
                "momentum",
            )
        return self


class LocalStepsConfig(Section):
    """Local steps (DiLoCo, arXiv 2311.08105): peers take AdamW steps of their own and vote on where these led."""

    steps: int = Field(default=1, ge=1, le=10_000)
    """Local steps in a clock step; 1 is none: votes are on the gradient. The samples of a clock step are cut in as many."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """The local optimizer. `muon` (arXiv 2505.23725) moves matrices by Muon with updates as large as AdamW's, and tables and
    vectors by AdamW; not for peers of several devices."""

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

    recipe: Literal["none", "diloco-demo", "sparseloco"] = "none"
    """A whole method by name: its settings count where this file sets none. `diloco-demo` is arXiv 2510.03371: 30 local steps,
    Nesterov momentum of .9 in each peer, top-640 after the DCT with 8 bits, outer rate .7. `sparseloco` is arXiv 2508.15706: 15
    local steps, error feedback of .95 and no outer momentum, top-64 of each 4,096 with 2 bits, outer rate 1
    (docs/optimizers.md)."""

    chunk: Literal[8, 16, 32, 64, 128] = 64
    """Of method paper: the longest side of a chunk."""

    lr: float = Field(default=2e-3, gt=0, le=2)
    """Peak learning rate. By default `run create` computes it: 4e-3 for base muon, less above 0.9 M parameters, and more above
    1,024 tokens a step (docs/optimizers.md). With base sign 2e-3 was best at 0.66 M. With local steps it is the outer one:
    about 0.7."""

    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after the warm-up. `wsd` stays at `lr`, and decays in the last `decay_steps`
    (arXiv 2405.18392, 2404.06395); `run decay` starts the decay of a `wsd` or `constant` run by hand."""

    warmup_steps: int = Field(default=10, ge=0)
    """Steps of linear warm-up."""

    lr_final_ratio: float = Field(default=0.1, ge=0, le=1)
    """The end of a schedule that decays, as a part of lr."""

    decay_steps: int = Field(default=0, ge=0)
    """For wsd: steps of the decay, which has the shape of 1 - sqrt. 0: a fifth of the run's steps."""

    beta: float = Field(default=0.95, ge=0, lt=1)
    """Momentum decay; .95 and .999 made no difference at 0.66 M parameters."""

    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of each peer's private second moment: gradients are divided by it before they become momentum (as in Adam). 0
    for none; it learns better (docs/benchmarks.md), and costs a peer 4 bytes a parameter."""

    nesterov: float = Field(default=0.0, ge=0, lt=1)
    """Decay of each peer's own Nesterov momentum, which its gradient, or where its local steps led, passes before the votes see
    it. 0 for none; otherwise it needs `beta2 = 0`, and costs a peer 4 bytes a parameter."""

    weight_decay: float = Field(default=0.0, ge=0, lt=1)
    """Decoupled weight decay."""

    decay: Literal["all", "matrices"] = "all"
    """Which parameters it reaches: all, or those of two and more dimensions that are no tables (`base.tables`)."""

    clip_norm: float = Field(default=1.0, gt=0)
    """With `beta2 = 0`, and in local steps: the norm that a peer clips a gradient to before its momentum sees it."""

    selection: Literal["groups", "topk", "random", "striding", "slicing", "full", "independent"] = "groups"
    """`groups`: the largest coefficient of every group; `topk`: the largest of a chunk, wherever they are. The other four
    (arXiv 2502.06728) send no places, since the run and the step decide these: coefficients at random (`random`), at equal
    distances (`striding`) or next to each other (`slicing`), one in `one_in`; or all of them (`full`). `independent` sends no
    places either: they are at random, and each peer draws its own."""

    group_size: GroupSize = 128
    """For groups: the number of coefficients that a vote chooses from, unless a peer sets its own. 128 is a byte a vote; 16
    costs 5 times as many bytes."""

    top_k: TopK = 32
    """For topk: components of a chunk of 4096, unless a peer sets its own. More than 512 need 8-bit values."""

    one_in: OneIn = 16
    """For random, striding, slicing and independent: one coefficient in so many has a vote in a step, unless a peer sets its
    own. A vote is its value alone, one bit for a sign: 16 costs as many bytes as group_size 128."""

    cap: int = Field(default=CAP_DEFAULT, ge=2, le=CAP_MAX)
    """How far the sum of the votes for a coefficient goes, either way: so many peers at most decide how far it moves in a
    step. Only with values sign, and base sign or muon by chunks; sums of all others grow with the peers."""

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
    """Without it muon by chunks of 64 with 2 iterations, or sign with method paper, local steps or magnitudes."""

    local: LocalStepsConfig = LocalStepsConfig()

    @model_validator(mode="wrap")
    @classmethod
    def _published(cls, values: Any, made: ModelWrapValidatorHandler[OptimizerConfig]) -> OptimizerConfig:
        """The defaults of the method or recipe in place of the settings that are not given. They do not count as set."""
        config = made(with_defaults(values) if isinstance(values, dict) else values)
        if isinstance(values, dict):
            config.model_fields_set.intersection_update(values)
        return config

    @model_validator(mode="after")
    def _of_the_method(self) -> OptimizerConfig:
        if self.method == "demo":
            if self.values == "16bit":
                raise Mistake(
                    '`values = "16bit"` belongs to `method = "paper"`: set the method, or other values',
                    "values",
                    "method",
                )
            if self.chunk != 64:
                raise Mistake(
                    f'`chunk = {self.chunk}` belongs to `method = "paper"`: method demo has chunks of 64',
                    "chunk",
                    "method",
                )
            return self
        for key, (only, why) in PAPER_HAS_NOT.items():
            if getattr(self, key) != only:
                given = json.dumps(getattr(self, key))
                raise Mistake(
                    f'`{key} = {given}` does not work with `method = "paper"`: {why}; remove the setting', key, "method"
                )
        if self.base != BaseOptimizerConfig():
            raise Mistake(
                '`base` does not work with `method = "paper"`: the paper applies the sign; remove the setting',
                "base",
                "method",
            )
        if self.local.steps > 1:
            raise Mistake(
                '`local.steps` does not work with `method = "paper"`: the paper votes on gradients; remove the setting',
                "local.steps",
                "method",
            )
        return self

    @model_validator(mode="after")
    def _of_the_recipe(self) -> OptimizerConfig:
        if self.recipe != "none" and self.method != "demo":
            raise Mistake(
                f'`recipe = "{self.recipe}"` is made of the parts of `method = "demo"`: remove one of the two',
                "recipe",
                "method",
            )
        return self

    @model_validator(mode="after")
    def _capped(self) -> OptimizerConfig:
        base = "sign" if self.base.block else self.base.name  # by chunks, votes alone decide, as with sign
        for key, given, only in (("values", self.values, "sign"), ("base", base, "sign")):
            if self.cap != CAP_DEFAULT and given != only:
                raise Mistake(
                    f'`cap = {self.cap}` does not work with `{key} = "{given}"`, whose sums grow with the peers: remove `cap`, '
                    f'or set `{key} = "{only}"`',
                    "cap",
                    key,
                )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerConfig:
        if self.magnitudes and self.base.name != "sgd":
            raise Mistake(
                f"`magnitudes` have no effect with base {self.base.name!r}: only sgd keeps sizes", "magnitudes", "base"
            )
        if self.magnitudes and self.beta2:
            raise Mistake(
                "`magnitudes` needs `beta2 = 0`: divided gradients have no size of their own", "magnitudes", "beta2"
            )
        if self.selection == "topk" and self.top_k > TOP_K_FEW_BITS_MAX and self.values != "8bit":
            raise Mistake(
                f'`top_k = {self.top_k}` needs `values = "8bit"`: other values have at most {TOP_K_FEW_BITS_MAX}',
                "top_k",
                "values",
            )
        if self.nesterov and self.beta2:
            raise Mistake(
                "`nesterov` needs `beta2 = 0`: the second moment divides plain gradients", "nesterov", "beta2"
            )
        if self.local.steps > 1 and not self.magnitudes:
            raise Mistake(
                "local steps need `magnitudes = true` and base sgd: how far a peer went is the update's size",
                "local.steps",
                "magnitudes",
            )
        if self.local.steps > 1 and self.overlap:
            raise Mistake(
                "`overlap` is for gradients; local steps wait for the network once in many steps anyway",
                "overlap",
                "local",
            )
        return self

    @property
    def vote_size(self) -> int:
        """Group size, k or one_in, whichever the selection has; 1 for `full`."""
        return getattr(self, SIZE_KEYS[self.selection]) if self.selection in SIZE_KEYS else 1

    def size_of(self, own: int | None) -> int:
        """The size of the votes of a peer that sets its `own`, or the run's. OperatorError for one that the run has not."""
        key = SIZE_KEYS.get(self.selection)
        if own is None or key is None:
            return self.vote_size
        most = TOP_K_FEW_BITS_MAX if key == "top_k" and self.values != "8bit" else TOP_K_SIZES[-1]
        sizes = [size for size in SIZES[key] if size <= most]
        if own not in sizes:
            raise OperatorError(
                f"vote_size = {own}: the run selects by {self.selection}, whose {key} is one of {', '.join(map(str, sizes))} "
                f"with values {self.values}; take one of these, or off for the run's own, {self.vote_size}"
            )
        return own

    @property
    def shared(self) -> bool:
        """Whether all peers vote for the same coefficients in a step."""
        return self.selection in SHARED

    @property
    def summable(self) -> bool:
        """Whether the sum of a step's votes is small and says all that the weights need: signs at the same places, capped."""
        capped = self.base.name == "sign" or bool(self.base.block)
        return (self.method, self.selection, self.values) == ("demo", "random", "sign") and capped

    @property
    def drawn(self) -> bool:
        """Whether the places of votes follow from the run and the step."""
        return self.selection in DRAWN


SIZE_KEYS = {
    "groups": "group_size", "topk": "top_k",
    "random": "one_in", "striding": "one_in", "slicing": "one_in", "independent": "one_in",
}  # fmt: skip
"""The setting that says how large the votes of a selection are; `full` has none."""

SIZES = {"group_size": GROUP_SIZES, "top_k": TOP_K_SIZES, "one_in": ONE_IN_SIZES}
