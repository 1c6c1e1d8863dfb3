"""The log: entries and ticks survive the wire, the chain takes only its next entry, the door checks every range."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import limits
from protos.assignment import Range, SampleShare
from protos.envelope import Kind, seal
from protos.errors import Reason, Refusal
from protos.identity import Identity
from protos.log import (
    REASON_CHARACTERS_MAX,
    Chain,
    Contribution,
    Entry,
    Exclusion,
    Verdict,
    entry_body,
    entry_hash,
    lr_from_bits,
    lr_to_bits,
    open_entry,
    run_id_of,
    seal_entry,
    summed_entry,
    with_payloads,
)
from protos.slices import Aggregate
from protos.tick import Tick, open_tick, seal_tick, tick_body, tick_from_body
from protos.v1 import log_pb2

RUN = bytes([1]) * 32
COORDINATOR, STRANGER = Identity.from_seed(bytes([3]) * 32), Identity.from_seed(bytes([4]) * 32)
deterministic = settings(derandomize=True, deadline=None)

hashes = st.binary(min_size=32, max_size=32)
ranges = st.lists(st.tuples(st.integers(0, 1 << 59), st.integers(0, 1 << 59)), max_size=4).map(
    lambda pairs: tuple(Range(a, a + b) for a, b in pairs)
)
contributions = st.lists(
    st.builds(
        Contribution, hashes, hashes, st.integers(0, limits.PAYLOAD_BYTES_MAX), st.integers(0, 1 << 60),
        st.integers(0, 1 << 60), st.floats(-100, 100, width=32),
    ),
    max_size=4, unique_by=lambda c: c.public_key,
).map(lambda many: tuple(sorted(many, key=lambda c: c.public_key)))  # fmt: skip
lr_bits = st.floats(0, 1, width=32).map(lr_to_bits)
entries = st.builds(
    Entry, st.integers(1, limits.STEP_MAX), hashes, contributions, lr_bits, st.one_of(st.just(b""), hashes), ranges,
    st.integers(0, limits.SAMPLE_INDEX_MAX),
)  # fmt: skip
rosters = st.lists(
    st.builds(SampleShare, hashes, st.integers(0, 1 << 40)), max_size=4, unique_by=lambda s: s.public_key
).map(lambda many: tuple(sorted(many, key=lambda s: s.public_key)))
ticks = st.builds(Tick, st.integers(1, limits.STEP_MAX), hashes, st.integers(1, 1 << 31), rosters, ranges, lr_bits)


def entry(step: int, parent: bytes = RUN) -> Entry:
    return Entry(step, parent, (Contribution(bytes(32), bytes(32), 1, 1, 1, 1.0),), lr_to_bits(1e-3), b"", (), step)


@given(value=entries)
@deterministic
def test_entry_round_trip(value: Entry) -> None:
    signed = seal_entry(COORDINATOR, RUN, value)
    assert signed == open_entry(signed.envelope, run_id=RUN, coordinator=COORDINATOR.public_key)
    assert signed.hash == entry_hash(entry_body(value))
    assert seal_entry(COORDINATOR, RUN, value).envelope == signed.envelope


@given(value=ticks)
@deterministic
def test_tick_round_trip(value: Tick) -> None:
    data = seal_tick(COORDINATOR, RUN, value).SerializeToString(deterministic=True)
    assert open_tick(data, run_id=RUN, coordinator=COORDINATOR.public_key) == value
    assert tick_from_body(tick_body(value)) == value


@given(one=entries, other=entries)
@deterministic
def test_hashes_differ_where_entries_do(one: Entry, other: Entry) -> None:
    assert (entry_hash(entry_body(one)) == entry_hash(entry_body(other))) == (entry_body(one) == entry_body(other))


@given(lr=st.floats(0, 1e5))
@deterministic
def test_learning_rate_travels_as_float32(lr: float) -> None:
    assert lr_to_bits(lr_from_bits(lr_to_bits(lr))) == lr_to_bits(lr)
    assert lr_from_bits(lr_to_bits(lr)) == pytest.approx(lr, rel=1e-6, abs=1e-38)
    assert replace(entry(1), lr_bits=lr_to_bits(lr)).lr == lr_from_bits(lr_to_bits(lr))


def test_the_genesis_names_the_run() -> None:
    genesis = log_pb2.Genesis(format_version=1, config_json="{}", coordinator_public_key=bytes(32), nonce=bytes(16))
    other = log_pb2.Genesis(format_version=1, config_json="{}", coordinator_public_key=bytes(32), nonce=bytes([1] * 16))
    assert len(run_id_of(genesis)) == 32
    assert run_id_of(genesis) != run_id_of(other)


@pytest.mark.parametrize(("change", "detail"), [
    (lambda b: setattr(b, "step", 0), "step 0"),
    (lambda b: setattr(b, "step", limits.STEP_MAX + 1), "step"),
    (lambda b: setattr(b, "parent_hash", b"short"), "parent hash"),
    (lambda b: setattr(b, "parent_state_digest", b"short"), "state digest"),
    (lambda b: setattr(b, "lr_bits", 0x7FC00000), "learning rate"),
    (lambda b: setattr(b, "lr_bits", lr_to_bits(-1.0)), "learning rate"),
    (lambda b: setattr(b, "next_sample", limits.SAMPLE_INDEX_MAX + 1), "next sample"),
    (lambda b: b.contributions.add(public_key=bytes(32), payload_sha256=bytes(32)), "sorted"),
    (lambda b: setattr(b.contributions[0], "public_key", b"short"), "public key"),
    (lambda b: setattr(b.contributions[0], "payload_sha256", b"short"), "payload hash"),
    (lambda b: setattr(b.contributions[0], "payload_bytes", limits.PAYLOAD_BYTES_MAX + 1), "payload of"),
    (lambda b: setattr(b.contributions[0], "samples", 1 << 61), "samples"),
    (lambda b: b.returned_samples.add(start=2, stop=1), "samples 2 to 1"),
    (lambda b: [b.returned_samples.add(start=1, stop=1) for _ in range(limits.POOL_RANGES_MAX + 1)], "ranges"),
    (lambda b: b.readmitted.append(b"short"), "public key"),
    (lambda b: b.readmitted.extend([bytes(32)] * 2), "not sorted"),
    (lambda b: b.readmitted.extend([bytes(32)] * (limits.READMITTED_MAX + 1)), "65 peers readmitted"),
    (lambda b: b.exclusions.add(public_key=bytes(32), by_operator=True, equivocation=log_pb2.Equivocation()), "evidence"),
    (lambda b: b.exclusions.add(public_key=bytes(32), by_operator=True, evidence=[log_pb2.Verdict()]), "evidence"),
])  # fmt: skip
def test_the_door_checks_every_range_of_an_entry(change: Callable[[Any], object], detail: str) -> None:
    body = log_pb2.LogEntry.FromString(entry_body(entry(1)))
    change(body)
    data = seal(COORDINATOR, Kind.KIND_LOG_ENTRY, RUN, body).SerializeToString()
    with pytest.raises(Refusal, match=detail) as error:
        open_entry(data, run_id=RUN, coordinator=COORDINATOR.public_key)
    assert error.value.reason is Reason.OUT_OF_RANGE


@pytest.mark.parametrize(("change", "detail"), [
    (lambda b: setattr(b, "step", 0), "step 0"),
    (lambda b: setattr(b, "parent_hash", b""), "parent hash"),
    (lambda b: setattr(b, "lr_bits", 0x7F800000), "learning rate"),
    (lambda b: b.roster.add(public_key=bytes(32), samples=1), "sorted"),
    (lambda b: setattr(b.roster[0], "public_key", b"short"), "public key"),
    (lambda b: setattr(b.roster[0], "samples", 1 << 62), "samples"),
    (lambda b: b.pool.add(start=9, stop=3), "samples 9 to 3"),
])  # fmt: skip
def test_the_door_checks_every_range_of_a_tick(change: Callable[[Any], object], detail: str) -> None:
    body = tick_body(Tick(1, RUN, 1, (SampleShare(bytes(32), 4),), (Range(0, 4),), 0))
    change(body)
    data = seal(COORDINATOR, Kind.KIND_TICK, RUN, body).SerializeToString()
    with pytest.raises(Refusal, match=detail) as error:
        open_tick(data, run_id=RUN, coordinator=COORDINATOR.public_key)
    assert error.value.reason is Reason.OUT_OF_RANGE


def test_the_largest_entry_and_tick_fit() -> None:
    keys = [i.to_bytes(32, "big") for i in range(limits.ENTRY_CONTRIBUTIONS_MAX)]
    parts = tuple(Range((1 << 59) + 2 * i, (1 << 59) + 2 * i + 1) for i in range(limits.POOL_RANGES_MAX - 1))
    most = tuple(Contribution(k, bytes(32), limits.PAYLOAD_BYTES_MAX, 1 << 60, 1 << 60, 1.0) for k in keys)
    found = Verdict(limits.STEP_MAX, keys[0], keys[1], bytes(32), -1.5, -1.5, 0.5, keys[2])
    found_by_many = (found,) * limits.EVIDENCE_MAX
    out = tuple(Exclusion(k, "x" * REASON_CHARACTERS_MAX, found_by_many) for k in keys[: limits.EXCLUSIONS_MAX])
    back = tuple(keys[-limits.READMITTED_MAX :])
    large = Entry(limits.STEP_MAX, RUN, most, lr_to_bits(1.0), RUN, parts, 1 << 60, exclusions=out, readmitted=back)
    signed = seal_entry(COORDINATOR, RUN, large)
    assert open_entry(signed.envelope, run_id=RUN, coordinator=COORDINATOR.public_key).entry == large
    assert len(signed.envelope) <= limits.GOSSIP_MESSAGE_BYTES_MAX
    tick = Tick(limits.STEP_MAX, RUN, 9, tuple(SampleShare(k, 1 << 20) for k in keys), parts, 0)
    data = seal_tick(COORDINATOR, RUN, tick).SerializeToString()
    assert open_tick(data, run_id=RUN, coordinator=COORDINATOR.public_key) == tick


def test_chain_takes_the_next_entry_and_nothing_else() -> None:
    chain = Chain(RUN, COORDINATOR.public_key)
    for step in range(1, 6):
        good = seal_entry(COORDINATOR, RUN, entry(step, chain.head))
        for bad, reason in (
            (seal_entry(COORDINATOR, RUN, entry(step + 1, chain.head)), Reason.WRONG_STEP),
            (seal_entry(COORDINATOR, RUN, entry(step, bytes(32))), Reason.WRONG_PARENT),
            (seal_entry(STRANGER, RUN, entry(step, chain.head)), Reason.UNKNOWN_SIGNER),
            (seal_entry(COORDINATOR, bytes(32), entry(step, chain.head)), Reason.WRONG_RUN),
        ):
            with pytest.raises(Refusal) as error:
                chain.extend(bad.envelope)
            assert error.value.reason is reason
            assert chain.step == step - 1
        assert chain.open(good.envelope) == good
        assert chain.step == step - 1, "checking moves nothing"
        assert chain.extend(good.envelope).hash == chain.head == good.hash
    with pytest.raises(Refusal, match="wrong_step"):
        chain.extend(good.envelope)


def test_chain_starts_anywhere() -> None:
    head = bytes([9]) * 32
    chain = Chain(RUN, COORDINATOR.public_key, 41, head)
    assert chain.extend(seal_entry(COORDINATOR, RUN, entry(42, head)).envelope).entry.step == 42


def test_a_tick_is_no_entry() -> None:
    data = seal_tick(COORDINATOR, RUN, Tick(1, RUN, 1, (), (), 0)).SerializeToString()
    with pytest.raises(Refusal, match="wrong_kind"):
        open_entry(data, run_id=RUN, coordinator=COORDINATOR.public_key)


@given(entries, hashes)
@deterministic
def test_a_summed_entry_has_one_hash_for_its_payloads_and_no_other(entry: Entry, payloads: bytes) -> None:
    summed = summed_entry(entry, Aggregate(b"s" * 32, 9), payloads)
    signed = seal_entry(COORDINATOR, RUN, summed)
    opened = open_entry(signed.envelope, run_id=RUN, coordinator=COORDINATOR.public_key)
    assert opened.entry == summed
    assert all(c.payload_sha256 == b"" for c in opened.entry.contributions)
    named = with_payloads(opened, {c.public_key: c.payload_sha256 for c in entry.contributions})
    assert named.entry.contributions == entry.contributions
    assert (named.hash, named.envelope) == (opened.hash, opened.envelope)
    assert with_payloads(named, {c.public_key: b"x" * 32 for c in entry.contributions}) == named, (
        "a hash that is there stays"
    )


@pytest.mark.parametrize(
    ("kept", "payloads", "aggregate"),
    [(b"p" * 32, b"h" * 32, True), (b"", b"", True), (b"", b"", False), (b"", b"h" * 31, True)],
)
def test_payload_hashes_are_in_the_contributions_or_in_one_hash(kept: bytes, payloads: bytes, aggregate: bool) -> None:
    contribution = Contribution(b"a" * 32, kept, 9, 1, 1, 1.0)
    made = Entry(
        1, RUN, (contribution,), 0, b"", (), 0, aggregate=Aggregate(b"s" * 32, 9, payloads) if aggregate else None
    )
    with pytest.raises(Refusal) as caught:
        open_entry(seal_entry(COORDINATOR, RUN, made).envelope, run_id=RUN, coordinator=COORDINATOR.public_key)
    assert caught.value.reason is Reason.OUT_OF_RANGE
