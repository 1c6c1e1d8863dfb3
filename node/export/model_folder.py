"""A trained model as a folder that Hugging Face loads, and a sample of the model's text.

Refuses to overwrite a folder that is not an export of the same run. Knows no wire, and sends nothing.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from node.data.tokenizer import Tokenizer
from node.export.card import CARD, MARK, card_text, files_of, mark_text, run_of
from node.imports import many_imports, no_progress_bar, quiet_libraries
from node.model.examine import with_statistics
from node.model.gradients import logits_of
from node.model.passes import FAILURES
from node.model.spec import REFUSALS, ModelError, ModelSpec, build_meta
from protos.disk import begun_folder, path_problem, remove_killed, replace_bytes, sync_files, sync_folder
from protos.errors import OperatorError
from protos.mistakes import NO_LICENCE
from protos.run_config import RunConfig

FILE_MODE: Final = 0o644
FRESH: Final = ".new-"
"""Begins, or follows the folder's name, in the name of a folder that an export fills, before the id of its process."""
SPECIAL_IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
FORCED_IDS: Final = ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")
"""Ids that `generate` writes or leaves out whatever the model says."""
AGAIN: Final = "nothing of the run is lost: `swarmentum export` with the invite link writes the model again"
SHORT_TEXT: Final = "a b"
SAMPLE_CONTEXT_TOKENS: Final = 256  # unless the caller or the model names fewer
SAMPLE_TEMPERATURE: Final = 0.8  # below 1, a small model's text has fewer errors and still varies


class ExportError(OperatorError):
    """The program cannot write the export to the operator's path. `why`: the cause alone."""

    def __init__(self, text: str, why: str = "") -> None:
        super().__init__(text)
        self.why = why or text


def export(
    model: nn.Module, tokenizer: Tokenizer, path: Path, card: Mapping[str, object], licence: str = NO_LICENCE
) -> Path:
    """Write model, tokenizer and a model card to the folder `path`. The folder is whole, or not there at all.

    `card`: facts by name (run id, steps, digest, ...), in the reader's order. `licence`: for the card. The new export replaces
    an older one of the same run at `path`, and leaves there what is somebody's own. It fills an empty folder, and a mount.
    """
    from safetensors import SafetensorError

    path = path.resolve() if path.is_symlink() else path.absolute()
    stays = _stays(path)
    if not stays:
        _go_on(_old(path), path)
    check_folder(path, run_id := str(card.get("run_id", "")))
    beside, prefix = (path, FRESH) if stays else (path.parent, f".{path.name}{FRESH}")
    remove_killed(beside, prefix)
    try:
        with begun_folder(beside, prefix) as fresh:
            _write(model, tokenizer, fresh, card, licence)
            for file in fresh.iterdir():
                file.chmod(FILE_MODE)  # safetensors makes its files for the owner only
            sync_files(fresh)
            if stays:
                _fill(path, fresh, run_id)
            else:
                _replace(path, fresh)
    except OSError as error:
        raise ExportError(f"export: cannot write {path}: {error.strerror or error}; {AGAIN}") from error
    except (*REFUSALS, SafetensorError) as error:
        what = (str(error).splitlines() or [""])[0]
        raise ExportError(
            f"export: {type(model).__name__} cannot be written to {path}: {type(error).__name__}: {what}; {AGAIN}",
            f"{type(error).__name__}: {what}",
        ) from error
    return path


def _stays(path: Path) -> bool:
    """Whether no rename replaces the folder that is there: a mount, or a folder below one that this user may not write to."""
    return path.is_dir() and (path.is_mount() or not os.access(path.parent, os.W_OK | os.X_OK))


def _fill(path: Path, fresh: Path, run_id: str) -> None:
    """Move the export's files into a folder that stays, the mark last: a kill leaves a mark that names the run alone."""
    before, names = {*files_of(path)}, {file.name for file in fresh.iterdir()}
    replace_bytes(path / MARK, mark_text({"run_id": run_id}, before | names).encode())
    for name in before - names:
        (path / name).unlink()
    for name in sorted(names, key=lambda name: (name == MARK, name)):
        (fresh / name).replace(path / name)
    sync_folder(path)


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _replace(path: Path, fresh: Path) -> None:
    if path.exists():
        path.rename(_old(path))
    try:
        fresh.rename(path)
    finally:
        _go_on(_old(path), path)
    sync_folder(path.parent)


def _go_on(old: Path, path: Path) -> None:
    """End what an export began that was perhaps killed: the export before it lies at `old`, and goes back if none came.

    What no export writes, such as somebody's notes or a `.git`, stays in the folder.
    """
    with suppress(OSError):
        if not path.exists():
            old.rename(path)
        for name in sorted({file.name for file in old.iterdir()} - set(files_of(old))):
            if not (path / name).exists():
                (old / name).rename(path / name)
        shutil.rmtree(old)


