"""run.toml: measured defaults, one spelling on the wire, and errors that name the line, the key and what was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos import toml_file
from protos.errors import OperatorError, Reason, Refusal
from protos.identity import peer_id
from protos.limits import CONFIG_JSON_BYTES_MAX
from protos.run_config import RunConfig, UnknownSetting, config_from_json


def load(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return toml_file.load(path, RunConfig)


def test_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == RunConfig()


def test_canonical_json_round_trip(tmp_path: Path) -> None:
    config = load(
        tmp_path, 'name = "ä"\nseed = 7\n[model.config]\nmodel_type = "llama"\nrope = 1e4\n[clock]\nsteps = 9\n'
    )
    text = config.canonical_json()
    assert text.isascii()
    assert config_from_json(text) == config
    assert config_from_json(text).canonical_json() == text


@pytest.mark.parametrize(("text", "line", "words"), [
    ("seed = -1\n", 1, ["seed", "-1"]),
    ("name = 'x'\nsede = 3\n", 2, ["sede: is not a known setting"]),
    ("[clock]\nsteps = 5\nquorum = 2\n", 3, ["clock.quorum", "given: 2"]),
    ("[clock]  # how long\nsteps = 'many'\n", 2, ["clock.steps", "many"]),
    ("[ clock ]\nsteps = 0\n", 2, ["clock.steps"]),
    ("clock = { steps = 0 }\n", 1, ["clock.steps"]),
    ("clock.steps = 0\n", 1, ["clock.steps"]),
    ("seed = 1\n\n[clock]\nmin_peers = 9\nmax_peers = 2\n", 3, ["min_peers 9 exceeds max_peers 2"]),
    ("[clock]\ndeadline_ms_min = 90000\n", 1, ["deadline_ms_min 90000 exceeds deadline_ms_max"]),
    ("[clock]\nmin_peers = 65\n", 1, ["less than one sample a peer"]),
    ("[optimizer]\nlr = nan\n", 2, ["optimizer.lr"]),
    ("[optimizer]\ngroup_size = 12\n", 2, ["optimizer.group_size"]),
    ("[model]\nfactory = 'a:b'\n[model.config]\nx = 1\n", 1, ["not both"]),
    ("[model]\nkwargs = { a = 1 }\n", 1, ["factory"]),
    ("[admission]\nmode = 'allow_list'\nallowed = ['12D3KooWnonsense']\n", 3, ["admission.allowed", "peer id"]),
    ("[overlay]\nbootstrap = ['nowhere']\n", 2, ["overlay.bootstrap.0"]),
    ("[data]\ncontext = 1\n[clock]\nsteps = 0\n", 2, ["data.context", "clock.steps"]),
    ("[nonsense]\nx = 1\n", 1, ["nonsense: is not a known setting"]),
    ("seed = 1\nname = = 2\n", 2, ["is not TOML"]),
    ("seed = 1\nseed = 2\n", 2, ["is not TOML"]),
])  # fmt: skip
def test_errors_name_file_line_and_key(tmp_path: Path, text: str, line: int, words: list[str]) -> None:
    with pytest.raises(OperatorError) as error:
        load(tmp_path, text)
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'run.toml'}:{line}: "), message
    for word in words:
        assert word in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="cannot be read"):
        toml_file.load(tmp_path / "none.toml", RunConfig)
    with pytest.raises(OperatorError, match="cannot be read"):
        toml_file.load(tmp_path, RunConfig)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe4"')
    with pytest.raises(OperatorError, match="UTF-8"):
        toml_file.load(tmp_path / "latin.toml", RunConfig)


def test_allow_list_of_real_peer_ids(tmp_path: Path) -> None:
    peer = peer_id(bytes(32))
    config = load(tmp_path, f"[admission]\nmode = 'allow_list'\nallowed = ['{peer}']\n")
    assert config.admission.allowed == [peer]


@pytest.mark.parametrize(("text", "reason"), [
    ("", Reason.OUT_OF_RANGE), ("[]", Reason.OUT_OF_RANGE), ('{"seed": -1}', Reason.OUT_OF_RANGE),
    ('{"x": 1}', Reason.OUT_OF_RANGE), (" " * (CONFIG_JSON_BYTES_MAX + 1), Reason.TOO_LARGE),
])  # fmt: skip
def test_a_strangers_configuration_is_refused(text: str, reason: Reason) -> None:
    with pytest.raises(Refusal) as error:
        config_from_json(text)
    assert error.value.reason is reason


def test_configurations_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 2  # type: ignore[misc]


def test_a_setting_of_a_newer_version_is_told_from_a_wrong_one() -> None:
    newer = RunConfig().canonical_json().replace('"seed"', '"seeds"')
    with pytest.raises(UnknownSetting, match="seeds"):
        config_from_json(newer)
    with pytest.raises(Refusal) as caught:
        config_from_json(RunConfig().canonical_json().replace('"seed":0', '"seed":-1'))
    assert not isinstance(caught.value, UnknownSetting)
