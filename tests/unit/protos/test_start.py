"""The starting state of a fork: its door, and the bytes of runs that have none."""

from dataclasses import replace

import pytest

from protos.errors import Reason, Refusal
from protos.log import run_id_of
from protos.start import StartingState, fork_values, fork_words, start_body, start_from_body, start_of
from protos.v1 import log_pb2

START = StartingState(b"r" * 32, b"c" * 32, 25, b"e" * 32, b"s" * 32, 1000, b"d" * 32, 1600)
PLAIN = log_pb2.Genesis(
    format_version=1,
    config_json='{"name":"swarm"}',
    coordinator_public_key=bytes(range(32)),
    nonce=bytes(range(16)),
    layout_digest=b"l" * 32,
    parameters=7,
)


def fork() -> log_pb2.Genesis:
    genesis = log_pb2.Genesis()
    genesis.CopyFrom(PLAIN)
    genesis.start.CopyFrom(start_body(START))
    return genesis


def test_a_run_that_is_no_fork_has_the_same_id_as_before_forks_were_known() -> None:
    assert run_id_of(PLAIN).hex() == "85826e79450b9a15053c7f7e1a414ef0283069cb9fef7b1a6bbdc662ee92b3ae"
    assert start_of(PLAIN) is None
    assert fork_values(PLAIN) is None


def test_a_fork_names_its_start_in_its_id() -> None:
    genesis = fork()
    assert start_of(genesis) == START
    assert run_id_of(genesis) != run_id_of(PLAIN)
    values = fork_values(genesis)
    assert values == {"run": (b"r" * 32).hex(), "step": 25, "root": (b"s" * 32).hex()}
    assert fork_words(values) == "fork of 7272727272727272 at step 25"
    other = fork()
    other.start.CopyFrom(start_body(replace(START, step=50)))
    assert run_id_of(other) != run_id_of(genesis)


@pytest.mark.parametrize(("field", "value", "reason"), [
    ("run_id", b"r", Reason.MALFORMED),
    ("coordinator", b"", Reason.MALFORMED),
    ("entry_hash", b"e" * 33, Reason.MALFORMED),
    ("root", b"", Reason.MALFORMED),
    ("state_digest", b"d", Reason.MALFORMED),
    ("step", 0, Reason.OUT_OF_RANGE),
    ("step", 1 << 50, Reason.OUT_OF_RANGE),
    ("total_bytes", 0, Reason.OUT_OF_RANGE),
    ("total_bytes", 1 << 60, Reason.OUT_OF_RANGE),
    ("next_sample", 1 << 63, Reason.OUT_OF_RANGE),
])  # fmt: skip
def test_each_fault_has_its_reason(field: str, value: object, reason: Reason) -> None:
    with pytest.raises(Refusal) as refused:
        start_from_body(start_body(replace(START, **{field: value})))  # type: ignore[arg-type]
    assert refused.value.reason is reason


def test_a_digest_may_be_missing_and_a_layout_may_not() -> None:
    assert start_from_body(start_body(replace(START, state_digest=b""))).state_digest == b""
    genesis = fork()
    genesis.layout_digest = b""
    with pytest.raises(Refusal, match="no parameter layout"):
        start_of(genesis)