def check_folder(path: Path, run_id: str = "") -> None:
    """`ExportError` if an export cannot come to `path`. Known before a peer joins, so that no run's work is lost on it.

    `run_id`: of the run, whose own exports are replaced, and no others.
    """
    if (why := path_problem(path)) is not None:
        raise ExportError(f"export: {why}")
    path = path.resolve()
    there = path if _stays(path) else next(folder for folder in path.parents if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ExportError(f"export: cannot write {path}: {there} is no folder that this user may write to")
    try:
        ours = not path.exists() or (path / MARK).is_file() or all(_is_nothing(file.name) for file in path.iterdir())
    except OSError as error:
        raise ExportError(f"export: {path} cannot be read: {error.strerror or error}; choose another folder") from error
    if not ours:
        raise ExportError(f"export: {path} exists and is not an export of this program; choose another folder")
    if run_id and (theirs := run_of(path)) not in ("", run_id):
        raise ExportError(f"export: {path} is the export of another run ({theirs[:16]}); choose another folder")


def _is_nothing(name: str) -> bool:
    """Whether a folder with this alone is an empty one: a new disk's folder, or what a killed export began."""
    return name == "lost+found" or name.startswith((FRESH, f".{MARK}."))


def _write(model: nn.Module, tokenizer: Tokenizer, folder: Path, card: Mapping[str, object], licence: str) -> None:
    from safetensors.torch import save_file

    huggingface = _is_huggingface(model)
    if huggingface:
        with no_progress_bar(), _special_ids_of(tokenizer, model):
            model.save_pretrained(folder)  # type: ignore[operator]
    else:
        tensors, twins = own_tensors(model)
        save_file(tensors, folder / "model.safetensors", metadata={**twins, "format": "pt"})
    if untrained := with_statistics(model, unseen=True):  # a program's own model may have those of its training
        card = {**card, "untrained": f"the statistics of {', '.join(untrained)}: pass batches in training mode first"}
    _to_continue(tokenizer.huggingface()).save_pretrained(folder)
    (folder / CARD).write_text(card_text(card, huggingface=huggingface, licence=licence), encoding="utf-8")
    (folder / MARK).write_text(mark_text(card, (file.name for file in folder.iterdir())), encoding="utf-8")


def _to_continue(inner: Any) -> Any:
    """The tokenizer without tokens that it puts after a text (those of BERT, RoBERTa and T5 do): with the end of a text after a
    prompt, a model begins another text. What it puts before a text stays. A class of its own would put them back at a load."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    if not isinstance(inner, PreTrainedTokenizerFast):
        return inner
    bare, whole = (inner.encode(SHORT_TEXT, add_special_tokens=special) for special in (False, True))
    first = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), len(whole))
    if first + len(bare) >= len(whole):
        return inner
    before = list(inner.convert_ids_to_tokens(whole[:first]))
    backend = copy.deepcopy(inner.backend_tokenizer)
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A"],
        pair=[*before, "$A", "$B:1"],
        special_tokens=list(zip(before, whole[:first], strict=True)),
    )
    kept = {name: getattr(inner, name) for name in ("model_max_length", "padding_side", "clean_up_tokenization_spaces")}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **inner.special_tokens_map, **kept)  # type: ignore[no-untyped-call]
    made.chat_template = inner.chat_template
    return made


def own_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state of a module, each tensor in memory of its own, and the names of tied tensors by the name that holds them.

    Buffers may be parts of one table, or one number seen many times; a file of safetensors takes neither, so these are copied.
    """
    tensors, twins, known, used = dict[str, Tensor](), dict[str, str](), dict[object, str](), set[object]()
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name!r} in its state is a {type(value).__name__}, and a model file holds tensors alone")
        memory = value.untyped_storage().data_ptr() if value.numel() else name
        place = memory, value.storage_offset(), value.shape, value.stride(), value.dtype
        first = known.setdefault(place, name)
        if first == name:
            own = value.is_contiguous() and value.nbytes == value.untyped_storage().nbytes() and memory not in used
            tensors[name] = value.detach() if own else value.detach().clone(memory_format=torch.contiguous_format)
            used.add(memory)
        else:
            twins[name] = first
    return tensors, twins


