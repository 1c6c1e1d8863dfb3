"""A torch optimizer between two steps: its groups of parameters, its state, and every way to save and copy it.

`DeMoOptimizer` adds the step. The state is what torch expects (`optimizer_state`). Loading refuses what does not belong to
these parameters, settings or this rank, before anything is changed.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import itertools
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.given_groups import (
    as_usual,
    check_effect,
    check_known,
    check_options,
    check_ordered,
    named_of,
    options_of,
    saved_group,
    settings_digest,
    warn_of_hidden,
    warn_of_stacks,
    without_place,
)
from node.optim.local import LocalConfig, LocalSteps
from node.optim.optimizer_state import OptimizerState, Voter, Whose
from node.optim.paper_demo import PaperConfig, PaperDeMo
from node.optim.process_group import TakesScale
from node.optim.run_settings import plain
from node.optim.second_moment import local_part
from node.optim.sharded_demo import ShardedDeMo
from node.optim.spread import is_sharded
from node.optim.votes.places import DRAWN, INDEPENDENT

RANK_BYTES = 4
DRIFT_BYTES = 1 << 18
ABSTAINED_SHOWN = 20
"""Steps: a GradScaler's first ones overflow up to 16 times."""

MEANING = {"layout": "model", "method": "method", "magnitudes": "magnitudes", "seed": "seed"}
"""Entries of a group that say what its momentum means, and the words for them."""

_ROUND_OPEN = (
    "the optimizer is in a round of local steps, where the parameters are not the replicated ones: save and copy it when "
    "`optimizer.exchanged` is true"
)


@dataclass(frozen=True)
class Settings:
    """What is the same for all groups of an optimizer."""

    paper: bool
    values: dict[str, Any]
    """Fields of `DeMoConfig` or `PaperConfig`."""
    kinds: dict[str, str] = field(default_factory=dict)
    """As `layout.kinds_of`."""
    kinds_known: bool = False
    hidden: Sequence[str] = ()
    """As `layout.hidden_kinds`."""
    local: LocalConfig | None = None

    def __post_init__(self) -> None:
        self.values.update({name: plain(value) for name, value in self.values.items()})

    def config(self, group: Mapping[str, Any], rank: int = 0) -> DeMoConfig | PaperConfig:
        """The settings of a group of parameters, on a rank. Raises `ValueError`."""
        own = {name: group[name] for name in ("weight_decay", "clip_norm")} | {"beta": group["momentum"]}
        if self.paper:
            return PaperConfig(**own, **self.values)
        if self.local is not None:
            own["clip_norm"] = None  # local steps clip their own gradients
        if self.values.get("selection") == INDEPENDENT:
            own["author"] = author_of(rank)
        config = DeMoConfig(**own, group_size=group["group_size"], **self.values)
        check_effect(config, group["clip_norm"], local=self.local is not None)
        return config

    @property
    def seed(self) -> int | None:
        """What random places follow from; None where places do not follow from it."""
        drawn = self.values.get("selection") in DRAWN
        return int.from_bytes(self.values["seed"], "big", signed=True) if drawn else None


def author_of(rank: int) -> bytes:
    """What stands for a rank's public key where its places follow from one."""
    return (rank + 1).to_bytes(RANK_BYTES, "big")


