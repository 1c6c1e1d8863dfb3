"""A dry run of a model and of its export, for `swarmentum layout`, and for the first peers of an untried run (ADR 53).

Refuses what `node.model.dry_run` refuses, and a model that cannot be exported, or that its export changes.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any, Final

import torch
from torch import nn

from node.data.tokenizer import Tokenizer
from node.export.model_folder import ExportError, export, own_tensors
from node.imports import no_progress_bar, quiet_libraries
from node.model.dry_run import DryRun, dry_run, reference_loss
from node.model.gradients import logits_of
from node.model.passes import FAILURES, answers_of, undisturbed
from node.model.spec import ModelError, ModelSpec, build
from protos.disk import temporary_folder
from protos.run_config import RunConfig
from protos.run_sections import ReferenceLoss

REFERENCE_TOLERANCE: Final = 1e-3
"""Of the loss. Instruction sets and numbers of threads change it by 1e-6; a changed attention mask or activation by 1e-2."""

GIVEN_TOKENS: Final = 6
DRAWN_TOKENS: Final = 3
DRAWN_TOLERANCE: Final = 1e-2
"""Of the largest logit. A cache rounds otherwise than a whole pass, by 1e-5."""


def tried(spec: ModelSpec, tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    """`untried`, `notes` and `reference` of a model. Raises ModelError for one that no run should train."""
    done = tried_model(spec, tokenizer, context)
    reference = None
    if done.spec is not None and done.loss is not None:
        own = None if done.spec == spec else dict(done.spec.config or {})
        reference = {"config": own, "loss": done.loss, "made_with": versions()}
    return {"untried": done.untried, "notes": done.notes, "reference": reference}


def versions() -> str:
    """Of the libraries that compute a loss."""
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))


def first_look(spec: ModelSpec, tokenizer: Tokenizer, config: RunConfig, log: Any, *, known: bool) -> None:
    """What a peer does with a model before it trains: a dry run if nobody made one, else it compares the reference loss.

    `known`: the genesis states the layout, or the run is past its start. Raises ModelError for what a dry run finds.
    """
    if not known:
        done = tried_model(spec, tokenizer, config.data.context)
        for note in (*done.notes, *([f"the model is not checked: {done.untried}"] if done.untried else [])):
            log.warning("a dry run of the model says", why=note)
    if config.model.reference is not None:
        other = other_loss(spec, config.model.reference, tokenizer.vocabulary, config.data.context)
        if other:
            log.warning("this machine computes another loss than the run's reference", why=other)


def other_loss(spec: ModelSpec, reference: ReferenceLoss, vocabulary: int, context: int) -> str:
    """What to say if this machine computes another loss than the run's reference; empty if it is the same."""
    small = spec if reference.config is None else ModelSpec(reference.config)
    try:
        with quiet_libraries():
            found = reference_loss(small, vocabulary, context)
    except ModelError as error:
        return f"this machine cannot compute the run's reference loss ({error}); the run was made with {reference.made_with}"
    if abs(found - reference.loss) <= REFERENCE_TOLERANCE * max(1.0, abs(reference.loss)):
        return ""
    here, todo = versions(), "install the same"
    if here == reference.made_with:
        here, todo = "the same", "take the run's code of the model, and the files that it reads"
    return (
        f"this machine computes another loss than the run's first one: {found:.4f} nats, not {reference.loss:.4f} (up to "
        f"{REFERENCE_TOLERANCE:g} of it is rounding), for the same weights and samples. The run was made with "
        f"{reference.made_with}, and here are {here}: {todo}, or this peer's votes fit others' less"
    )


def tried_model(spec: ModelSpec, tokenizer: Tokenizer, context: int) -> DryRun:
    """The dry run of a model, with an export to a folder that is removed again. Raises ModelError."""
    with quiet_libraries():
        return dry_run(spec, tokenizer.vocabulary, context, partial(_export, spec, tokenizer))


def _export(spec: ModelSpec, tokenizer: Tokenizer, tried_spec: ModelSpec, model: nn.Module) -> list[str]:
    """Notes on an export. Raises ModelError."""
    where = f"model.factory = {spec.factory!r}" if spec.factory else "model.config"
    back = _back_of_module(model, tried_spec, where) if spec.factory else _back_of_type(model, tokenizer, where)
    try:
        other = answers_of(back)
    except FAILURES as error:
        raise ModelError(f"{where}: its export fails in a pass once it is loaded again: {_why(error)}") from error
    if not torch.allclose(answers_of(model), other, rtol=1e-3, atol=1e-3):
        raise ModelError(
            f"{where}: its export is another model: loaded again, it gives other logits; keep all numbers that it needs in "
            "parameters and in buffers that are saved (persistent=True)"
        )
    why = "" if spec.factory else _drawn_otherwise(back, tokenizer.vocabulary)
    return [f"{where}: {why}; take another type for a model that writes text"] if why else []


def _drawn_otherwise(model: Any, vocabulary: int) -> str:
    """How `generate` of transformers goes on otherwise than the model's own passes: it counts the positions of RoBERTa's kind
    from 0, and adds tokens to those of XLM's. Empty if it does not."""
    ids = (vocabulary // 2 + torch.arange(GIVEN_TOKENS))[None] % vocabulary
    try:
        with undisturbed(), torch.no_grad():
            done = model.eval().generate(
                ids, max_new_tokens=DRAWN_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
            for number, drawn in enumerate(done.logits, GIVEN_TOKENS):
                own = logits_of(model, done.sequences[:, :number])[:, -1]
                if float((own - drawn).abs().max()) > DRAWN_TOLERANCE * float(own.abs().max()):
                    return "`generate` of transformers gives its export other logits than a pass: its text is not the model's"
    except FAILURES as error:
        return f"`generate` of transformers fails with its export: {_why(error)}"
    return ""


def _back_of_module(model: nn.Module, spec: ModelSpec, where: str) -> nn.Module:
    """A module as its export's card says how to load it. Only the state is tried: transformers takes seconds to import."""
    from safetensors import SafetensorError
    from safetensors.torch import load, save

    try:
        data = save(own_tensors(model)[0])
    except (*FAILURES, SafetensorError) as error:
        raise ModelError(f"{where}: its export fails, and nobody could use the result: {_why(error)}") from error
    made = build(spec, 1)
    try:
        _, unknown = made.load_state_dict(
            load(data), strict=False
        )  # tied tensors are missing: the file holds them once
    except FAILURES as error:
        raise ModelError(
            f"{where}: its export cannot be loaded again: {_why(error)}; give each buffer memory of its own (.clone()), or "
            "register it with persistent=False"
        ) from error
    if unknown:
        raise ModelError(f"{where}: its export cannot be loaded again: {unknown[0]!r} is no part of a new model")
    return made


def _back_of_type(model: nn.Module, tokenizer: Tokenizer, where: str) -> nn.Module:
    """A model of transformers, written to a folder that is removed again, and loaded."""
    from transformers import AutoModelForCausalLM

    folder, remove = temporary_folder("swarmentum-export-")
    try:
        path = folder / "model"
        try:
            export(model, tokenizer, path, {})
        except ExportError as error:
            raise ModelError(f"{where}: its export fails, and nobody could use the result: {error.why}") from error
        try:
            with no_progress_bar():
                back: nn.Module = AutoModelForCausalLM.from_pretrained(
                    path, dtype=torch.float32, trust_remote_code=False
                )
        except FAILURES as error:
            raise ModelError(f"{where}: its export cannot be loaded again: {_why(error)}") from error
        return back
    finally:
        remove()


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
