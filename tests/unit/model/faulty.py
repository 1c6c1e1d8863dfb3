"""Factories of modules that no run should train, each with one fault, and of sound ones that look like them."""

import atexit
import math
import os
import random
import sys
import time

import torch
from torch import Tensor, nn

WIDTH = 16


class Sound(nn.Module):
    """Each token sees those before it: a running mean. `kind` names what is out of the ordinary."""

    def __init__(self, kind: str = "", ids: int = 256) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(ids, WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ids)
        self.prepare()

    def prepare(self) -> None:
        """More parts of a kind."""

    def mixed(self, seen: Tensor) -> Tensor:
        """[batch, context, width], of the tokens up to each."""
        places = torch.arange(1, seen.shape[1] + 1)[None, :, None]
        return seen.cumsum(1) / places

    def forward(self, ids: Tensor) -> object:
        return self.head(self.mid(self.mixed(self.table(ids))).relu())


class LookingAhead(Sound):
    """Sees later tokens: all of them, the next one, in training alone, or by the largest number of a sample."""

    def mixed(self, seen: Tensor) -> Tensor:
        if self.kind == "mean" or (self.kind == "training" and self.training):
            return seen + seen.mean(1, keepdim=True)
        if self.kind == "next":
            return seen + seen.roll(-1, 1)
        if self.kind == "scale":
            return seen / seen.abs().amax((1, 2), keepdim=True)
        return super().mixed(seen)


class Remembering(Sound):
    """Keeps something of the passes before, in a buffer or elsewhere."""

    def prepare(self) -> None:
        if self.kind in ("tracking", "batch"):
            self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=self.kind == "tracking")
        self.register_buffer("count", torch.zeros(()))
        self.mean = torch.zeros(WIDTH)

    def mixed(self, seen: Tensor) -> Tensor:
        seen = super().mixed(seen)
        if self.kind in ("tracking", "batch"):
            return self.norm(seen.transpose(1, 2)).transpose(1, 2)
        if self.kind == "counter":
            self.count += 1
        if self.kind == "attribute":
            out = seen + self.mean
            if self.training:
                self.mean = 0.9 * self.mean + seen.detach().mean((0, 1))
            return out
        if self.kind == "own parameter":
            with torch.no_grad():
                self.mid.weight.mul_(0.99)
        return seen


class Drawing(Sound):
    """Draws, or looks at a clock, where a run needs one answer."""

    def prepare(self) -> None:
        self.passes = 0

    def mixed(self, seen: Tensor) -> Tensor:
        self.passes += 1
        seen = super().mixed(seen)
        match self.kind:
            case "always":
                return nn.functional.dropout(seen, 0.1, training=True)
            case "python":
                return seen * (1 + random.random())
            case "clock":
                return seen * (1 + time.perf_counter_ns() % 1000 / 1000)
            case "calls":
                return seen * (1 + self.passes % 7)
            case _:
                return nn.functional.dropout(seen, 0.5, training=self.training)


class Noisy(Sound):
    """Draws numbers of its own in training, different ones for each sample: noise, stochastic depth, dropout by hand."""

    def mixed(self, seen: Tensor) -> Tensor:
        seen = super().mixed(seen)
        if not self.training:
            return seen
        depth = (len(seen), 1, 1)
        match self.kind:
            case "depth":
                return seen * seen.new_empty(depth).bernoulli_(0.9) / 0.9
            case "depth by rand":
                return seen * (0.9 + torch.rand(depth)).floor() / 0.9
            case "mask":
                return seen * (torch.rand_like(seen) > 0.1) / 0.9
            case "bernoulli":
                return seen * torch.bernoulli(torch.full_like(seen, 0.9)) / 0.9
            case "noise":
                return seen + 0.1 * torch.randn_like(seen) + torch.normal(0.0, 0.1, seen.shape)
            case "distribution":
                return seen + torch.distributions.Normal(seen, 0.1).sample()
            case "gumbel":
                return seen * nn.functional.gumbel_softmax(seen)
            case "slopes":
                return nn.functional.rrelu(nn.functional.alpha_dropout(seen, 0.1, training=True), training=True)
            case "rarer":
                part = torch.softmax(seen.detach(), -1)
                kept = torch.rrelu(torch.native_dropout(seen, 0.1, True)[0], 0.1, 0.3, True)
                drawn = [
                    torch.distributions.Dirichlet(1 + part).sample(),
                    torch.poisson(part),
                    torch.binomial(7 * part, part),
                ]
                drawn += [torch.zeros_like(seen).cauchy_(), torch.zeros_like(seen).log_normal_()]
                drawn += [torch.zeros_like(seen).geometric_(0.3), torch.randint_like(seen, 2, 9)]
                chosen = torch.multinomial(part.flatten(0, 1), 2).view(*seen.shape[:2], 2) / 64
                return kept + 0.1 * sum(drawn) + chosen.sum(-1, keepdim=True)
            case "another sample":
                return seen + seen[torch.randint(0, len(seen), (len(seen),))]
        return seen + 0.1 * torch.randn_like(seen) - seen.mean(0, keepdim=True)


