"""A peer that begins a run nobody tried makes the dry run; a peer whose libraries compute another loss is told so."""

from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from coordinator.commands.checking import findings_of
from node.commands.model_layout import layout_of
from node.data.tokenizer import ByteTokenizer
from node.export.model_folder import first_look, other_loss, versions
from node.model.spec import ModelError, ModelSpec
from protos.model_config import ModelConfig, ReferenceLoss
from protos.run_config import RunConfig, config_from_json

WORTHLESS = {"factory": "tests.unit.model.faulty:make", "kwargs": {"name": "LookingAhead", "kind": "mean"}}
SOUND = {"factory": "tests.unit.model.faulty:make", "kwargs": {"name": "Sound"}}


def looked(model: dict[str, Any], *, known: bool) -> list[str]:
    """What a peer of a run of this model logs before it trains."""
    config = RunConfig(model=ModelConfig(**model))
    spec = ModelSpec(config.model.config, config.model.factory, config.model.kwargs)
    with capture_logs() as logs:
        first_look(spec, ByteTokenizer(), config, structlog.get_logger(), known=known)
    return [log["event"] for log in logs]


def test_the_first_peer_of_a_run_that_nobody_tried_refuses_a_worthless_model() -> None:
    with pytest.raises(ModelError, match="an earlier position sees a later token"):
        looked(WORTHLESS, known=False)
    assert looked(WORTHLESS, known=True) == []
    assert looked(SOUND, known=False) == []


def test_the_reference_of_a_run_is_what_its_peers_compute_and_another_one_is_told() -> None:
    facts = layout_of(RunConfig(model=ModelConfig(**SOUND)), allow_code=True)
    assert facts.reference["made_with"] == versions()
    assert looked({**SOUND, "reference": facts.reference}, known=True) == []
    other = {**facts.reference, "loss": facts.reference["loss"] * 1.01, "made_with": "torch 1.0, transformers 1.0"}
    [told] = looked({**SOUND, "reference": other}, known=True)
    assert "this machine computes another loss" in told
    assert "The run was made with torch 1.0, transformers 1.0, and here are torch" in told
    assert "0.001" in told


def test_a_large_model_is_compared_by_its_small_copy() -> None:
    config = {"model_type": "llama", "vocab_size": 256, "hidden_size": 2048, "num_hidden_layers": 24}
    run = RunConfig(model=ModelConfig(config={**config, "num_attention_heads": 16}))
    facts = layout_of(run)
    assert facts.reference["config"]["num_hidden_layers"] == 2
    reference = ReferenceLoss.model_validate(facts.reference)
    spec = ModelSpec(run.model.config)
    assert other_loss(spec, reference, 256, run.data.context) == ""
    strange = reference.model_copy(update={"config": {"model_type": "of a later version"}})
    assert "cannot compute the run's reference loss" in other_loss(spec, strange, 256, run.data.context)


def test_a_created_run_has_the_reference_and_a_run_without_one_keeps_its_bytes(tmp_path: Any) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "small"\n')
    config = findings_of(file, anchor=False).config
    assert config.model.reference is not None
    assert config_from_json(config.canonical_json()) == config
    assert '"reference"' not in RunConfig().canonical_json()
    assert findings_of(file, anchor=False, layout=False).config.model.reference is None