@contextmanager
def _special_ids_of(tokenizer: Tokenizer, model: Any) -> Iterator[None]:
    """Give the model's configurations the special ids of its tokenizer: those of the model type are other tokens' ids.

    With 50256 as the end of a text, and a vocabulary of 1,000, `generate` would never stop; with an end that is forced (BART's
    2), its last token would be a plain byte. Stays: padding from which the model counts its positions (RoBERTa), and what a
    type does not take. `generate` goes by the other configuration.
    """
    from huggingface_hub.errors import StrictDataclassError

    inner, drawn, known = (
        tokenizer.huggingface(),
        getattr(model, "generation_config", None),
        set(tokenizer.control.values()),
    )
    configs = [(model.config, SPECIAL_IDS), *([(drawn, (*SPECIAL_IDS, *FORCED_IDS))] if drawn else [])]
    before = [(config, name, getattr(config, name, None)) for config, names in configs for name in names]
    try:
        for config, name, value in before:
            if name in FORCED_IDS:
                ids = {value} if isinstance(value, int) else set(value or ())
                setattr(config, name, value if ids <= known else None)
            elif not (config is model.config and name == "pad_token_id" and counts_padding(model)):
                with suppress(StrictDataclassError):
                    setattr(config, name, getattr(inner, name, None))
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)


def _is_huggingface(model: nn.Module) -> bool:
    """Whether transformers makes this model of its configuration. Of one with other layers (LoRA, an adapter) or ties, it would
    leave numbers out or draw them anew, and save an adapter alone."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return False
    try:
        plain = build_meta(ModelSpec(model.config.to_dict()))
    except ModelError:  # a type of a program's own: its class loads it
        return not getattr(model, "_hf_peft_config_loaded", False)
    shapes, its = ({name: it.shape for name, it in part.named_parameters()} for part in (plain, model))
    return shapes == its


@torch.inference_mode()
def sample_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    *,
    seed: int,
    context: int = SAMPLE_CONTEXT_TOKENS,
    temperature: float = SAMPLE_TEMPERATURE,
) -> str:
    """The prompt and `tokens` tokens after it, drawn with a generator of its own. The model keeps its mode.

    `context`: the tokens that the model was trained to see at once; it sees no more of them here.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.as_tensor(tokenizer.encode(prompt or "\n").astype("int64"))
    if not len(ids):  # a tokenizer of words has none for a newline
        ids = torch.tensor([tokenizer.end or 0])
    window, training, device = min(_context_of(model), context), model.training, next(model.parameters()).device
    model.eval()
    try:
        for _ in range(tokens):
            logits = logits_of(model, ids[None, -window:].to(device))[0, -1, : tokenizer.vocabulary]
            ids = torch.cat([ids, _draw(logits.float().cpu() / temperature, generator)])
    finally:
        model.train(training)
    return tokenizer.decode(ids.tolist())


def writer(config: RunConfig, tokenizer: Tokenizer) -> Callable[[nn.Module], str] | None:
    """What writes the samples of a run with `evaluation.sample_tokens`: the same draws for each state. None: no samples."""
    tokens, prompt = config.evaluation.sample_tokens, config.evaluation.prompt
    if not tokens:
        return None
    fixed: dict[str, Any] = {"prompt": prompt, "tokens": tokens, "seed": config.seed, "context": config.data.context}
    return partial(sample_text, tokenizer=tokenizer, **fixed)


def _draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)


def _context_of(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    return int(getattr(config, "max_position_embeddings", None) or sys.maxsize)


def saved_form(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state`, by the model's own names, as an export has it. Of `model` only type and names count."""
    with many_imports():
        from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return dict(state)
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, dict(state))
    return found


def own_form(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a file by the model's own names, in fp32; as they are if they are no other form of all its parameters.

    They are another form if the model that transformers loads from them, saved again, has each of their numbers: under its
    name, or with the prefix that files of a bare model lack (GPT-2). What its type ignores, such as a mask, is left out.
    """
    with many_imports():
        from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return dict(weights)
    cls: Any = type(model)
    try:
        with quiet_libraries(), no_progress_bar():
            loaded, info = cls.from_pretrained(
                None, config=copy.deepcopy(model.config), state_dict=dict(weights), dtype=torch.float32,
                output_loading_info=True, trust_remote_code=False,
            )  # fmt: skip
            again = saved_form(loaded, loaded.state_dict())
    except FAILURES:
        return dict(weights)
    ignored = [re.compile(pattern) for pattern in cls._keys_to_ignore_on_load_unexpected or ()]

    def is_there(name: str, tensor: Tensor) -> bool:
        found = again.get(name, again.get(f"{cls.base_model_prefix}.{name}"))
        if found is None:
            return any(pattern.search(name) for pattern in ignored)
        return torch.equal(found.float(), tensor.float())

    same = not info["missing_keys"] and all(is_there(name, tensor) for name, tensor in weights.items())
    return dict(loaded.state_dict()) if same else dict(weights)


def counts_padding(model: nn.Module) -> bool:
    """Whether the model computes with the id of padding: a table (RoBERTa), or the lengths of its texts (XLM)."""
    mine = [it for it in model.modules() if "Embedding" in type(it).__name__ and type(it) is not nn.Embedding]
    tables = any(getattr(it, "padding_idx", None) is not None for it in mine)
    return tables or any(getattr(it, "pad_index", None) is not None for it in model.modules())
