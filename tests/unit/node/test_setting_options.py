"""Options of commands are the peer's settings: `--set`, options of earlier versions, and settings of earlier files."""

import re
import tomllib
from pathlib import Path

import pytest
import typer
from click import unstyle
from typer.testing import CliRunner

from node.__main__ import app
from node.commands.options import FLAGS, PANEL_OF, given_settings
from node.config import PeerSettings, load_settings, peer_settings
from node.donor.owner_settings import KEYS
from node.earlier_settings import EARLIER, GONE
from protos.errors import OperatorError
from protos.mistakes import PEER

PEER_PAGE = Path(__file__).parents[3] / "docs" / "peer.md"
JOIN_OPTIONS_MAX = 20
SETTINGS_MAX = 36
RELAY = f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert isinstance(done.exception, OperatorError), done.output
    return str(done.exception)


def test_a_newcomer_sees_few_options_in_panels_and_every_other_setting_has_set() -> None:
    text = unstyle(CliRunner().invoke(app, ["join", "--help"]).output)
    assert len(re.findall(r"^│ --", text, flags=re.MULTILINE)) <= JOIN_OPTIONS_MAX
    assert text.index("What you need first") < text.index("Limits") < text.index("All other settings")
    assert PANEL_OF.keys() - FLAGS.keys() <= PeerSettings.model_fields.keys()
    assert len(PeerSettings.model_fields) <= SETTINGS_MAX, "a new setting takes the place of another"


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["--relay-mbit", "20"], "Type --set relay_mbit=20 instead"),
        (["--relay-mbit=20"], "Type --set relay_mbit=20 instead"),
        (["--archive", "--json"], "Type --set archive=true instead"),
        (["--relay", "/ip4/203.0.113.5/tcp/4001"], "Type --set reachability=/ip4/203.0.113.5/tcp/4001 instead"),
        (["--group-size", "16"], "Type --set vote_size=16 instead"),
        (["--fit-uplink"], "Type --set 'vote_size=25%' instead"),
        (["--trace"], "Type --set track=otlp instead"),
        (["--evaluate=false"], "Type --set decline=evaluation instead"),
        (["--allow-left-out"], "Type --set allow=left_out instead"),
        (["--metrics-listen"], "Type --set metrics_listen=VALUE instead"),
    ],
)
def test_an_option_of_an_earlier_version_names_what_to_type(words: list[str], typed: str) -> None:
    """All of them by one mechanism: what is typed works."""
    for command in ("join", "anchor", "doctor", "relay"):
        said = refusal(command, *words)
        assert f"{words[0].partition('=')[0]} is no option of this command" in said
        assert typed in said
    pair = typed.split()[2].strip("'")
    if "VALUE" not in pair:
        given_settings({}, [pair])


def test_an_option_that_never_was_is_still_named() -> None:
    done = CliRunner().invoke(app, ["join", "--treads", "2"])
    assert done.exit_code == 2
    assert "--treads" in unstyle(done.output)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["thraeds=2"], "--set thraeds=2: 'thraeds' is no setting; did you mean threads"),
        (["threads"], "--set threads: expected KEY=VALUE"),
        (["nice=3", "nice=4"], "--set nice=4: nice is given twice"),
        (["bootstrap=[1"], "--set bootstrap=[1: is no list"),
    ],
)
def test_a_wrong_pair_is_named(pairs: list[str], words: str) -> None:
    with pytest.raises(OperatorError) as caught:
        given_settings({}, pairs)
    assert words in str(caught.value)


def test_a_wrong_value_is_named_with_the_values_that_are_allowed() -> None:
    pairs = ["precision=fp8", "only_on_mains=perhaps", "vote_size=1001%", "track=mlflow"]
    with pytest.raises(OperatorError) as caught:
        load_settings(**given_settings({"nice": "40"}, pairs))
    for line in (
        "nice: expected is a whole number from 0 to 19, or off (given: '40')",
        'precision: expected is "auto", "bf16" or "fp32" (given: \'fp8\')',
        "only_on_mains: expected is true or false (given: 'perhaps')",
        "vote_size: expected is a whole number from 2 to 2,048, or a part such as 25%, or off (given: '1001%')",
        "track.0: expected is any of tensorboard, wandb, trackio, otlp; commas between them (given: 'mlflow')",
    ):
        assert line in str(caught.value)


