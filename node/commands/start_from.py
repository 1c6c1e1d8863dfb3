"""`swarmentum start-from`: turns a model into the state that a new run starts from, stored in a peer's home. ADR 5.

The peer with that home serves the state; the run's genesis names its root, and every peer checks it. Refuses a model whose
parameters have other names or shapes than run.toml's, and one whose folder says that it computes otherwise: the same numbers
are then another model. Reads no code. A model may be a folder or a file (of which nothing says how it computes), an archive of
a run, or a name on the Hugging Face hub, whose revision start.json then names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from node.admission.consent import check_code
from node.archive import files
from node.building import PIECES, folder_of
from node.commands import hugging_face
from node.config import PeerSettings
from node.data.tokenizer import load_tokenizer
from node.export.model_folder import counts_padding, own_form
from node.model.spec import (
    SMALL_LLAMA,
    ModelError,
    ModelSpec,
    build,
    build_meta,
    configuration,
    names_vocabulary,
    settings_beside,
    with_vocabulary,
)
from node.optim.given_groups import unwrapped_name
from node.snapshot.pieces import parameters_of
from node.snapshot.store import SnapshotStore
from node.training.replica import BASE_PREFIX, Replica
from protos.disk import write_bytes
from protos.envelope import parse
from protos.errors import OperatorError, Refusal, TokenizerError
from protos.limits import SNAPSHOT_PIECE_BYTES
from protos.run_config import RunConfig, config_from_json
from protos.start import MODEL_KEY, MODEL_STEP, StartingState, start_from_values, start_values
from protos.v1 import log_pb2

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
ADAPTERS: Final = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
"""What peft writes; transformers adds it to the weights beside it."""
NAMES_SHOWN_MAX: Final = 3
OUT_BYTES_MAX: Final = 1 << 16
SAME_ANSWERS: Final = re.compile(
    r"transformers_version|architectures|(torch_)?dtype|_name_or_path|\w*token_ids?|\w*vocab_size\w*|n_positions|"
    r"max_position_embeddings|max_window_layers|output_\w+|return_dict\w*|use_cache|id2label|label2id|problem_type|"
    r"chunk_size_feed_forward|initializer_\w+|init_std|\w*dropout\w*|\w*pdrop|\w*jitter\w*|\w*_coef|summary_\w+|"
    r"tie_word_embeddings|pretraining_tp|auto_map"
)
"""Keys of a configuration that change no answer of trained weights, or that shapes and numbers show."""
STRETCHED: Final = ("longrope", "dynamic")
MEANT: Final = "if you mean it, name the file of weights itself"
SAMPLE_TEXT: Final = (
    "The quick brown fox, 1234567890 times:\n\tdef caf\u00e9(x): return x * 2  # \u6771\u4eac \U0001f642\n"
)
BUFFER_TOLERANCE: Final = 1e-2
"""Of a buffer that was saved as bf16."""
_DOMAIN = b"swarmentum/v1/start-from\0"


@dataclass(frozen=True)
class Started:
    """What `run create --from` reads. `layout_digest`: of the run's model."""

    start: StartingState
    layout_digest: bytes
    parameters: int
    source: str = ""
    """Where the model came from, for people: its name on the hub, with the revision."""

    def values(self) -> dict[str, object]:
        """As JSON values."""
        found = {"layout_digest": self.layout_digest.hex(), "parameters": self.parameters}
        return {**start_values(self.start), **found, **({"source": self.source} if self.source else {})}


def check_out(file: Path) -> None:
    """Raises OperatorError if something that is no start.json is at `file`, or its folder is not there. It reads no model."""
    if not file.parent.is_dir():
        raise OperatorError(f"--out {file}: {file.parent} is no folder: make it, or name another file")
    if not os.path.lexists(file):
        return
    try:
        if not file.is_file():
            raise ValueError("a folder, a device, or a link to nothing")
        with file.open("rb") as opened:
            if text := opened.read(OUT_BYTES_MAX):  # an empty one is of mktemp
                start_from_values(json.loads(text))
    except (OSError, Refusal, ValueError, LookupError, TypeError, RecursionError) as error:
        raise OperatorError(f"--out {file} exists and is no start.json of this command; name another file") from error


def write_out(file: Path, values: Mapping[str, object]) -> None:
    """Write start.json. Raises DiskError."""
    write_bytes(file, json.dumps(values, indent=1).encode())