class Capacity(Sound):
    """An expert that takes four tokens of a batch, the first ones that want it."""

    def mixed(self, seen: Tensor) -> Tensor:
        seen = super().mixed(seen)
        wants = (seen[..., 0] > 0).flatten()
        taken = (wants & (wants.cumsum(0) <= 4)).view(seen.shape[:2])
        return torch.where(taken[..., None], 2 * seen, seen)


class Cut(Sound):
    """Gradients that do not come back, or are no numbers."""

    def prepare(self) -> None:
        self.spare, self.passes = nn.Linear(WIDTH, WIDTH), 0
        if self.kind == "thawed":
            self.spare.requires_grad_(False)
        if self.kind == "sparse":
            self.table.sparse = True

    def forward(self, ids: Tensor) -> object:
        self.passes += self.training
        if self.kind in ("thawed", "frozen") and self.passes == 4:  # as a warm-up that begins with the head
            self.spare.requires_grad_(self.kind == "thawed")
        seen = self.mid(self.mixed(self.table(ids))).relu()
        match self.kind:
            case "detached":
                return self.head(seen).detach()
            case "unused":
                return self.head(seen)
            case "nan":
                return self.head(self.spare(seen)) / 0.0 * 0.0
            case "zero":
                return self.head(self.spare(seen)) * 0.0
            case _:
                return self.head(self.spare(seen))


class Answering(Sound):
    """Answers with more than logits, asks for more than ids, or takes few tokens."""

    def prepare(self) -> None:
        self.places = nn.Embedding(24, WIDTH)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> object:
        seen = self.table(ids) + self.places(torch.arange(ids.shape[1]) % (1000 if self.kind == "short" else 24))
        logits = self.head(self.mid(self.mixed(seen)).relu())
        match self.kind:
            case "mask":
                assert mask is not None, "needs a mask"
            case "tuple":
                return logits, seen.square().mean()
            case "dict":
                return {"logits": logits, "aux_loss": seen.square().mean()}
            case "none":
                return logits, None
        return logits


class Shifting(Sound):
    """Shifts by itself, as decoders do that get their targets; or answers for the token before."""

    def forward(self, ids: Tensor) -> object:
        if self.kind == "input":
            return super().forward(nn.functional.pad(ids[:, :-1], (1, 0)))
        logits = super().forward(ids)
        assert isinstance(logits, Tensor)
        return nn.functional.pad(logits[:, :-1], (0, 0, 1, 0))


class Twofold(Sound):
    """Answers with hidden states and logits in a tuple, of 256 numbers each with a table that is tied."""

    def prepare(self) -> None:
        self.wide = nn.Linear(WIDTH, 512 if self.kind == "logits first" else 256)

    def forward(self, ids: Tensor) -> object:
        hidden = self.wide(self.mixed(self.table(ids)))
        logits = self.head(self.mid(hidden[..., :WIDTH]).relu()) + hidden[..., :256]
        return (logits, hidden) if self.kind == "logits first" else (hidden, logits)


class Blockwise(Sound):
    """Texts of more than 40 tokens are seen in blocks, up to the first short one (`kind` "until short"), or always."""

    def prepare(self) -> None:
        self.short_seen = False

    def mixed(self, seen: Tensor) -> Tensor:
        self.short_seen |= self.kind == "until short" and seen.shape[1] <= 40
        if self.short_seen or seen.shape[1] <= 40:
            return super().mixed(seen)
        return super().mixed(seen) + seen.roll(-2, 1)


