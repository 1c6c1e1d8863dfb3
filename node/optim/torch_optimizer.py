"""DeMo as a `torch.optim.Optimizer`: the same maths in an existing training script, no swarm needed.

With torch.distributed every rank votes and applies everybody's votes: one `all_gather` of uint8 a step, gloo or nccl. The
optimizer refuses to average gradients: do not wrap the model in `DistributedDataParallel`, and start all ranks from the same
weights. Each step looks whether parameters and state are what they were, and whether all ranks make the same step (ADR 69).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

# Its functions take `dist.group.WORLD` as a default at import: None before `init_process_group`. torch would import it with the
# first optimizer, and a group that outlives `destroy_process_group` can abort the process at exit (gloo, torch 2.13).
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from node.optim.demo import DeMoConfig
from node.optim.digest import state_digest
from node.optim.exchange import (
    DRIFT,
    GRADIENT,
    LAYOUT,
    NUMBER,
    PARAMETERS,
    Exchange,
    ExchangeFailed,
    MomentumLost,
    Part,
    RankRole,
    RanksDiffer,
    ReplicasDiffer,
    check_parts,
    terms_of_shards,
)
from node.optim.given_groups import (
    OF_A_GROUP,
    SETTINGS,
    as_usual,
    check_known,
    check_paper,
    check_rate,
    defaults_of,
    seed_bytes,
    settings_digest,
    unwrapped_name,
)
from node.optim.layout import hidden_kinds, kinds_of
from node.optim.local import LocalConfig, LocalSteps
from node.optim.optimizer_state import Whose
from node.optim.paper_demo import PaperConfig
from node.optim.parameter_groups import ParameterGroups, Settings, author_of, drift_digest, listed, trained
from node.optim.process_group import are_told_apart, check_unwrapped, gradient_digest, group_of, unscale, weak_group
from node.optim.run_settings import plain
from node.optim.sharded_demo import ShardedDeMo
from node.optim.step import NonFiniteGradient, rounded_rate
from node.optim.votes import groups as votes

__all__ = ["DeMoOptimizer", "ExchangeFailed", "MomentumLost", "RanksDiffer", "ReplicasDiffer"]


class DeMoOptimizer(ParameterGroups, Joinable):
    """Updates from the votes of all ranks; see `node.optim.demo`.

    `params` as for any torch optimizer, or a module: fp32, contiguous, on one device. Groups may set their own `lr`,
    `beta`, `weight_decay`, `group_size` and `clip_norm` (the norm is that of the group), all ranks the same. `lr` is rounded to
    fp32 at each step, so any scheduler works; `beta` is the group's `momentum`, which OneCycleLR cycles. `process_group` None
    means all ranks (torch.distributed.group.WORLD), as everywhere in torch. `alone` trains a rank on its own votes.

    `settings` are the other fields of `DeMoConfig` (`decay`, `selection`, `top_k`, `one_in`, `cap`, `values`, `transform`,
    `magnitudes`, `nesterov`, `base`), the same for all groups and ranks. The defaults are a run's: `base` of a module is muon
    by chunks (`base.BY_CHUNKS`), and sign with `magnitudes`, or of parameters alone, which warns. `beta2` None is 0.99, and 0
    with `magnitudes` or `nesterov`, which exclude it. `seed` is what random places follow from, the same for all ranks. Base
    `muon` and `decay="matrices"` have to know tables: give the module. With named parameters, names alone tell tables, and
    `muon` warns of 3 dimensions (a stack of experts, or a convolution). Parameters without names raise `ValueError`.

    `method="paper"` is DeMo v1 as published (`paper_demo`). Then `beta` None is 0.999, `beta2` is 0, and `chunk` is the longest
    side of a chunk. The only other setting is `top_k` (32). Settings of the family raise `ValueError` with it.

    With `local` of more than one step (DiLoCo) every call of `step` is a local AdamW step, and each `local.steps`-th also
    exchanges. Then `lr` is the outer learning rate, and `magnitudes` with base `sgd`, which it needs, keep how far the ranks
    went. Between exchanges ranks hold different parameters; save and compare them when `exchanged`.

    Ranks that share parameters after `fully_shard` (FSDP2) vote for them once (`sharded_demo`). Then `process_group` has one
    rank of each peer: `mesh["peer"].get_group()` of a mesh with a dimension for peers and one for shards.

    A rank whose gradient is not finite, or that has none, abstains and applies the others' votes, so that replicas stay equal.
    `abstentions` counts such steps. A GradScaler works: `step` divides by its scale, and abstains if it found an infinity. A
    rank without a batch leaves with torch's `Join([optimizer])`.

    Every step raises on all ranks, before anything is applied: `ValueError` (on other ranks `RanksDiffer`) names a parameter, a
    gradient or a state that is not what it was; `RanksDiffer` is for different steps, optimizers or settings, `ReplicasDiffer`
    for different parameters, and `MomentumLost` if a rank's momentum is not a number.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float,
        *,
        method: Literal["demo", "paper"] = "demo",
        chunk: int = PaperConfig.chunk,
        beta: float | None = None,
        beta2: float | None = None,
        weight_decay: float = DeMoConfig.weight_decay,
        group_size: int = DeMoConfig.group_size,
        clip_norm: float | None = DeMoConfig.clip_norm,
        process_group: dist.ProcessGroup | None = None,
        alone: bool = False,
        local: LocalConfig | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        check_rate(lr)
        if alone and process_group is not None:
            raise ValueError("alone=True trains without other ranks: give it, or process_group, not both")
        if paper := method == "paper":
            check_paper(beta2, group_size, local, settings)
        elif method != "demo" or chunk != PaperConfig.chunk:
            raise ValueError(f"method {method!r} with chunk {chunk}: methods are demo, with chunks of 64, and paper")
        if unknown := settings.keys() - SETTINGS:
            there_are = sorted(SETTINGS | inspect.signature(DeMoOptimizer).parameters.keys() - {"params", "settings"})
            raise TypeError(f"{', '.join(sorted(unknown))}: no such setting; there are {', '.join(there_are)}")
        if isinstance(params, nn.Module):
            check_unwrapped(params)
        random = {"seed": seed_bytes(seed)}
        own = {"chunk": chunk} if paper else defaults_of(params, beta2, settings) | random
        if local is not None and local.steps > 1 and not settings.get("magnitudes"):
            raise ValueError(
                "local steps need `magnitudes = true` and base sgd: how far a peer went is the update's size"
            )
        module = params if isinstance(params, nn.Module) else None
        same = Settings(
            paper, {**own, **settings}, kinds_known=module is not None,
            kinds={} if module is None else {unwrapped_name(name): kind for name, kind in kinds_of(module).items()},
            hidden=() if module is None else hidden_kinds(module),
            local=local if local is not None and local.steps > 1 else None,
        )  # fmt: skip
        self._alone, self.abstentions = alone, 0
        self._group = weak_group(process_group)
        self._module = None if module is None else weakref.ref(module)
        beta = (PaperConfig.beta if paper else 0.95) if beta is None else beta
        options = {
            "lr": lr, "momentum": beta, "weight_decay": weight_decay, "group_size": group_size, "clip_norm": clip_norm
        }  # fmt: skip
        super().__init__(params if module is None else list(module.named_parameters()), options, same)
        self._number = 0 if alone else listed(self)
        self._connect()

    def _begin(self) -> None:
        super()._begin()
        Joinable.__init__(self)
        self._fault: ValueError | RanksDiffer | None = None
        self._exchange: Exchange | None = None

    def _connect(self) -> None:
        """Find the ranks that vote, once torch.distributed knows them. Raises `ValueError` or `RuntimeError`."""
        if self._exchange is not None:
            return
        sharded = self._sharded
        group = None if self._alone else group_of(self._group, sharded)
        place = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        shard = (0, 1) if sharded is None else (sharded.rank, sharded.ranks)
        whose = Whose(*place, *shard)
        if whose != self._whose:
            if self._steps:
                raise RuntimeError(
                    f"this optimizer was copied from rank {self._whose.rank} of {self._whose.ranks}, and this is rank "
                    f"{whose.rank} of {whose.ranks}: make a new one, and load the state that this rank saved"
                )
            self._whose = whose
            self._show()
        if group is not None:
            inner = None if sharded is None else sharded.group
            self._exchange = Exchange(group, lambda: self.join_device, inner)

    @property
    def _sharded(self) -> ShardedDeMo | None:
        return next((voter for voter in self._demos if isinstance(voter, ShardedDeMo)), None)

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            raise TypeError(
                "a process group cannot be pickled: save optimizer.state_dict(), or leave process_group out"
            )
        return {**super().__getstate__(), "_alone": self._alone, "abstentions": self.abstentions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "settings" in state:
            self._group = self._module = None
        super().__setstate__(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeMoOptimizer:
        copied: DeMoOptimizer = super().__deepcopy__(memo)
        copied._group, copied._alone, copied.abstentions = self._group, self._alone, self.abstentions
        return copied

    # ---- a step -----------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Vote with the gradients in `.grad`, exchange, apply. A collective call if there are other ranks.

        With local steps, only the last of a round is collective; the others move this rank's parameters alone.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        before = self.abstentions
        self._vote()
        self._notice(abstained=self.abstentions > before)
        return loss

    @as_usual
    def _vote(self) -> None:
        self._connect()
        self._fault = self._fault or self._found_fault()
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        inner = None if self._sharded is None else self._sharded.group
        skipped = self._fault is None and not unscale(found, scale, trained(self._demos), inner)
        self.abstentions += skipped
        if self._local is not None and not self._step_locally(self._local, skipped):
            return
        Join.notify_join_context(self)
        self._finish(skipped and self._local is None)

    def _found_fault(self) -> ValueError | None:
        """What is not as it was when the optimizer was made. The ranks of a sharded peer find the same."""
        fault = None
        try:
            self._check_groups()
            self._check_module()
            for voter, group in zip(self._demos, self._voting, strict=True):
                voter.check_parameters()
                voter.config = self.settings.config(group, self._whose.rank)
            assert self._live is not None
            self._live.check_shown(self.state)
            for group in self._voting:
                check_rate(group["lr"])
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:  # of values that are no numbers, too
            fault = error if isinstance(error, ValueError) else ValueError(f"an option of a group: {error}")
        if self._sharded is not None:
            words: list[str | None] = [None] * self._sharded.ranks
            dist.all_gather_object(words, None if fault is None else str(fault), group=self._sharded.group)
            theirs = next((word for word in words if word is not None), None)
            fault = fault or (None if theirs is None else ValueError(theirs))
        return fault

    def _check_module(self) -> None:
        """Raises `ValueError` for a parameter of the module that is trained and has no place: it came, or was exchanged."""
        module = None if self._module is None else self._module()
        if module is not None and any(p.requires_grad and id(p) not in self._known for p in module.parameters()):
            check_known(module.named_parameters(), self._known)

    def _step_locally(self, local: LocalSteps, skipped: bool) -> bool:
        """One local step; True after the last of a round, with what the round came to in `.grad`.

        A step whose gradient is not finite is left out.
        """
        if self._fault is None and not local.borrowed:
            local.borrow()
        try:
            if self._fault is None and not skipped:
                local.step()
                self.abstentions += all(parameter.grad is None for parameter in trained(self._demos))
        except NonFiniteGradient:
            self.abstentions += 1
        self._local_done = (self._local_done + 1) % local.config.steps
        if not self._local_done and local.borrowed:
            local.give_back(gradient=self._fault is None)
        return not self._local_done

    def _part(self, skipped: bool) -> Part:
        """This rank's part of the exchange. Its votes stay open until all ranks have been heard."""
        step, rates, terms = self._steps + 1, list[float](), dict[str, Any]()
        if self._fault is None:
            rates = [rounded_rate(group["lr"]) for group in self._voting]
            terms = self._terms(rates)
        if self._fault is not None:
            return Part(step, {"reason": str(self._fault)}, [], RankRole.REFUSED)
        if not skipped and all(parameter.grad is None for parameter in trained(self._demos)):
            skipped, self.abstentions = True, self.abstentions + 1
        if skipped:
            return Part(step, terms, [b""] * len(self._demos))
        if self._exchange is not None and not self._told_apart:
            terms[GRADIENT] = gradient_digest(trained(self._demos))
        payloads = []
        for voter, lr in zip(self._demos, rates, strict=True):
            try:
                payloads.append(voter.propose(lr, step).payload)
            except NonFiniteGradient:
                self.abstentions += 1
                payloads.append(b"")
            except votes.NotANumber:  # all ranks are told: otherwise they wait in the exchange for ever
                return Part(step, terms, [], RankRole.LOST)
        return Part(step, terms, payloads)

    def _terms(self, rates: list[float]) -> dict[str, Any]:
        """What all ranks have to have in this step; at first the parameters, too."""
        groups = self._voting
        terms: dict[str, Any] = {f"lr of group {index}": rate for index, rate in enumerate(rates)}
        for i, group in enumerate(groups):
            terms |= {f"{name} of group {i}": plain(group[name]) for name in OF_A_GROUP[1:]}
        # In each step: a program with two optimizers may call them in another order on one rank.
        terms[LAYOUT] = settings_digest(self.settings.values, groups)
        if not self._compared:
            own = b"".join(voter.layout.digest() + state_digest(voter.replicated) for voter in self._demos)
            terms |= {PARAMETERS: own.hex(), **({} if self._steps else {NUMBER: self._place()})}
        elif self._exchange is not None:
            terms[DRIFT] = drift_digest(self._demos, self._steps)
        if self._sharded is not None:
            terms, self._fault = terms_of_shards(terms, self._sharded.group)
        return terms

    def _finish(self, skipped: bool | None) -> None:
        """Exchange this rank's part (None: it has left), and apply all. Other votes go back into the momentum."""
        accepted = False
        try:
            mine = Part(self._steps + 1, {}, [], RankRole.LEFT) if skipped is None else self._part(skipped)
            parts = [mine] if self._exchange is None else self._exchange.parts(mine)
            if self._fault is not None:
                raise self._fault
            terms = check_parts(parts)
            self._told_apart = self._told_apart or are_told_apart(parts, trained(self._demos))
            accepted = True
        finally:
            self._fault = None
            for voter in self._demos:
                if voter.pending:
                    voter.settle(accepted)
        if mine.taking is RankRole.LEFT:
            self._follow(terms)
        self._compared, self._steps = True, mine.step
        if any(payload for part in parts for payload in part.payloads):
            for index, voter in enumerate(self._demos):
                spoken = {n: it.payloads[index] for n, it in enumerate(parts) if it.payloads and it.payloads[index]}
                lr, ranks = float(terms[f"lr of group {index}"]), list(map(author_of, spoken))
                voter.apply([(voter.size, payload) for payload in spoken.values()], lr, mine.step, ranks)
        assert self._live is not None
        self._live.count(self._steps)

    # ---- leaving before the others (torch's Join) -------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For `torch.distributed.algorithms.Join`: a rank without a batch abstains and follows until all have left."""
        return _Leaving(self)

    @property
    def join_device(self) -> torch.device:
        """The device of torch's own messages in `Join`."""
        device: torch.device = trained(self._demos)[0].device
        return device

    @property
    def join_process_group(self) -> Any:
        """The ranks that vote. Raises `RuntimeError` if this rank trains alone."""
        self._connect()
        if self._exchange is None:
            raise RuntimeError("Join needs other ranks: this optimizer trains alone")
        return self._exchange.group

    @as_usual
    def follow_step(self) -> None:
        """Make one step of the others without votes of this rank; an open round of local steps is given up."""
        if self._local is not None and self._local.borrowed:
            self._local.give_back(gradient=False)
            self._local_done = 0
        self._finish(None)

    def _follow(self, terms: Mapping[str, Any]) -> None:
        """Take over the others' options: the schedule of a rank that has left stands still."""
        for index, (group, voter) in enumerate(zip(self._voting, self._demos, strict=True)):
            for name in OF_A_GROUP:
                value = terms[f"{name} of group {index}"]
                if isinstance(group[name], Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value
            voter.config = self.settings.config(group)


class _Leaving(JoinHook):
    """A rank that has no batch any more."""

    def __init__(self, optimizer: DeMoOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer.follow_step()
