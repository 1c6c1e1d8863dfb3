"""run.toml: measured defaults, one spelling on the wire, and errors that name the line, the key and what was given."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from protos import toml_file
from protos.errors import OperatorError, Reason, Refusal
from protos.identity import peer_id
from protos.limits import CONFIG_JSON_BYTES_MAX
from protos.run_config import RunConfig, UnknownSetting, config_from_json


def load(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return toml_file.load(path, RunConfig)


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
    ("seed = 1\n\n[clock]\nmin_peers = 9\nmax_peers = 2\n", 4, ["clock.min_peers: min_peers 9 exceeds max_peers 2"]),
    ("[clock]\ndeadline_ms_min = 90000\n", 2, ["deadline_ms_min 90000 exceeds deadline_ms_max"]),
    ("[clock]\nmin_peers = 65\n", 1, ["less than one sample a peer"]),
    ("[optimizer]\nlr = nan\n", 2, ["optimizer.lr"]),
    ("[optimizer]\ngroup_size = 12\n", 2, ["optimizer.group_size"]),
    ("[model]\nfactory = 'a:b'\n[model.config]\nx = 1\n", 2, ["not both"]),
    ("[model]\nkwargs = { a = 1 }\n", 2, ["factory"]),
    ("[admission]\nmode = 'allow_list'\nallowed = ['12D3KooWnonsense']\n", 3, ["admission.allowed", "peer id"]),
    ("[overlay]\nbootstrap = ['nowhere']\n", 2, ["overlay.bootstrap.0: expected an address of a peer, for example '/ip4/"]),
    ("name = 'a/b'\n", 1, ["name: expected letters, digits", "for example 'shakespeare 2' (given: 'a/b')"]),
    ("[evaluation]\nevery = 30\n", 2, ["evaluation.every: evaluation.every 30 is no multiple"]),
    ("[clock]\nmin_peers = 3\n\n[trust]\nenabled = true\n[optimizer]\noverlap = true\n", 5, ["trust.enabled: `trust`"]),
    ("[optimizer]\nwarmup_steps = 3\nvalues = '16bit'\n", 3, ["optimizer.values: `values"]),
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


WRONG_IN_EACH_LAYER = """name = "a/b"
[clock]
steps = 0
min_peers = 9
max_peers = 2
deadline_ms_min = 90000
[trust]
enabled = "maybe"
nosuch = 1
[evaluation]
every = 30
[overlay]
bootstrap = ["/ip4/1.2.3.4/tcp/1", 3]
"""


def test_mistakes_of_all_layers_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(OperatorError) as told:
        load(tmp_path, WRONG_IN_EACH_LAYER)
    said = [line.removeprefix(f"{tmp_path / 'run.toml'}:") for line in str(told.value).splitlines()]
    keys = [line.split(": ")[:2] for line in said]
    assert keys == [
        ["1", "name"], ["3", "clock.steps"], ["4", "clock.min_peers"], ["6", "clock.deadline_ms_min"], ["8", "trust.enabled"],
        ["9", "trust.nosuch"], ["11", "evaluation.every"], ["13", "overlay.bootstrap.0"], ["13", "overlay.bootstrap.1"],
    ]  # fmt: skip
    assert "Value error" not in str(told.value)
    assert "pattern" not in str(told.value)


def test_a_rule_about_a_setting_that_is_wrong_says_nothing(tmp_path: Path) -> None:
    """Without its value, the default would be compared: 65 peers and 64 samples are no mistake of the second line."""
    with pytest.raises(OperatorError) as told:
        load(tmp_path, "[clock]\nmin_peers = 65\nbatch_samples = 'many'\n")
    assert [line.split(": ")[1] for line in str(told.value).splitlines()] == ["clock.batch_samples"]
    for text in ("clock = 3\nseed = 'x'\n", "[[clock]]\nsteps = 1\n[[clock]]\nsteps = 'x'\n[model]\nfactory = 1\n"):
        with pytest.raises(OperatorError) as told:
            load(tmp_path, text)
        assert len(str(told.value).splitlines()) == 2


def test_a_base_is_a_name_or_a_table() -> None:
    named, table = (RunConfig.model_validate({"optimizer": {"base": it}}) for it in ("muon", {"name": "muon"}))
    assert named.optimizer == table.optimizer
    with pytest.raises(
        ValidationError, match=r"optimizer\.base\.name\n  Input should be 'sign', 'sgd', 'adamw' or 'muon'"
    ):
        RunConfig.model_validate({"optimizer": {"base": "moun"}})