class Experts(Sound):
    """Eight experts, of which each token takes one; most get no gradient from a few tokens."""

    def prepare(self) -> None:
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def mixed(self, seen: Tensor) -> Tensor:
        out = super().mixed(seen)
        chosen = out[..., 0] > 0
        return torch.where(chosen[..., None], self.experts[0](out), self.experts[5](out))


class Kept(Sound):
    """A state that an export loses, or cannot hold."""

    def prepare(self) -> None:
        self.register_buffer(
            "mask", torch.ones(1, 1).expand(128, WIDTH) if self.kind == "expanded" else torch.ones(1, WIDTH)
        )
        self.scale = torch.randn(WIDTH) if self.kind == "unsaved" else torch.ones(WIDTH)

    def get_extra_state(self) -> str | Tensor:
        return "warm" if self.kind == "word" else torch.zeros(1)

    def set_extra_state(self, state: object) -> None:
        """It has none to take."""

    def mixed(self, seen: Tensor) -> Tensor:
        return super().mixed(seen) * self.mask[: seen.shape[1]] * self.scale


class ByName(Sound):
    """What it holds follows from the order of a set of words, from their hashes, the threads, or the environment."""

    def prepare(self) -> None:
        words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
        all_kinds = {
            "set": lambda: [float(len(word)) for word in set(words)],
            "hash": lambda: [float(hash(word) % 97) for word in words],
            "threads": lambda: [float(torch.get_num_threads())],
            "rounding": lambda: [1.0 + 1e-4 * torch.get_num_threads()],
            "environment": lambda: [float(len(os.environ.get("WHERE_A_PEER_STANDS", "")))],
            "sorted": lambda: [float(len(word)) for word in sorted(set(words))],
            "mask": lambda: [-math.inf, math.nan, 1.0],
            "prints": lambda: [1.0],
            "download": lambda: [float(len(os.environ["HTTPS_PROXY"]))],
        }
        for kind in self.kind.split():
            self.register_buffer(f"found_{kind}", torch.tensor(all_kinds[kind]()))
        if "prints" in self.kind and "pytest" not in sys.modules:
            atexit.register(os.write, 1, b"7\n\xff\n")


class Pictures(nn.Module):
    """Programs train it, and nobody runs it here."""

    own_loop = True

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(3, 4, 3)
        self.norm = (nn.BatchNorm2d if kind == "batch" else nn.InstanceNorm2d)(4)
        if kind == "spectral":
            nn.utils.spectral_norm(self.kernel)


KINDS = {
    kind.__name__: kind
    for kind in (
        *(Sound, LookingAhead, Remembering, Drawing, Noisy, Capacity, Cut, Answering, Experts, Kept),
        *(Shifting, Twofold, Blockwise, ByName, Pictures),
    )
}


def make(name: str, kind: str = "") -> nn.Module:
    return KINDS[name](kind)


def in_bf16() -> nn.Module:
    model = Sound()
    model.head.to(torch.bfloat16)
    return model


def lazy() -> nn.Module:
    model = Sound()
    model.mid = nn.LazyLinear(WIDTH)
    return model


class OfProbabilities(Sound):
    def forward(self, ids: Tensor) -> object:
        logits = super().forward(ids)
        assert isinstance(logits, Tensor)
        return logits.softmax(-1)


def of_probabilities() -> nn.Module:
    return OfProbabilities()


def in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return Sound()


class TiedInAPass(Sound):
    def forward(self, ids: Tensor) -> object:
        self.head.weight = self.table.weight
        return super().forward(ids)


def tied_in_a_pass() -> nn.Module:
    return TiedInAPass()


def of_python() -> nn.Module:
    model = Sound()
    with torch.no_grad():
        model.mid.weight.fill_(random.random())
    return model


def of_numbers() -> nn.Module:
    """Cannot be built on the meta device, and is sound."""
    model = Sound()
    assert float(model.mid.weight.abs().sum()) > 0
    return model
