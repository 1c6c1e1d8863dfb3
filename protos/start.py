"""Where a fork begins: the state of another run after one of its steps, as the fork's genesis names it. ADR 5.

`start_from_body` is the one door for it. Refuses step 0, whose state follows from a seed: `run create` makes such a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protos import limits
from protos.errors import Reason, Refusal
from protos.v1 import log_pb2

RUN_DIGITS_SHOWN = 16
MODEL_KEY = bytes(limits.PUBLIC_KEY_BYTES)
"""The coordinator's key of a starting state that is no run's, but a model's: `run_id` is then the hash of the model. ADR 5."""
MODEL_STEP = 1
"""The step that such a state is stored under: step 0 would mean a state that follows from a seed."""


@dataclass(frozen=True)
class StartingState:
    """The state of the parent run `run_id` after `step`, whose entry has `entry_hash`, as its agreed snapshot has it.

    `state_digest` is empty if the parent run agreed on none. `next_sample`: the first sample that it had not handed out.
    """

    run_id: bytes
    coordinator: bytes
    step: int
    entry_hash: bytes
    root: bytes
    total_bytes: int
    state_digest: bytes
    next_sample: int

    @property
    def is_model(self) -> bool:
        """Whether this is a model's state, and no run's."""
        return self.coordinator == MODEL_KEY

    def __str__(self) -> str:
        if self.is_model:
            return f"the model {self.run_id.hex()[:RUN_DIGITS_SHOWN]}"
        return f"step {self.step} of run {self.run_id.hex()[:RUN_DIGITS_SHOWN]}"


def start_of(genesis: log_pb2.Genesis) -> StartingState | None:
    """The starting state of a fork; None for any other run. Raises Refusal."""
    if not genesis.HasField("start"):
        return None
    if len(genesis.layout_digest) != limits.HASH_BYTES:
        raise Refusal(Reason.MALFORMED, "the genesis of a fork has no parameter layout")
    return start_from_body(genesis.start)


def start_from_body(body: log_pb2.StartingState) -> StartingState:
    """The door: sizes, then ranges. Raises Refusal."""
    for name, value, size in (
        ("run id", body.run_id, limits.HASH_BYTES),
        ("coordinator's key", body.coordinator_public_key, limits.PUBLIC_KEY_BYTES),
        ("entry hash", body.entry_hash, limits.HASH_BYTES),
        ("root", body.root, limits.HASH_BYTES),
        ("state digest", body.state_digest, limits.HASH_BYTES if body.state_digest else 0),
    ):
        if len(value) != size:
            raise Refusal(Reason.MALFORMED, f"starting state: {name} has {len(value)} bytes, expected {size}")
    bytes_max = limits.SNAPSHOT_PIECES_MAX * limits.SNAPSHOT_PIECE_BYTES
    for name, number, least, most in (
        ("step", body.step, 1, limits.STEP_MAX),
        ("bytes", body.total_bytes, 1, bytes_max),
        ("next sample", body.next_sample, 0, limits.SAMPLE_INDEX_MAX),
    ):
        if not least <= number <= most:
            raise Refusal(Reason.OUT_OF_RANGE, f"starting state: {name} {number}, expected {least} to {most}")
    return StartingState(
        body.run_id,
        body.coordinator_public_key,
        body.step,
        body.entry_hash,
        body.root,
        body.total_bytes,
        body.state_digest,
        body.next_sample,
    )


def start_body(start: StartingState) -> log_pb2.StartingState:
    """Inverse of `start_from_body`."""
    return log_pb2.StartingState(
        run_id=start.run_id,
        coordinator_public_key=start.coordinator,
        step=start.step,
        entry_hash=start.entry_hash,
        root=start.root,
        total_bytes=start.total_bytes,
        state_digest=start.state_digest,
        next_sample=start.next_sample,
    )


def fork_values(genesis: log_pb2.Genesis) -> dict[str, object] | None:
    """The parent run and step of a fork as JSON values, None for any other run. Raises Refusal."""
    start = start_of(genesis)
    if start is None:
        return None
    values: dict[str, object] = {"run": start.run_id.hex(), "step": start.step, "root": start.root.hex()}
    return {**values, "model": True} if start.is_model else values


def fork_words(fork: Mapping[str, object]) -> str:
    """`fork_values`, for people."""
    if fork.get("model"):
        return f"begins with the model {str(fork['run'])[:RUN_DIGITS_SHOWN]}"
    return f"fork of {str(fork['run'])[:RUN_DIGITS_SHOWN]} at step {fork['step']}"


def start_values(start: StartingState) -> dict[str, object]:
    """As JSON values, which `start_from_values` reads."""
    return {"model": start.run_id.hex(), "root": start.root.hex(), "total_bytes": start.total_bytes} | {
        "state_digest": start.state_digest.hex()
    }


def start_from_values(values: Mapping[str, object]) -> StartingState:
    """A model's state. Raises Refusal for values that are none."""
    try:
        name, root, digest = (bytes.fromhex(str(values[key])) for key in ("model", "root", "state_digest"))
        total = int(str(values["total_bytes"]))
    except (LookupError, ValueError) as error:
        raise Refusal(Reason.MALFORMED, f"no starting state: {error!r}") from error
    body = log_pb2.StartingState(
        run_id=name,
        coordinator_public_key=MODEL_KEY,
        step=MODEL_STEP,
        entry_hash=name,
        root=root,
        total_bytes=max(total, 0),
        state_digest=digest,
    )
    return start_from_body(body)
