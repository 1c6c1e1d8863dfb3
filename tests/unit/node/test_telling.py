"""What a peer tells when it cannot start: the reason by its error, or else by what it did; and what it keeps to itself."""

from collections.abc import Callable

import pytest
import torch

from node.admission.fit import Failing, telling
from node.model.spec import ModelError
from protos.errors import DataError, NetworkError, OperatorError, RefusedError, StoppedError, TokenizerError


def fail(tell: Callable[[Failing], None], at: Failing | None, error: Exception) -> None:
    with telling(tell) as stage:
        stage.reason = at
        raise error


@pytest.mark.parametrize(
    ("error", "at", "told"),
    [
        (TokenizerError("x"), Failing.JOIN_FAILURE_OTHER, Failing.JOIN_FAILURE_TOKENIZER),
        (DataError("x"), Failing.JOIN_FAILURE_OTHER, Failing.JOIN_FAILURE_DATA),
        (ModelError("x"), Failing.JOIN_FAILURE_MEMORY, Failing.JOIN_FAILURE_MODEL),
        (OperatorError("x"), Failing.JOIN_FAILURE_MEMORY, Failing.JOIN_FAILURE_MEMORY),
        (OperatorError("upgrade"), Failing.JOIN_FAILURE_VERSION, Failing.JOIN_FAILURE_VERSION),
        (torch.OutOfMemoryError("x"), Failing.JOIN_FAILURE_OTHER, Failing.JOIN_FAILURE_MEMORY),
        (MemoryError(), Failing.JOIN_FAILURE_OTHER, Failing.JOIN_FAILURE_MEMORY),
        (OperatorError("no consent"), None, None),
        (RefusedError("x"), Failing.JOIN_FAILURE_OTHER, None),
        (NetworkError("x"), Failing.JOIN_FAILURE_OTHER, None),
        (StoppedError("x"), Failing.JOIN_FAILURE_OTHER, None),
    ],
)
def test_the_reason(error: Exception, at: Failing | None, told: Failing | None) -> None:
    heard: list[Failing] = []
    with pytest.raises(type(error)):
        fail(heard.append, at, error)
    assert heard == ([] if told is None else [told])


def test_an_absent_coordinator_does_not_hide_the_error() -> None:
    def away(_: Failing) -> None:
        raise NetworkError("away")

    with pytest.raises(DataError, match="the text"):
        fail(away, Failing.JOIN_FAILURE_OTHER, DataError("the text"))
