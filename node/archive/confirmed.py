"""What a replayed state is held against: digests in the signed log or the genesis, and an exported model.

A replay derives each state from the one before. This proves nothing about the state that an archive begins with: its author
may have written that. The replay tells `Confirmed` what it found, and it says what is confirmed. ADR 26.

Every tensor of an export's weights is compared bit for bit, and the settings of its model. Refuses a tensor that the run does
not train: nothing in the log confirms it, and it may change what the model says. Compares no tokenizer and no settings of text
generation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from node.export.card import MARK
from node.export.model_folder import saved_form
from node.training.replica import BASE_PREFIX
from protos.run_config import RunConfig
from protos.run_sections import ModelConfig

if TYPE_CHECKING:
    from node.archive.replay import Replay


class BadStepError(Exception):
    """A step does not hold: which step, why, and the signer of the wrong statement (None: nobody signed it)."""

    def __init__(self, step: int, reason: str, signer: bytes | None = None) -> None:
        super().__init__(reason)
        self.step, self.reason, self.signer = step, reason, signer


@dataclass
class Confirmed:
    """What is confirmed so far. An entry's digest covers one part of a large model (`node/optim/digest.py`)."""

    parts: set[int] = field(default_factory=set)
    """The parts of the state that digests have confirmed since the replay began."""
    of: int = 0
    """How many parts the state has; 0 before the first digest."""
    state: int | None = None
    """The last step after which the whole state is confirmed; None: there is none yet."""
    genesis: bool = False
    """Whether the genesis confirms the state that the replay began with."""
    layout: bool = False
    """Whether the genesis names the parameter layout."""
    votes_fit: int = 0
    votes_misfit: int = 0
    """Counted payloads that name this layout, and the other ones. The log signs the hash of each."""
    frozen: tuple[str, ...] = ()
    """Parameters of the state that the replay began with, which the run does not train, and nothing confirms."""

    def by_genesis(self, step: int) -> None:
        """The genesis names the state with which the replay began, after `step`."""
        self.genesis, self.state = True, step

    def by_entry(self, step: int, part: int, of: int) -> None:
        """An entry names the digest of this part of the state after `step`."""
        self.parts.add(part)
        self.of = of
        if len(self.parts) == of:
            self.state = step

    def lacks(self, began: int, last: int) -> str:
        """Why nothing confirms the replayed states, and what to do; empty if they are confirmed.

        `began`: the step whose state the archive begins with; `last`: the last step that was replayed.
        """
        if self.state is None:
            entries = f"entries {began + 1} to {last}"
            found = (
                f"none of the {entries} has a digest" if not self.of else
                f"the digests in {entries} cover {len(self.parts)} of its {self.of} parts"
            )  # fmt: skip
            return (
                f"nothing in the log confirms the state after step {began}, which this archive begins with: {found}. Take an "
                "archive that goes on to an entry with a digest, or that begins earlier (without --from)"
            )
        if self.frozen:
            return (
                f"the steps hold, and nothing in the log confirms the parameters that the run does not train: "
                f"{len(self.frozen)} in all, such as {self.frozen[0]}. Take an archive that begins with the starting state "
                "that the genesis names, if the run has one (a fork)"
            )
        if not self.layout and self.votes_fit <= self.votes_misfit:
            return (
                f"nothing in the log confirms the archive's layout.json: {self.votes_fit} of "
                f"{self.votes_fit + self.votes_misfit} counted payloads are of this layout. Take an archive with more steps"
            )
        return ""


WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
OF_AN_EXPORT: Final = (
    "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip
"""Keys of config.json that an export writes otherwise than the run: they change no weight and no layer."""


def compare(replay: Replay, exported: Path) -> str:
    """Check an exported model; what was found, for people. Raises BadStepError if it is not the replayed one."""
    step = _step_of(replay, exported)
    if step != replay.step:
        raise BadStepError(replay.step, f"{exported} is the model after step {step}; the archive ends at {replay.step}")
    config = replay.genesis.config
    why = settings_difference(config.model, exported)  # first: the names of weights follow from it
    why = why or vocabulary_difference(config.model, exported, replay.state)
    if why is None:
        why = first_difference(replay.state, exported, lambda: model_of(config, exported, replay.state))
    if why is not None:
        raise BadStepError(replay.step, f"{exported}: {why}")
    return f"bit-identical to {exported}"


def model_of(config: RunConfig, exported: Path, state: Mapping[str, Tensor]) -> nn.Module | None:
    """The run's model, with its buffers; None for a module of the run's own code. Its vocabulary may be the tokenizer's.

    A stranger's folder may name any vocabulary: a model of other shapes than the state's is not built.
    """
    from node.model.spec import SMALL_LLAMA, ModelError, ModelSpec, build, with_vocabulary

    if config.model.factory is not None:
        return None
    named = SMALL_LLAMA if config.model.config is None else config.model.config
    if (exported / CONFIG).is_file():
        named = with_vocabulary(named, vocabulary_of(json.loads((exported / CONFIG).read_bytes())))
    try:
        return build(ModelSpec(named), config.seed, blank=True) if _fits(named, state) else None
    except ModelError:
        return None


def vocabulary_of(exported: Mapping[str, Any]) -> Any:
    """What a config.json says: some types of several parts are saved whole (Gemma 4), others as the text's part (Llama 4)."""
    from node.model.spec import vocabulary_part

    return exported.get("vocab_size", vocabulary_part(exported).get("vocab_size"))


def _fits(named: Mapping[str, Any], state: Mapping[str, Tensor]) -> bool:
    """Whether no parameter of such a model has another shape in a state. Raises ModelError."""
    from node.model.spec import ModelSpec, build_meta

    shapes = {name: it.shape for name, it in build_meta(ModelSpec(named)).named_parameters()}
    return all(state[name].shape == shape for name, shape in shapes.items() if name in state)


def vocabulary_difference(model: ModelConfig, exported: Path, state: Mapping[str, Tensor]) -> str | None:
    """How the vocabulary of config.json differs from that of the state, where the run leaves it to the tokenizer; or None."""
    from node.model.spec import SMALL_LLAMA, ModelError, names_vocabulary, with_vocabulary

    named = SMALL_LLAMA if model.config is None else model.config
    if model.factory is not None or names_vocabulary(named) or not (exported / CONFIG).is_file():
        return None
    size = vocabulary_of(json.loads((exported / CONFIG).read_bytes()))
    try:
        if type(size) is int and _fits(with_vocabulary(named, size), state):
            return None
    except ModelError:
        pass
    return f"{CONFIG}: vocab_size is {size!r}, and the run's parameters have the shapes of another one"


def _as_saved(parameters: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers as an export of this model has them; tied ones under each of their names."""
    first = {id(it): name for name, it in model.named_parameters()}
    names = {name: first[id(it)] for name, it in model.named_parameters(remove_duplicate=False)}
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    tied = {name: parameters[it] for name, it in names.items() if it in parameters}
    return saved_form(model, {**buffers, **parameters, **tied})


def _step_of(replay: Replay, exported: Path) -> object:
    """The step that an export names; BadStepError if its facts are no facts, or are of another run."""
    if not (exported / MARK).is_file():
        return replay.step
    facts = _table(exported / MARK, replay.step)
    run = facts.get("run_id", replay.genesis.run_id.hex())
    if run != replay.genesis.run_id.hex():
        raise BadStepError(replay.step, f"{exported} says that it is of run {run}; the archive is not of that run")
    return facts.get("steps")


def _table(file: Path, step: int) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BadStepError(step, f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise BadStepError(step, f"{file} holds no JSON object")
    return found


def first_difference(
    state: Mapping[str, Tensor], exported: Path, make: Callable[[], nn.Module | None] = lambda: None
) -> str | None:
    """How the weights of a folder differ from the parameters of `state`, or None. A tied tensor may be there once or twice.

    `make`: the run's model, which is built only if names or shapes differ: its type may have others in files than in a state.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    others = sorted(path.name for path in exported.iterdir() if _is_weights(path.name) and path.name != WEIGHTS)
    if others:
        return f"holds {others[0]} beside {WEIGHTS}, and another program may load that one; remove it"
    try:
        weights: Mapping[str, Any] = load_file(exported / WEIGHTS)
    except (SafetensorError, OSError) as error:
        return f"{WEIGHTS} cannot be read: {error}"
    parameters = {name: tensor for name, tensor in state.items() if not name.startswith(BASE_PREFIX)}
    other = _shapes(weights) != _shapes(parameters)
    if other and (model := make()) is not None:
        parameters = _as_saved(parameters, model)
    there = {(tensor.data_ptr(), tensor.shape) for name, tensor in parameters.items() if name in weights}
    for name, tensor in parameters.items():
        if name not in weights:
            if (tensor.data_ptr(), tensor.shape) in there:  # tied
                continue
            return f"lacks {name}"
        if not same_bits(tensor, weights[name]):
            return f"{name} differs from the replayed weights"
    for name in sorted(weights.keys() - parameters.keys()):
        if not any(same_bits(tensor, weights[name]) for tensor in parameters.values()):
            return f"holds {name}, which the run does not train: nothing in the log confirms it"
    return None


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _is_weights(name: str) -> bool:
    """Whether a library may take a file for the weights of a model, in the place of `WEIGHTS`."""
    return (
        name == INDEX or name.startswith("adapter_") or name.endswith((".safetensors", ".bin", ".pt", ".pth", ".ckpt"))
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit: -0 is not 0, and a NaN is itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype != torch.float32:
        return torch.equal(one, other)
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def settings_difference(model: ModelConfig, exported: Path) -> str | None:
    """How config.json of a folder differs from the model of the run, or None. Of a model that code makes, nothing confirms it.

    Raises nothing for a config.json that is no configuration: that is a difference.
    """
    from node.export.model_folder import counts_padding
    from node.model import spec
    from node.model.spec import ModelError, ModelSpec, build_meta, configuration, settings_beside

    if model.factory is not None:
        return (
            None
            if not (exported / CONFIG).exists()
            else f"holds {CONFIG}, which nothing in the log confirms: code makes the run's model (model.factory). "
            f"Verify a copy of the folder without {CONFIG}: that confirms the weights"
        )
    named = spec.SMALL_LLAMA if model.config is None else model.config
    try:
        text = json.loads((exported / CONFIG).read_bytes())
        found, size = configuration(text).to_dict(), vocabulary_of(text)
        if type(size) is int and size > 0:  # of a run that leaves it to the tokenizer: other keys may follow from it
            named = spec.with_vocabulary(named, size)
        made = build_meta(ModelSpec(named))
        wanted, counts = settings_beside(named, made, found), counts_padding(made)
    except FileNotFoundError:
        return None  # weights alone: a program that loads them names the model itself
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, ModelError) as error:
        return f"{CONFIG} cannot be read: {error}"
    leave = OF_AN_EXPORT if spec.names_vocabulary(named) else (*OF_AN_EXPORT, "vocab_size")
    for key in sorted(wanted.keys() | found.keys()):
        if (key not in leave or (key == "pad_token_id" and counts)) and wanted.get(key) != found.get(key):
            return f"{CONFIG}: {key} is {found.get(key)!r}; the run has {wanted.get(key)!r}"
    return None
