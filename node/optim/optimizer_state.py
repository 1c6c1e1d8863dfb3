"""The state of a `DeMoOptimizer` as torch expects it: tensors of each parameter, by name, in `optimizer.state`.

The tensors are views of what the step uses, so every way to save an optimizer finds the whole state and changes nothing:
`state_dict`, `torch.distributed.checkpoint`, pickle. A momentum is a rank's own. Its name says whose it is where there are
several ranks, since checkpoints of several ranks keep one tensor under one name. A base's state is equal on all ranks.

It refuses a state of other parameters, of another method, or of another rank, before anything is changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from node.optim.demo import DeMo
from node.optim.local import LocalSteps
from node.optim.paper_demo import PaperDeMo
from node.optim.sharded_demo import ShardedDeMo
from node.optim.voting import ParameterState

Voter = DeMo | ShardedDeMo | PaperDeMo
STEP, COUNT = "step", "gradients"
_NAMES = {STEP, COUNT, "momentum", "momentum_pool", "second", "second_rows", "second_columns", "nesterov"}
_RANK = re.compile(r"_rank\d+of\d+|_shard\d+of\d+")


@dataclass(frozen=True)
class Whose:
    """The rank that a momentum belongs to: the peer's rank among peers, and the device's among those of the peer."""

    rank: int = 0
    ranks: int = 1
    shard: int = 0
    shards: int = 1

    @property
    def replicated(self) -> str:
        """The end of names of what is equal on all peers."""
        return f"_shard{self.shard}of{self.shards}" if self.shards > 1 else ""

    @property
    def private(self) -> str:
        """The end of names of what is this rank's own."""
        return (f"_rank{self.rank}of{self.ranks}" if self.ranks > 1 else "") + self.replicated