def start_from(config: RunConfig, model: str | Path, settings: PeerSettings) -> Started:
    """Store the state of `model` in this home. Raises OperatorError for a model that is not the run's.

    Downloads a model of the hub first. Raises NetworkError or RefusedError if it cannot be had.
    """
    check_code(config, "code" in settings.allow)
    source = ""
    if hugging_face.is_hub_id(str(model)):
        found = hugging_face.download(str(model))
        model, source = found.folder, f"{found.repo_id}{hugging_face.REVISION_MARK}{found.revision}"
    spec = ModelSpec(config.model.config, config.model.factory, config.model.kwargs)
    if spec.config is not None and not names_vocabulary(spec.config):
        spec = replace(spec, config=with_vocabulary(spec.config, load_tokenizer(config.data.tokenizer).vocabulary))
    check_alike(spec, config.data.tokenizer, Path(model))
    made = build(spec, config.seed)
    name = load_weights(made, Path(model))
    replica = Replica(name, made, config.optimizer, config.optimizer.vote_size)
    replica.step, replica.head = MODEL_STEP, name
    image = replica.image()
    folder = settings.home / "runs" / folder_of(name) / PIECES
    store = SnapshotStore(folder, image.total_bytes)
    store.make_fit(image.total_bytes, settings.snapshots_kept)
    manifest = store.write(image.pieces(SNAPSHOT_PIECE_BYTES), image.total_bytes, replica.describer(image.total_bytes))
    start = StartingState(
        name, MODEL_KEY, MODEL_STEP, name, manifest.root, manifest.total_bytes, replica.demo.state_digest(MODEL_STEP), 0
    )
    return Started(start, replica.layout_digest, replica.demo.layout.parameters, source)


def load_weights(made: nn.Module, model: Path) -> bytes:
    """Put the weights of a folder or file into a model, in fp32; the hash of names, shapes and bits, which names the state."""
    wanted, found, hashed = parameters_of(made), set[str](), dict[str, bytes]()
    names = {id(parameter): name for name, parameter in made.named_parameters()}
    tied = {name: names[id(it)] for name, it in made.named_parameters(remove_duplicate=False)}
    buffers, kept, first = dict(made.named_buffers()), made.state_dict().keys(), dict[str, str]()
    for saved_name, tensor in _own_form(made, model):
        plain = saved_name if saved_name in wanted else unwrapped_name(saved_name)
        name = tied.get(plain, plain)
        if name in found and _hash(tensor) != hashed[name]:
            if plain == first[name]:
                raise ModelError(f"{model}: holds {plain!r} twice, with other numbers: remove one of them")
            twin = plain if plain != name else first[name]
            raise ModelError(
                f"{model}: {twin!r} has other numbers than {name!r}, and run.toml's model has one tensor for both: set "
                "tie_word_embeddings = false in [model.config]"
            )
        if name not in wanted:
            if name in buffers or name.startswith(BASE_PREFIX):  # a base optimizer's state begins anew
                if name in kept and not _close(tensor, buffers[name]):
                    raise ModelError(
                        f"{model}: the buffer {name!r} has other numbers than run.toml's model makes, and no vote carries "
                        "buffers: correct [model], or take a model without it"
                    )
                continue
            raise ModelError(f"{model}: holds {name!r}, which run.toml's model does not have: correct [model]")
        if tensor.shape != wanted[name].shape:
            shapes = f"{list(tensor.shape)}, and run.toml's model {list(wanted[name].shape)}"
            raise ModelError(f"{model}: {name!r} has the shape {shapes}: correct [model]")
        if not tensor.is_floating_point():
            raise ModelError(f"{model}: {name!r} is {tensor.dtype}: take the weights of before they were quantized")
        with torch.no_grad():
            wanted[name].copy_(tensor)
        if not bool(wanted[name].isfinite().all()):
            raise ModelError(f"{model}: {name!r} contains NaN or infinity")
        found.add(name)
        first.setdefault(name, plain)
        hashed[name] = _hash(wanted[name])
    if missing := sorted(wanted.keys() - found):
        shown = ", ".join(missing[:NAMES_SHOWN_MAX]) + (" ..." if len(missing) > NAMES_SHOWN_MAX else "")
        raise ModelError(f"{model}: lacks {len(missing)} parameters of run.toml's model: {shown}")
    whole = hashlib.sha256(_DOMAIN)
    for name in sorted(hashed):
        whole.update(f"{name} {list(wanted[name].shape)}\0".encode() + hashed[name])
    return whole.digest()


