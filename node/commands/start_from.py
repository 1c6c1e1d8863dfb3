"""`swarmentum start-from`: turns a model into the state that a new run starts from, stored in a peer's home. ADR 5.

The peer with that home serves the state; the run's genesis names its root, and every peer checks it. Refuses a model whose
parameters have other names or shapes than run.toml's. Reads nothing but safetensors, which hold no code. A model may be a
folder or a file, an archive of a run, or a name on the Hugging Face hub, whose revision start.json then names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from node.admission.consent import check_code
from node.archive import files
from node.assemble import PIECES, folder_of
from node.commands import hugging_face
from node.config import PeerSettings
from node.data.tokenizer import load_tokenizer
from node.model.spec import ModelError, ModelSpec, build
from node.snapshot.pieces import parameters_of
from node.snapshot.store import SnapshotStore
from node.training.replica import BASE_PREFIX, Replica
from protos.errors import OperatorError
from protos.limits import SNAPSHOT_PIECE_BYTES
from protos.run_config import RunConfig
from protos.start import MODEL_KEY, MODEL_STEP, StartingState, start_values

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMES_SHOWN_MAX: Final = 3
BYTES_A_GB: Final = 10**9
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
    if spec.config is not None and "vocab_size" not in spec.config:
        spec = replace(spec, config={"vocab_size": load_tokenizer(config.data.tokenizer).vocabulary, **spec.config})
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
    wanted, found, hashed = parameters_of(made), set[str](), {}
    others = {name for name, _ in made.named_parameters(remove_duplicate=False)} | {
        name for name, _ in made.named_buffers()
    }
    for name, tensor in _tensors(model):
        if name not in wanted:
            if name in others or name.startswith(BASE_PREFIX):
                continue  # a tied tensor under another name, a buffer that the model makes itself, a base optimizer's state
            raise ModelError(f"{model}: holds {name!r}, which run.toml's model does not have: correct [model.config]")
        if tensor.shape != wanted[name].shape:
            shapes = f"{list(tensor.shape)}, and run.toml's model {list(wanted[name].shape)}"
            raise ModelError(f"{model}: {name!r} has the shape {shapes}: correct [model.config]")
        with torch.no_grad():
            wanted[name].copy_(tensor)
        if not bool(wanted[name].isfinite().all()):
            raise ModelError(f"{model}: {name!r} contains NaN or infinity")
        found.add(name)
        hashed[name] = hashlib.sha256(wanted[name].contiguous().numpy().tobytes()).digest()
    if missing := sorted(wanted.keys() - found):
        shown = ", ".join(missing[:NAMES_SHOWN_MAX]) + (" ..." if len(missing) > NAMES_SHOWN_MAX else "")
        raise ModelError(f"{model}: lacks {len(missing)} parameters of run.toml's model: {shown}")
    whole = hashlib.sha256(_DOMAIN)
    for name in sorted(hashed):
        whole.update(f"{name} {list(wanted[name].shape)}\0".encode() + hashed[name])
    return whole.digest()


def _tensors(model: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    for path in _files(model):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise OperatorError(f"{path}: is no safetensors file that can be read: {error}") from error


def _files(model: Path) -> list[Path]:
    """The weight files of a Hugging Face folder, the file itself, or the newest state that an archive begins a segment with."""
    if model.is_file():
        return [model]
    if (model / files.GENESIS).is_file() and (segments := files.segments(model)):
        return [segments[-1].path(files.STATE)]
    if (model / INDEX).is_file():
        try:
            names = sorted(set(json.loads((model / INDEX).read_text())["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise OperatorError(f"{model / INDEX}: is no index of weight files: {error!r}") from error
        if bad := [name for name in names if Path(str(name)).name != name]:
            raise OperatorError(f"{model / INDEX}: {bad[0]!r} is not a file beside it")
        return [model / name for name in names]
    if (model / WEIGHTS).is_file():
        return [model / WEIGHTS]
    raise OperatorError(
        f"{model}: is neither a safetensors file nor a folder with {WEIGHTS}, nor an archive, nor owner/name of the hub; "
        "of a run, use `swarmentum export` or `swarmentum-coordinator run fork`"
    )