class OptimizerState:
    """The live state of all groups of parameters. Made again after parameters came, or once the ranks are known."""

    def __init__(self, voters: Sequence[Voter], local: LocalSteps | None, whose: Whose) -> None:
        self._voters, self._local, self._whose = list(voters), local, whose
        self._step = torch.zeros((), dtype=torch.float32)
        self._counts = [torch.zeros(len(voter.parameters), dtype=torch.float32) for voter in voters]
        self._live: dict[Tensor, dict[str, Tensor]] = {}
        for voter, counts in zip(self._voters, self._counts, strict=True):
            for index, (parameter, own) in enumerate(zip(voter.parameters, voter.parameter_state(), strict=True)):
                if voter.second_counts is not None:
                    own.private[COUNT] = counts[index]
                self._live[parameter] = {STEP: self._step, **self._named(own)}
        for parameter, buffers in local.buffers() if local is not None else ():
            self._live[parameter] |= self._named(ParameterState({f"local_{name}": it for name, it in buffers.items()}))

    def _named(self, own: ParameterState) -> dict[str, Tensor]:
        private = {name + self._whose.private: tensor for name, tensor in own.private.items()}
        return private | {name + self._whose.replicated: tensor for name, tensor in own.replicated.items()}

    def show(self, state: MutableMapping[Any, Any]) -> None:
        """Put the live tensors into `optimizer.state`, in place of what was there for these parameters."""
        for parameter, tensors in self._live.items():
            state[parameter] = dict(tensors)

    def count(self, step: int) -> None:
        """Bring the numbers in the state up to date: steps made, and gradients that each parameter has had."""
        self._step.fill_(step)
        for voter, counts in zip(self._voters, self._counts, strict=True):
            if voter.second_counts is not None:
                counts.copy_(torch.tensor(voter.second_counts, dtype=torch.float32))

    def check_shown(self, state: Mapping[Any, Any]) -> None:
        """Raises `ValueError` if a tensor in `optimizer.state` is no longer the live one: the step would not see it."""
        for parameter, tensors in self._live.items():
            shown = state.get(parameter, {})
            for name, tensor in tensors.items():
                there = shown.get(name)
                if there is not tensor or there.device != tensor.device:
                    raise ValueError(
                        f"optimizer.state was changed ({name} was taken out, replaced or moved), and the step does not read "
                        "it from there: call optimizer.load_state_dict(...), or make a new optimizer"
                    )

    @torch.no_grad()
    def take(self, state: Mapping[Any, Any], *, replicated: bool = False) -> int:
        """Copy a loaded state, by parameter, into the live tensors. Returns its step. Raises `ValueError` before any change.

        `replicated`: only the part that is equal on all ranks; the rank's own starts anew.
        """
        pairs = []
        for index, (parameter, live) in enumerate(self._live.items()):
            loaded = {name: it for name, it in state.get(parameter, {}).items() if isinstance(it, Tensor)}
            wanted = live
            if replicated:
                wanted = {name: it for name, it in live.items() if _is_replicated(name)}
                loaded = {name: it for name, it in loaded.items() if _is_replicated(name)}
            self._check_names(index, set(loaded), set(wanted))
            for name, tensor in wanted.items():
                if loaded[name].shape != tensor.shape:
                    raise ValueError(
                        f"the saved {name} of parameter {index} has shape {tuple(loaded[name].shape)}, not "
                        f"{tuple(tensor.shape)}: load a state that this model saved"
                    )
                pairs.append((tensor, loaded[name]))
        for tensor, saved in pairs:
            tensor.copy_(saved)
        step = int(self._step)
        for voter, counts in zip(self._voters, self._counts, strict=True):
            seen = None if voter.second_counts is None else [int(count) for count in counts]
            voter.resume(None, seen, (step, step))  # type: ignore[arg-type]  # of the paper's method there are no counts
        return step

    def _check_names(self, index: int, saved: set[str], here: set[str]) -> None:
        """Raises `ValueError` with the reason if a parameter's saved tensors are not those that it has here."""
        if saved == here:
            return
        if not saved:
            raise ValueError(f"the saved state has nothing for parameter {index}: load a state that this model saved")
        bare = {_RANK.sub("", name) for name in saved}
        if bare == {_RANK.sub("", name) for name in here}:
            theirs = next(name for name in saved if name not in here)
            raise ValueError(
                f"the saved state is {_owner(theirs)}, and this is {_owner(self._whose.private)}: a momentum is a rank's own, "
                "so each rank saves its state and loads what it saved, in a trainer by register_load_state_dict_pre_hook "
                "(load_replicated takes over the rest)"
            )
        raise ValueError(_other_settings(bare, {_RANK.sub("", name) for name in here}))


def _is_replicated(name: str) -> bool:
    return name == STEP or name.startswith("base_")


def _owner(name: str) -> str:
    """The rank that the end of a name tells, in words."""
    words = [f"{kind} {own} of {all_}" for kind, own, all_ in re.findall(r"_(rank|shard)(\d+)of(\d+)", name)]
    return "that of " + (", ".join(words) if words else "a single rank")


def _other_settings(saved: set[str], here: set[str]) -> str:
    others = (
        "the saved state is of another model or another optimizer (it has "
        f"{', '.join(sorted(saved))}; expected {', '.join(sorted(here))}): load a state that this optimizer saved"
    )
    if not all(name in _NAMES or name.startswith(("base_", "local_")) for name in saved):
        return others
    whole, factored = "second" in saved and "second_rows" in here, "second_rows" in saved and "second" in here
    if whole or factored:
        kinds = ("whole", "factored") if whole else ("factored", "whole")
        return f"the saved second moment is {kinds[0]}, and this optimizer's is {kinds[1]}: set second_moment as it was"
    saved, here = ({"second" if name == "second_rows" else name for name in names} for names in (saved, here))
    for name, what, setting in (
        ("second", "second moment", "beta2"),
        ("nesterov", "Nesterov momentum", "nesterov"),
        ("local_exp_avg", "local steps", "local"),
    ):
        if (name in saved) != (name in here):
            one, other = ("a", "no") if name in saved else ("no", "a")
            return f"the saved state has {one} {what}, and this optimizer has {other} {what}: set {setting} as it was"
    if {name for name in saved if name.startswith("base_")} != {name for name in here if name.startswith("base_")}:
        return "the saved state is of another base: load it with the settings that saved it"
    return others