class ParameterGroups(torch.optim.Optimizer):
    """Parameters with their state, and no step."""

    _step_supports_amp_scaling = TakesScale()
    _number = 0  # of a copy, too

    @as_usual
    def __init__(self, params: Any, defaults: dict[str, Any], settings: Settings) -> None:
        self.settings = settings
        self._whose, self._steps = Whose(), 0
        self._begin()
        check_ordered(params)
        super().__init__(params, defaults)
        if not self._demos:
            raise ValueError("no parameter to train: all are frozen (requires_grad is False) or empty")
        self._show()

    def _begin(self) -> None:
        """What an optimizer has before its first group of parameters, a copy too."""
        self._demos: list[Voter] = []
        self._local: LocalSteps | None = None
        self._local_done = 0
        self._compared = self._told_apart = False
        self._live: OptimizerState | None = None
        self._listed: list[list[int]] = []
        self._known: frozenset[int] = frozenset()
        self._abstained = 0  # steps in a row

    def _place(self) -> int:
        """1, or more: optimizers with equal settings that were made before are there, and have made no step either."""
        own = settings_digest(self.settings.values, self._voting)

        def before() -> int:
            earlier = [it for it in _made if it._number < self._number and not it._steps]
            return sum(settings_digest(it.settings.values, it._voting) == own for it in earlier)

        if before():
            gc.collect()  # a rank may have made one more, and let it go
        return before() + 1

    @property
    def exchanged(self) -> bool:
        """Whether the parameters are the replicated ones: always, without local steps."""
        return self._local_done == 0

    @property
    def _voting(self) -> list[dict[str, Any]]:
        """The groups that have a parameter to train; a group may be empty, as with other optimizers."""
        return [group for group in self.param_groups if group["layout"]]

    # ---- groups -----------------------------------------------------------------------------------------------------

    @as_usual
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. A parameter that was frozen when its group was made may be added once it is trained."""
        if not self.exchanged:
            raise ValueError(
                "parameters may be added between rounds of local steps, when `optimizer.exchanged` is true"
            )
        options = options_of(param_group, without_place(self.param_groups, named_of(param_group), self._placed()))
        super().add_param_group(options)
        group = self.param_groups[-1]
        try:
            self._take(group)
        except ValueError:
            del self.param_groups[-1]
            raise
        self._make_local()
        self._compared = False
        if self._live is not None:
            self._show()

    def _placed(self) -> frozenset[int]:
        return frozenset(id(parameter) for voter in self._demos for parameter in voter.parameters)

    def _take(self, group: dict[str, Any]) -> None:
        """Give a group its optimizer, if it has a parameter to train. Raises `ValueError`."""
        if all(not tensor.requires_grad or (not is_lazy(tensor) and not tensor.numel()) for tensor in group["params"]):
            group.update(layout="", method="", magnitudes=False, seed=None)
        else:
            self._demos.append(self._made(group))

    def _make_local(self) -> None:
        if self.settings.local is not None:
            places = [place for voter in self._demos for place in voter.layout.places]
            parameters = [parameter for voter in self._demos for parameter in voter.parameters]
            self._local = LocalSteps(parameters, self.settings.local, places)

    def _made(self, group: dict[str, Any]) -> Voter:
        """The optimizer of one group of parameters. Raises `ValueError`."""
        config, sharded = self.settings.config(group), is_sharded(group["params"])
        named = list(zip(_names(group), group["params"], strict=True))
        voter: Voter
        if isinstance(config, PaperConfig):
            if sharded:
                raise ValueError("method paper works on one device, and the parameters are sharded: use method demo")
            voter, method = PaperDeMo(named, config, self.settings.kinds), f"paper, chunks of {config.chunk}"
        else:
            if not group.get("param_names") and (config.base.name == "muon" or config.decay == "matrices"):
                raise ValueError(
                    'base muon and decay="matrices" treat embeddings and heads apart, which parameters without names do not '
                    "tell: give the module, DeMoOptimizer(model, ...)"
                )
            if config.base.name == "muon" and not self.settings.kinds_known:
                warn_of_stacks(named, config.base.muon_except)
            if config.base.name == "muon":
                warn_of_hidden(self.settings.hidden, config.base.muon_except)
            voter = (ShardedDeMo if sharded else DeMo)(named, config, self.settings.kinds)
            method = config.method(config.made_transform())
        magnitudes = bool(self.settings.values.get("magnitudes"))
        group.update(layout=voter.layout.digest().hex(), method=method, magnitudes=magnitudes, seed=self.settings.seed)
        return voter

    def _check_groups(self) -> None:
        """Raises `ValueError` if parameters or options came or went, or one is trained that was frozen."""
        check_options(self.param_groups, MEANING)
        if [[id(tensor) for tensor in group["params"]] for group in self.param_groups] != self._listed:
            raise ValueError(
                "the parameters in optimizer.param_groups were changed: call optimizer.add_param_group(...) for new ones, or "
                "make a new optimizer"
            )
        for group in self.param_groups:
            if any(p.requires_grad and id(p) not in self._known for p in group["params"]):
                check_known(zip(_names(group), group["params"], strict=True), self._known)

    def _notice(self, *, abstained: bool) -> None:
        """Warn, once in a row of steps, of a rank that adds nothing in step after step: else nobody hears of it."""
        self._abstained = self._abstained + 1 if abstained else 0
        if self._abstained != ABSTAINED_SHOWN:
            return
        came = any(parameter.grad is not None for parameter in trained(self._demos))
        why = (
            "gradients are there, and are not finite: look at this rank's loss and batches"
            if came
            else "backward() leaves no gradient in these parameters: the model that is trained may be another copy"
        )
        several = len(self._demos) > 1  # a group may be silent alone
        what, told = ("a group of parameters, or all,", "them") if several else ("the model", "it")
        then = f"only the other ranks train {told}" if self._whose.ranks > 1 else f"nothing trains {told}"
        warnings.warn(
            f"this rank has had no votes for {what} in {ABSTAINED_SHOWN} steps in a row, so {then}; {why} "
            "(optimizer.abstentions counts such steps)",
            RuntimeWarning,
            stacklevel=5,
        )

    # ---- state ------------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        """Put the live state into `self.state`."""
        self._listed = [[id(tensor) for tensor in group["params"]] for group in self.param_groups]
        self._known = self._placed()
        self._live = OptimizerState(self._demos, self._local, self._whose)
        self._live.count(self._steps)
        self._live.show(self.state)

    def state_dict(self) -> dict[str, Any]:
        """As torch's. A momentum is private to a rank: each saves its own, when `exchanged`. Changes nothing."""
        if not self.exchanged:
            raise RuntimeError(_ROUND_OPEN)
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state, by copy, and the options of the saved groups (`lr`, ...), as torch's optimizers do.

        Raises `ValueError`, before anything is changed, if it belongs to other parameters, another method, another seed or
        another rank.
        """
        self._load(state_dict, replicated=False)

    @torch.no_grad()
    def load_replicated(self, state_dict: dict[str, Any]) -> None:
        """Take over the part of any rank's saved state that is equal on all ranks; this rank's momentum starts at zero.

        For a rank that has no state of its own: a new one, or one of a run with another number of ranks. Raises `ValueError` as
        `load_state_dict`.
        """
        self._load(state_dict, replicated=True)

    @as_usual
    def _load(self, state_dict: Mapping[str, Any], *, replicated: bool) -> None:
        if not self.exchanged:
            raise RuntimeError(_ROUND_OPEN)
        if missing := {"state", "param_groups"} - state_dict.keys():
            raise ValueError(
                f"this is no state of an optimizer: it has no {' and no '.join(sorted(missing))} (it has "
                f"{', '.join(map(str, state_dict)) or 'nothing'})"
            )
        if "demo" in state_dict:
            raise ValueError(
                "a version before December 2026 saved this state, with its tensors under the key demo: load the model alone; "
                "the momentum starts anew"
            )
        before = self.state, self.param_groups
        saved = state_dict["param_groups"]
        own = [*self.param_groups, *({} for _ in saved[len(self.param_groups) :])]
        groups = [saved_group(group, here) for group, here in zip(saved, own, strict=False)]
        super().load_state_dict({**state_dict, "param_groups": groups})
        assert self._live is not None
        try:
            _check_meaning(before[1], self.param_groups)
            self._steps = self._live.take(self.state, replicated=replicated)
        except ValueError:
            self.state, self.param_groups = before
            raise
        self._compared = False
        self.state.clear()
        self._live.show(self.state)

    # ---- copies -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if not self.exchanged:
            raise RuntimeError(_ROUND_OPEN)
        own = {"settings": self.settings, "_whose": self._whose, "_steps": self._steps}
        return {**super().__getstate__(), **own}

    @as_usual
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "settings" not in state:  # torch's load_state_dict
            return
        self._begin()
        for group in self.param_groups:
            self._take(group)
        self._make_local()
        self._live = OptimizerState(self._demos, self._local, self._whose)
        self._live.take(self.state)
        self._show()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with the same ranks. Parameters are copied, too, unless they are copied in the same call."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(ParameterGroups.__getstate__(self), memo))
        return copied


_made, _numbers = weakref.WeakSet[ParameterGroups](), itertools.count(1)


def listed(optimizer: ParameterGroups) -> int:
    """The number of a new optimizer that votes with other ranks: the order is known in which a rank made its own."""
    _made.add(optimizer)
    return next(_numbers)


def _names(group: Mapping[str, Any]) -> list[str]:
    return group.get("param_names") or [str(index) for index in range(len(group["params"]))]


def _check_meaning(here: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Raises `ValueError` if momenta of saved groups mean something else than here."""
    for own, theirs in zip(here, saved, strict=True):
        for name, word in MEANING.items():
            if name in theirs and theirs[name] != own[name]:
                if name == "layout":
                    raise ValueError(
                        "the saved state belongs to another model (the layouts differ): load what this model saved"
                    )
                raise ValueError(
                    f"the saved state has {word} {theirs[name]}, and this optimizer has {word} {own[name]}: set {word} as it "
                    "was"
                )


def drift_digest(voters: list[Voter], step: int) -> str:
    """16 hexadecimal digits of a part of the replicated state, another part in each step: it costs a millisecond at most.

    Of sharded parameters: of this rank's rows.
    """
    parts = b"".join(state_digest(_own_rows(voter), step, bytes_max=DRIFT_BYTES) for voter in voters)
    return hashlib.sha256(parts).hexdigest()[:16]


def _own_rows(voter: Voter) -> Sequence[Tensor]:
    """What this rank has of the replicated state."""
    if isinstance(voter, ShardedDeMo):
        return [*(local_part(parameter).detach() for parameter in voter.parameters), *voter.base_state.values()]
    return voter.replicated


def trained(voters: list[Voter]) -> list[Tensor]:
    """All parameters that have a place."""
    return [parameter for voter in voters for parameter in voter.parameters]