def test_values_of_a_command_line_are_those_of_a_file() -> None:
    """Every kind of value: numbers, truth, text with an equals sign, lists, and no value."""
    pairs = ["micro-batch=4", "archive=true", "data=a=b", "bootstrap=", f"reachability=/dns4/x.org/tcp/2,{RELAY}"]
    more = ["reachability=private", "vote_size=50%", "metrics_listen=off", "listen=*:4001/tcp"]
    made = load_settings(**given_settings({"threads": "2"}, [*pairs, *more]))
    assert (made.micro_batch, made.archive, made.data, made.bootstrap, made.threads) == (4, True, "a=b", [], 2)
    overlay = made.overlay()
    assert (overlay.announce, overlay.relays, overlay.reachability) == (("/dns4/x.org/tcp/2",), (RELAY,), "private")
    assert (overlay.listen_host, overlay.listen_port, overlay.quic) == ("*", 4001, False)
    assert (made.uplink_part, made.own_size, made.metrics_listen) == (0.5, None, None)


def test_settings_of_earlier_files_count_as_those_of_today(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("swarmentum.toml").write_text(
        "group_size = 16\nrelay_for_others = false\nfit_uplink = true\nuplink_budget = 0.5\narchive_gb = 100\n"
    )
    made = load_settings()
    assert (made.vote_size, made.relay_mbit, made.uplink_part, made.disk_gb) == ("50%", 0, 0.5, 130)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        "swarmentum.toml: group_size is no setting any more, and counts as vote_size = 50%: write that instead"
    )
    assert len(said) == 5
    Path("swarmentum.toml").write_text("group_size = 16\narchive_gb = 100\n")
    monkeypatch.setenv("SWARMENTUM_GROUP_SIZE", "64")
    monkeypatch.setenv("SWARMENTUM_PAYLOADS_GB", "5")
    assert (load_settings().vote_size, load_settings().disk_gb) == (64, 115), "the environment wins over the file"
    monkeypatch.setenv("SWARMENTUM_VOTE_SIZE", "8")
    assert load_settings().vote_size == 8
    assert load_settings(top_k=4).vote_size == 4, "a program's own"
    Path("swarmentum.toml").write_text("archive_gb = 'much'\n")
    with pytest.raises(OperatorError, match=r"archive_gb, payloads_gb: .*; set disk_gb instead"):
        load_settings()
    assert not (EARLIER.keys() | GONE.keys()) & PeerSettings.model_fields.keys()
    assert set(EARLIER.values()) <= PeerSettings.model_fields.keys()


