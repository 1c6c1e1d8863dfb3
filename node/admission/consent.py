"""A run's requests of the machine that joins it, and whether that machine's person has agreed.

The operator writes the run, and the joiner owns the disk. So paths and code that the run names count only with a flag, and the
person sees a download before it begins. Pure: values in, a request or an error out. The module reads, prints and asks nothing;
the caller says whether a path exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from node.config import PeerSettings
from node.donor.live import BYTES_A_GB, Kept, allowed
from protos.address import is_web
from protos.errors import OperatorError
from protos.mistakes import OWN_TEXT
from protos.run_config import RunConfig
from protos.run_sections import ModelConfig

STANDARD_LIBRARY = "stdlib"
BYTES = "bytes"
RAW_TOKENS = ".bin"
SHOWN_CHARS_MAX = 120
MODEL_KEYS_SHOWN = ("hidden_size", "n_embd", "num_hidden_layers", "n_layer", "vocab_size")


class TokenizerSource(Enum):
    """The source of a tokenizer."""

    HERE = "in this program"
    DISK = "a file or folder of this machine"
    HUB = "the Hugging Face hub"


@dataclass(frozen=True)
class MachineRequest:
    """A run in a few lines, and its requests of this machine beside computing."""

    run: str
    steps: int
    model: str
    data: str
    tokenizer: str
    wants: tuple[str, ...] = ()
    downloads: bool = False
    fork: str = ""
    mirrors: str = ""

    def lines(self) -> list[str]:
        """For people."""
        said = [
            f"Run:       {self.run}, {self.steps} steps" + (f", a {self.fork}" if self.fork else ""),
            f"Model:     {self.model}",
            f"Data:      {self.data}",
            f"Tokenizer: {self.tokenizer}",
        ]
        if self.mirrors:
            said.append(f"State:     from other peers, and from {self.mirrors}")
        return said + [f"The run wants to {want}." for want in self.wants]


def place_of(tokenizer: str, exists: Callable[[str], bool]) -> TokenizerSource:
    """The place that `data.tokenizer` names. A hub name that is also a path here is a path: transformers looks there first."""
    if tokenizer == BYTES:
        return TokenizerSource.HERE
    looks = tokenizer.startswith(("/", ".", "~")) or tokenizer.count("/") > 1 or "\\" in tokenizer
    return TokenizerSource.DISK if looks or exists(tokenizer) else TokenizerSource.HUB


def request(
    config: RunConfig, settings: PeerSettings, exists: Callable[[str], bool], *, trains: bool = True
) -> MachineRequest:
    """The run's requests. Raises OperatorError if one needs a flag that the person has not given.

    `trains`: whether the peer needs the data; an anchor does not.
    """
    wants = []
    tokenizer, factory = config.data.tokenizer, config.model.factory
    if factory is not None:
        _check_code(factory, "code" in settings.allow)
        wants.append(f"import and call {_shown(factory)} on this machine")
    if trains and settings.data is None:
        wants += _data_wants(config, settings)
    place = place_of(tokenizer, exists)
    if place is TokenizerSource.DISK:
        _check_tokenizer(tokenizer, settings)
        wants.append(f"read a tokenizer from {_shown(tokenizer)} of this machine")
    if place is TokenizerSource.HUB:
        wants.append(f"download the tokenizer {_shown(tokenizer)} from {place.value}")
    return MachineRequest(
        run=config.name,
        steps=config.clock.steps,
        model=_model(config.model),
        data=_data(config, settings) if trains else "not needed: nothing is trained here",
        tokenizer="bytes" if place is TokenizerSource.HERE else f"{_shown(tokenizer)}, {place.value}",
        wants=tuple(wants),
        downloads=any(want.startswith("download ") for want in wants),
        mirrors=", ".join(map(_shown, config.snapshots.mirrors)),
    )


def _data_wants(config: RunConfig, settings: PeerSettings) -> list[str]:
    """For each source of the run that this program does not have itself."""
    wants = []
    for source, mirrors, _ in config.data.sources():
        if is_web(source):
            addresses = ", ".join(_shown(address) for address in (source, *mirrors))
            room = allowed(settings.disk_gb, Kept()).text / BYTES_A_GB
            wants.append(f"download training text from {addresses}, and keep up to {room:g} GB of it")
        elif source == OWN_TEXT:
            raise OperatorError(
                'the run has no text (data.source = "own"): each peer brings its own, which stays on its machine. Join with '
                "--data PATH. Votes can leak samples of it (docs/security.md)"
            )
        elif source != STANDARD_LIBRARY:
            _check_data(source, settings)
            wants.append(f"train on {_shown(source)} of this machine")
    return wants


def must_ask(asked: MachineRequest, settings: PeerSettings, can_ask: bool) -> bool:
    """Whether the program must ask the person first. Raises OperatorError if the run wants a download and nobody can answer."""
    if not asked.wants or "requests" in settings.allow:
        return False
    if not can_ask and asked.downloads:
        raise OperatorError(
            f"the run wants to {', and to '.join(asked.wants)}, and no person can answer here; if you agree, join with --yes"
        )
    return can_ask


def check_code(config: RunConfig, allowed: bool) -> None:
    """Raises OperatorError if the run has a model of its own code, and the person has not agreed to that."""
    if config.model.factory is not None:
        _check_code(config.model.factory, allowed)


def _check_code(factory: str, allowed: bool) -> None:
    if not allowed:
        raise OperatorError(
            f"model.factory: the run wants to call {_shown(factory)} on this machine; if you trust the run's operator and know "
            "this module, use --allow-code"
        )


def _check_data(source: str, settings: PeerSettings) -> None:
    if "data" not in settings.allow:
        raise OperatorError(
            f"the run asks for {_shown(source)} of this machine as training text (data.source). Join with --data PATH to name "
            "this machine's own text. If you mean this path, join with --allow-data: the path's content goes into the model"
        )


def _check_tokenizer(tokenizer: str, settings: PeerSettings) -> None:
    if "data" not in settings.allow:
        raise OperatorError(
            f"the run asks for {_shown(tokenizer)} of this machine as its tokenizer (data.tokenizer); if you mean this path, "
            "join with --allow-data"
        )


def _data(config: RunConfig, settings: PeerSettings) -> str:
    if config.data.mix:
        names = ", ".join(f"{_shown(each.source)} (weight {each.weight:g})" for each in config.data.mix)
        return f"a mixture of {names}" + ("" if settings.data is None else f", from {_shown(settings.data)} (--data)")
    source = settings.data or config.data.source
    if source == STANDARD_LIBRARY:
        return "this Python's standard library"
    dtype = f", tokens of {config.data.dtype}" if source.endswith(RAW_TOKENS) else ""
    return f"{_shown(source)}{dtype}{'' if settings.data is None else ' (--data)'}"


def _model(model: ModelConfig) -> str:
    if model.factory is not None:
        return f"from {_shown(model.factory)}"
    if model.config is None:
        return "a small Llama, 0.89 M parameters"
    sizes = [f"{key} {_shown(model.config[key])}" for key in MODEL_KEYS_SHOWN if key in model.config]
    return ", ".join([_shown(model.config.get("model_type", "no model_type")), *sizes])


def _shown(value: object) -> str:
    """A stranger's value on one line of a terminal: quoted, no control characters, not too long."""
    text = str(value)
    cut = text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "..."
    return repr(cut) if isinstance(value, str) else ascii(cut).strip("'\"")
