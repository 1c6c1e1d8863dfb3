"""`swarmentum layout` beside a coordinator: a model whose modules fill the memory ends with a message."""

import resource
from typing import Any

import pytest

from node.commands import model_layout
from protos.errors import OperatorError
from protos.run_config import RunConfig


def test_a_model_of_too_many_modules_is_a_mistake_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """10**12 layers in a request of the operator's page took 40 MB a second for 300 s."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(model_layout.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(model_layout.resource, "setrlimit", lambda _, limits: asked.append(limits))
    model_layout.bound_memory()
    assert asked == [(model_layout.MEMORY_BYTES_MAX, resource.RLIM_INFINITY)]

    def full(_: Any, **of_the_run: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(model_layout, "shapes_of", full)
    with pytest.raises(OperatorError, match="its modules take more than 4 GiB"):
        model_layout.layout_of(RunConfig())
