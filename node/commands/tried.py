"""A dry run of a run's model and of its export, for `swarmentum layout` and for the first peers of a run that nobody tried.

Refuses what `node.model.dry_run` refuses, and a model that cannot be exported, or that comes back from its export as another one.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from node.commands.export import ExportError, export, no_progress_bar
from node.data.tokenizer import Tokenizer
from node.model.dry_run import DryRun, dry_run
from node.model.examine import FAILURES, answers_of
from node.model.spec import ModelError, ModelSpec, build
from node.quiet import quiet_libraries


def tried(spec: ModelSpec, tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    """`untried`, `notes` and `reference` of a model. Raises ModelError for one that no run should train."""
    done = tried_model(spec, tokenizer, context)
    return {"untried": done.untried, "notes": done.notes, "reference": None}


def tried_model(spec: ModelSpec, tokenizer: Tokenizer, context: int) -> DryRun:
    """The dry run of a model, with an export to a folder that is removed again. Raises ModelError."""
    with quiet_libraries():
        return dry_run(spec, tokenizer.vocabulary, context, partial(_export, spec, tokenizer))


def _export(spec: ModelSpec, tokenizer: Tokenizer, tried_spec: ModelSpec, model: nn.Module) -> None:
    where = f"model.factory = {spec.factory!r}" if spec.factory else "model.config"
    with tempfile.TemporaryDirectory(prefix="swarmentum-export-") as folder:
        path = Path(folder) / "model"
        try:
            export(model, tokenizer, path, {})
        except ExportError as error:
            raise ModelError(
                f"{where}: its export fails, and the run's result could not be used: {error.why}"
            ) from error
        try:
            back = _loaded(path, tried_spec)
        except FAILURES as error:
            what = (str(error).splitlines() or [""])[-1].strip()
            raise ModelError(
                f"{where}: its export cannot be loaded again: {type(error).__name__}: {what}; give each buffer memory of its own "
                "(.clone()), or register it with persistent=False"
            ) from error
    if not torch.allclose(answers_of(model), answers_of(back), rtol=1e-3, atol=1e-3):
        raise ModelError(
            f"{where}: its export is another model: loaded again, it gives other logits; keep all numbers that it needs in "
            "parameters and in buffers that are saved (persistent=True)"
        )


def _loaded(path: Path, spec: ModelSpec) -> nn.Module:
    """The exported model, as the card says how to load it."""
    if spec.factory is None:
        from transformers import AutoModelForCausalLM

        with no_progress_bar():
            model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return model
    import safetensors.torch

    made = build(spec, 1)
    missing, unknown = made.load_state_dict(safetensors.torch.load_file(path / "model.safetensors"), strict=False)
    del missing  # tied tensors, which the file holds once
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no part of the model")
    return made