def _own_form(made: nn.Module, model: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors by the names of run.toml's model. Those of some types have other ones in the files of transformers."""
    own = {name for name, _ in (*made.named_parameters(remove_duplicate=False), *made.named_buffers())}
    if all(unwrapped_name(name) in own or name.startswith(BASE_PREFIX) for name in _names(model)):
        yield from _tensors(model)
    else:
        yield from own_form(made, dict(_tensors(model))).items()


def _hash(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.detach().to(torch.float32).contiguous().numpy().tobytes()).digest()


def _close(tensor: Tensor, buffer: Tensor) -> bool:
    one, other = tensor.double(), buffer.double()
    return one.shape == other.shape and torch.allclose(one, other, rtol=BUFFER_TOLERANCE, equal_nan=True)


def check_alike(spec: ModelSpec, tokenizer: str, model: Path) -> None:
    """Raises ModelError if what lies beside the weights says that they belong to a model that computes otherwise, or to other
    tokens. Nothing may lie there."""
    if (adapter := next((name for name in ADAPTERS if (model / name).is_file()), None)) is not None:
        raise ModelError(
            f"{model / adapter}: an adapter belongs to this model, and is not in its weights: merge it "
            f"(model.merge_and_unload() of peft, then save_pretrained), or, {MEANT}"
        )
    place, theirs = _told(model)
    own = None if spec.factory else (SMALL_LLAMA if spec.config is None else spec.config)
    if theirs is not None and own is not None and (wrong := _differing(own, theirs)):
        shown = "; ".join(f"{key} = {mine!r} here, and {other!r} there" for key, mine, other in wrong[:NAMES_SHOWN_MAX])
        raise ModelError(
            f"{place} says that these weights belong to another model than run.toml's: {shown}: correct [model.config], or, "
            f"{MEANT}"
        )
    if (model / TOKENIZER).is_file():
        with suppress(TokenizerError):  # of the run's, every peer says so
            here, there = (load_tokenizer(name).encode(SAMPLE_TEXT) for name in (tokenizer, str(model / TOKENIZER)))
            if here.tolist() != there.tolist():
                raise ModelError(
                    f"{model / TOKENIZER} makes other tokens than data.tokenizer = {tokenizer!r}: correct [data], or, {MEANT}"
                )


def _told(model: Path) -> tuple[Path, Mapping[str, Any] | None]:
    """A file beside the weights, and the configuration in it; None if there is none."""
    if (place := model / files.GENESIS).is_file():
        with suppress(Refusal, OperatorError):  # of a run that this version cannot read; the layout decides
            of_run = config_from_json(parse(log_pb2.Genesis, place.read_bytes()).config_json).model
            return place, None if of_run.factory else of_run.config or SMALL_LLAMA
        return place, None
    if not (place := model / CONFIG).is_file():
        return place, None
    try:
        found = json.loads(place.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise OperatorError(f"{place}: cannot be read: {error}") from error
    return place, found if isinstance(found, dict) and "model_type" in found else None


def _differing(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The keys of two configurations that make another model of the same weights, with both values."""
    made: Any = build_meta(ModelSpec(own))
    if theirs["model_type"] not in (own["model_type"], made.config.model_type):
        return [("model_type", own["model_type"], theirs["model_type"])]
    other = configuration(theirs).to_dict()
    mine = settings_beside(own, made, other)
    counts = {"pad_token_id"} if counts_padding(made) else set[str]()
    counts |= {"max_position_embeddings"} if _stretches(mine) else set()
    return list(_pairs({key: mine[key] for key in mine.keys() & other.keys()}, other, counts))


def _stretches(settings: Mapping[str, Any]) -> bool:
    """Whether positions are computed from the number of all positions: RoPE of Phi-3, and dynamic NTK."""
    if settings.get("rope_type") in STRETCHED:
        return True
    return any(isinstance(value, dict) and _stretches(value) for value in settings.values())


def _pairs(
    mine: Mapping[str, Any], other: Mapping[str, Any], counts: set[str], before: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """`counts`: keys that change answers of this type."""
    for key in sorted(mine if not before else {*mine, *other}):
        one, two = mine.get(key), other.get(key)
        if (SAME_ANSWERS.fullmatch(key) and key not in counts) or one == two:
            continue
        if isinstance(one, dict) and isinstance(two, dict):
            yield from _pairs(one, two, counts, f"{before}{key}.")
        else:
            yield f"{before}{key}", one, two


def _tensors(model: Path) -> Iterator[tuple[str, Tensor]]:
    for file, name in _opened(model):
        yield name, file.get_tensor(name)


def _names(model: Path) -> Iterator[str]:
    return (name for _, name in _opened(model))


def _opened(model: Path) -> Iterator[tuple[Any, str]]:
    """Each file of weights, open, with each of its names."""
    from safetensors import SafetensorError, safe_open

    for path in _files(model):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    yield file, name
        except (SafetensorError, OSError) as error:
            raise OperatorError(f"{path}: is no safetensors file that can be read: {error}") from error


def _files(model: Path) -> list[Path]:
    """The weight files of a Hugging Face folder, the file itself, or the newest state that an archive begins a segment with."""
    if model.is_file():
        return [model]
    if (model / files.GENESIS).is_file() and (segments := files.segments(model)):
        return [segments[-1].path(files.STATE)]
    if (model / WEIGHTS).is_file():  # before an index of earlier shards beside it, as transformers does
        return [model / WEIGHTS]
    if (model / INDEX).is_file():
        try:
            names = sorted(set(json.loads((model / INDEX).read_text())["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise OperatorError(f"{model / INDEX}: is no index of weight files: {error!r}") from error
        if bad := [name for name in names if Path(str(name)).name != name]:
            raise OperatorError(f"{model / INDEX}: {bad[0]!r} is not a file beside it")
        return [model / name for name in names]
    raise OperatorError(
        f"{model}: is neither a safetensors file nor a folder with {WEIGHTS}, nor an archive, nor owner/name of the hub; "
        "of a run, use `swarmentum export` or `swarmentum-coordinator run fork`"
    )