@pytest.mark.parametrize(
    ("lines", "means"),
    [
        ("fit_uplink = false", None),
        ("fit_uplink = false\nuplink_budget = 0.5", None),
        ("fit_uplink = false\ngroup_size = 16", 16),
        ("uplink_budget = 0.5", "50%"),
        ("uplink_budget = 0.5\ngroup_size = 16", 16),
    ],
)
def test_earlier_words_on_the_uplink_keep_their_meaning_though_votes_follow_the_lines_by_default(
    lines: str, means: int | str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("swarmentum.toml").write_text(lines + "\n")
    assert load_settings().vote_size == means
    shown = "off" if means is None else means
    assert capsys.readouterr().err.splitlines()[0].endswith(f"counts as vote_size = {shown}: write that instead")
    Path("swarmentum.toml").write_text("vote_size = '50%'\n")
    monkeypatch.setenv("SWARMENTUM_FIT_UPLINK", "false")
    assert load_settings().vote_size is None, "the environment wins over the file"
    monkeypatch.delenv("SWARMENTUM_FIT_UPLINK")
    monkeypatch.setenv("SWARMENTUM_UPLINK_BUDGET", "0.5")
    Path("swarmentum.toml").write_text("vote_size = 16\n")
    assert load_settings().vote_size == 16, "a budget alone was of nothing"


def test_what_was_several_settings_is_one_list_in_which_the_parts_of_file_environment_and_flags_add_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("named.toml").write_text(
        f"allow_code = true\nrelays = ['{RELAY}']\nquic = false\nevaluate = false\ntell_failures = false\ntrace = true\n"
        "track = 'wandb'\nsnapshots_gb = 5\nlicence = 'mit'\noverlay_memory_gb = 1\n"
    )
    monkeypatch.setenv("SWARMENTUM_CONFIG", "named.toml")
    monkeypatch.setenv("SWARMENTUM_EVALUATE", "true")
    monkeypatch.setenv("SWARMENTUM_ANNOUNCE", '["/dns4/x.org/tcp/2"]')
    made = load_settings(allow_data=True, listen="*:4001", reachability="public")
    assert (set(made.allow), made.decline, made.track) == ({"code", "data"}, ["failures"], ["wandb", "otlp"])
    assert (made.listen, made.overlay().relays) == ("*:4001/tcp", (RELAY,))
    assert (made.overlay().announce, made.overlay().reachability) == (("/dns4/x.org/tcp/2",), "public")
    said = capsys.readouterr().err
    assert "allow_data" not in said, "it is an option of today"
    assert "named.toml: quic is no setting any more, and counts as listen = *:4001/tcp: write that instead" in said
    assert "named.toml: snapshots_gb is no setting any more, and is left out: a peer gives snapshots" in said
    assert len(said.splitlines()) == 10
    monkeypatch.setenv("SWARMENTUM_ALLOW_CODE", "no")
    assert load_settings().allow == []
    monkeypatch.setenv("SWARMENTUM_ALLOW_CODE", "perhaps")
    with pytest.raises(OperatorError, match="environment: allow_code: 'perhaps' is neither true nor false"):
        load_settings()


def test_a_list_that_is_off_takes_back_what_earlier_layers_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--set allow=off` counted as not given, so that the environment agreed in the person's place."""
    monkeypatch.setenv("SWARMENTUM_ALLOW", "code")
    monkeypatch.setenv("SWARMENTUM_TRACK", "wandb")
    monkeypatch.setenv("SWARMENTUM_YES", "true")
    assert set(load_settings().allow) == {"code", "requests"}
    made = load_settings(**given_settings({"allow_data": True}, ["allow=off", "track=off"]))
    assert (made.allow, made.track) == (["data"], [])
    assert load_settings(**given_settings({}, ["allow=off", "allow=left_out"])).allow == ["left_out", "requests"]


def test_every_setting_whose_values_name_off_takes_it() -> None:
    keys = [it.key for it in peer_settings() if it.allowed.endswith(", or off")]
    assert "vote_size" in keys
    made = load_settings(**given_settings({}, [f"{key}=off" for key in keys]))
    assert [getattr(made, key) for key in keys] == [None] * len(keys)


def test_a_peer_whose_file_says_that_it_relays_for_nobody_relays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("swarmentum.toml").write_text("relay_for_others = false\nrelay_mbit = 5\n")
    assert load_settings().relay_mbit == 0
    monkeypatch.setenv("SWARMENTUM_RELAY_MBIT", "2")
    assert load_settings().relay_mbit == 2, "a later layer"


def test_the_file_that_settings_prints_can_be_used() -> None:
    printed = CliRunner().invoke(app, ["settings"]).output
    keys = {f"# {it.key} = {it.default}" for it in peer_settings() if it.default}
    used = "\n".join(line.removeprefix("# ") if line in keys else line for line in printed.splitlines())
    values = {key: value for key, value in tomllib.loads(used).items() if key != "allow"}
    assert len(values) > 15
    assert load_settings(**values) == load_settings()
    assert f"{len(PeerSettings.model_fields)}" == str(len(re.findall(r"^# \w+ = ", printed, flags=re.MULTILINE)))


def test_the_table_of_the_page_is_that_of_the_settings() -> None:
    """docs/peer.md: the settings that change while a peer runs, as the code has them."""
    rows = [f"| `{it.key}` | {it.allowed} | {it.text.replace('|', '/')} |" for it in peer_settings() if it.key in KEYS]
    table = "\n".join(["| setting | values | what it does |", "|---|---|---|", *rows])
    assert table in PEER_PAGE.read_text(), f"put this into docs/peer.md:\n{table}"


def test_every_command_with_settings_takes_set() -> None:
    group = typer.main.get_command(app)
    found = {
        name
        for name, command in group.commands.items()  # type: ignore[attr-defined]
        if any("--set" in parameter.opts for parameter in command.params)
    }
    assert found == {"join", "anchor", "export", "doctor", "relay"}
    relay = unstyle(CliRunner().invoke(app, ["relay", "--help"], env={"COLUMNS": "200"}).output)
    assert "default: *:4001" in relay, "at IPv6, too: peers with that alone find no other one"
