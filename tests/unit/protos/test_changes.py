"""Settings that may change: the door, the one spelling of values, what they make of a run's settings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.changes import (
    CHANGEABLE,
    changed_values,
    in_force,
    merged,
    settings_body,
    settings_from_body,
    settings_of,
    with_settings,
)
from protos.errors import Refusal
from protos.limits import SETTING_BYTES_MAX
from protos.log import Entry, open_entry, seal_entry
from protos.run_config import RunConfig
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import log_pb2
from tests.unit.web.logs import COORDINATOR

RUN = bytes(32)


def test_each_changeable_setting_is_one_of_a_run() -> None:
    values = RunConfig().model_dump(mode="json")
    for key in CHANGEABLE:
        section, _, name = key.partition(".")
        assert name in values[section], key
        assert with_settings(RunConfig(), settings_of({key: values[section][name]})) == RunConfig()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("optimizer.beta", "0.5", "the state and the votes of all peers depend on it"),
        ("model.kwargs", "1", "the state holds the parameters"),
        ("admission.allowed", '"x"', "set admission.mode=invite, and make tickets"),
        ("trust.checkers", "3", "peers check each other by it"),
        ("clock.stepz", "3", "no run has such a setting"),
        ("clock.steps", "3.0e0", "not the one spelling"),
        ("clock.steps", "true", "expected a number or a word"),
        ("optimizer.lr", "NaN", "not the one spelling"),
        ("clock.steps", "{", "not JSON"),
        ("clock.steps", "1" * 65, "more than 64 bytes"),
        ("snapshots.mirrors", '"/states"', "expected a list"),
        ("snapshots.mirrors", "[1]", "expected a list"),
        ("snapshots.mirrors", '["/' + "s" * 512 + '"]', "more than 512 bytes"),
    ],
)
def test_the_door(key: str, value: str, words: str) -> None:
    with pytest.raises(Refusal, match=words):
        settings_from_body([log_pb2.Setting(key=key, value_json=value)])


def test_settings_are_sorted_each_once_and_not_too_many() -> None:
    two = settings_body((("clock.steps", "3"), ("clock.min_peers", "1")))
    with pytest.raises(Refusal, match="not sorted"):
        settings_from_body(two)
    with pytest.raises(Refusal, match="at most"):
        settings_from_body(two * 40)


def test_an_entry_has_them_and_one_without_has_the_bytes_of_before() -> None:
    settings = settings_of({"clock.steps": 7, "optimizer.lr": 1e-3})
    entry = Entry(1, RUN, (), 0, b"", (), 0, settings=settings)
    signed = seal_entry(COORDINATOR, RUN, entry)
    assert open_entry(signed.envelope, run_id=RUN, coordinator=COORDINATOR.public_key).entry == entry


def test_the_values_of_any_step_follow_from_the_changes() -> None:
    changed = [
        pb.ChangedSetting(setting=log_pb2.Setting(key="clock.steps", value_json=text), from_step=step)
        for text, step in (("500", 10), ("700", 20))
    ]
    config = RunConfig()
    steps = [in_force(config, changed, step).clock.steps for step in (9, 10, 19, 20)]
    assert steps == [config.clock.steps, 500, 500, 700]
    assert in_force(config, changed).clock.steps == 700
    assert changed_values(changed) == [{"key": "clock.steps", "value": 700, "from_step": 20}]
    strange = pb.ChangedSetting(setting=log_pb2.Setting(key="\x1b[2J", value_json="<script>{"), from_step=1)
    assert changed_values([strange]) == [{"key": "?[2J", "value": "<script>{", "from_step": 1}]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 50_000, "9" * 100_000, '"\\u001b]0;owned\\u0007"'])
def test_a_lying_coordinators_values_neither_end_a_reader_nor_reach_its_terminal(text: str) -> None:
    """`[[[[` without end ended `swarmentum status` with a RecursionError."""
    told = pb.ChangedSetting(setting=log_pb2.Setting(key="clock.steps", value_json=text), from_step=1)
    [row] = changed_values([told])
    assert row["value"].isprintable()
    assert len(row["value"]) <= SETTING_BYTES_MAX


@given(st.lists(st.tuples(st.sampled_from(sorted(CHANGEABLE)), st.integers(0, 9)), max_size=8))
def test_the_last_value_of_a_setting_counts(changes: list[tuple[str, int]]) -> None:
    found = ()
    for key, value in changes:
        found = merged(found, settings_of(_values(key, value)))
    assert found == settings_of({k: v for key, value in changes for k, v in _values(key, value).items()})


def _values(key: str, value: int) -> dict[str, object]:
    return {key: [f"/states/{value}"] if key == "snapshots.mirrors" else value}


def test_mirrors_of_snapshots_change_as_a_list_of_places() -> None:
    settings = settings_of({"snapshots.mirrors": ["https://example.org/states", "/states"]})
    assert with_settings(RunConfig(), settings).snapshots.mirrors == ("https://example.org/states", "/states")
    for wrong in (["ftp://example.org"], ["states"], ["https:///states"]):
        with pytest.raises(Refusal, match=r"snapshots\.mirrors"):
            with_settings(RunConfig(), settings_of({"snapshots.mirrors": wrong}))
    changed = pb.ChangedSetting(setting=settings_body(settings)[0], from_step=4)
    assert changed_values([changed])[0]["value"] == ["https://example.org/states", "/states"]
