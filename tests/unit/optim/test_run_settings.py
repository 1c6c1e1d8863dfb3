"""A setting of an optimizer has one definition: run.toml's. The optimizers' own configurations refuse what it refuses."""

from dataclasses import fields
from typing import Any

import pytest
from pydantic import ValidationError

from node.optim.base import TABLES, BaseConfig
from node.optim.demo import DeMoConfig
from node.optim.local import LocalConfig
from node.optim.paper_demo import PaperConfig
from protos.optimizer_config import BaseOptimizerConfig, LocalStepsConfig, OptimizerConfig

OF_THE_REFERENCE = {"beta", "beta2"}
"""DeMo as published, for a training without a run; a run has the measured ones."""
HERE_ALONE: dict[type, set[str]] = {
    DeMoConfig: {"second_moment", "momentum_type", "seed", "author"},
    BaseConfig: {"muon_except", "function", "buffers"},
    LocalConfig: {"clip_norm"},
    PaperConfig: set(),
}


@pytest.mark.parametrize(
    ("config", "section"),
    [
        (DeMoConfig, OptimizerConfig),
        (BaseConfig, BaseOptimizerConfig),
        (LocalConfig, LocalStepsConfig),
        (PaperConfig, OptimizerConfig),
    ],
)
def test_defaults_are_those_of_run_toml_but_where_a_reason_stands(config: Any, section: Any) -> None:
    run, made = section.model_construct(), config()
    for field in fields(config):
        if field.name in section.model_fields and field.name not in OF_THE_REFERENCE | {"base"}:
            same = getattr(made, field.name) == getattr(run, field.name)
            assert same or (config, field.name) == (PaperConfig, "clip_norm"), field.name
        assert field.name in section.model_fields or field.name in HERE_ALONE[config], field.name
    assert tuple(BaseOptimizerConfig().tables) == TABLES


@pytest.mark.parametrize("value", [-1.0, 1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["beta", "beta2", "nesterov", "weight_decay"])
def test_what_run_toml_refuses_the_optimizer_refuses(key: str, value: float) -> None:
    with pytest.raises(ValidationError, match=key):
        OptimizerConfig.model_validate({key: value, "base": "sign"})
    with pytest.raises(ValueError, match=f"{key} = .*: expected is a number of at least 0, below 1"):
        DeMoConfig(**{key: value})


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LocalConfig, {"steps": 0}), (LocalConfig, {"lr": 0.0}), (LocalConfig, {"clip_norm": 0.0}),
        (BaseConfig, {"beta2": 1.0}), (BaseConfig, {"eps": 0.0}), (DeMoConfig, {"decay": "some"}),
        (DeMoConfig, {"refused": "keep"}), (PaperConfig, {"clip_norm": -1.0}), (PaperConfig, {"beta": 1.0}),
    ],
)  # fmt: skip
def test_each_names_the_key_the_value_and_the_values_that_are_allowed(config: Any, settings: dict[str, Any]) -> None:
    [(key, value)] = settings.items()
    with pytest.raises(ValueError, match=f"{key} = {value!r}: expected is "):
        config(**settings)
