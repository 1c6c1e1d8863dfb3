"""What keeps this peer from joining, told to the run's operator: one word and this program's version, without a name. ADR 21.

Refuses to tell what the person decided (no consent, Ctrl-C) and what the coordinator knows already. To tell is best effort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from node.model.device import DeviceError
from node.model.gradients import no_room
from node.model.spec import ModelError
from protos.errors import DataError, OperatorError, SwarmentumError, TokenizerError
from protos.v1 import coordinator_pb2 as pb

Failing = pb.JoinFailure
BY_ERROR = (
    (TokenizerError, Failing.JOIN_FAILURE_TOKENIZER),
    (DataError, Failing.JOIN_FAILURE_DATA),
    (ModelError, Failing.JOIN_FAILURE_MODEL),
    (DeviceError, Failing.JOIN_FAILURE_DEVICE),
)


@dataclass
class JoinStage:
    """What the peer does now: the reason, if it fails there without a more precise error. None: do not tell."""

    reason: pb.JoinFailure | None = None


@contextmanager
def telling(tell: Callable[[pb.JoinFailure], None]) -> Iterator[JoinStage]:
    """`tell` the reason of an error that ends the start of a peer, then raise that error."""
    stage = JoinStage()
    try:
        yield stage
    except (OperatorError, RuntimeError, MemoryError) as error:
        reason = _reason(stage, error)
        if reason is not None:
            with suppress(SwarmentumError):
                tell(reason)
        raise


def _reason(stage: JoinStage, error: BaseException) -> pb.JoinFailure | None:
    if stage.reason is None:
        return None
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and no_room(error)):
        return Failing.JOIN_FAILURE_MEMORY
    return next((reason for kind, reason in BY_ERROR if isinstance(error, kind)), stage.reason)
