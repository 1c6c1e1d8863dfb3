"""A folder from somebody runs no code: not beside run.toml, not beside an export, and not in a model's own configuration."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator import __main__ as operator
from node import __main__ as peer
from node.commands.evaluate import EvaluationError, evaluate, evaluated
from node.config import load_settings
from node.data.tokenizer import ByteTokenizer
from node.export.model_folder import export
from node.model.spec import ModelError, ModelSpec, build, build_meta
from protos.disk import DiskError
from protos.errors import OperatorError
from protos.process import python_command, safe_environment
from tests.unit.model.test_spec import TINY

BIN = Path(sys.executable).parent
SHADOWED = ("structlog", "torch", "pydantic", "lm_eval", "transformers", "typer", "rich", "node", "json")
OWN = "import pathlib, torch\npathlib.Path('called').touch()\ndef model():\n    return torch.nn.Embedding(256, 256)\n"


def hostile(folder: Path) -> Path:
    """A folder with files that take the place of libraries: each leaves a mark if it runs."""
    folder.mkdir()
    for library in SHADOWED:
        (folder / f"{library}.py").write_text(f"import pathlib\npathlib.Path({str(folder / 'ran')!r}).touch()\n")
    return folder


def command(folder: Path, *words: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        [str(BIN / words[0]), *words[1:]], input=stdin, capture_output=True, text=True, timeout=270, check=False, cwd=folder,
        env=surroundings,
    )  # fmt: skip


def test_a_child_of_a_child_leaves_the_folder_out_too(tmp_path: Path) -> None:
    folder = hostile(tmp_path / "from-somebody")
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {'import structlog'!r}], check=True)"
    subprocess.run(python_command("-c", inner), cwd=folder, env=safe_environment(), check=True, timeout=270)
    assert not (folder / "ran").exists()


def test_code_that_run_toml_names_runs_only_with_a_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`os:system` needs no file: the name alone would be enough."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('name = "x"\n[model]\nfactory = "os:mkdir"\nkwargs = {path = "made"}\n')
    done = CliRunner().invoke(operator.app, ["run", "check", "run.toml", "--json"])
    assert done.exit_code == 0, done.output
    assert any("use --allow-code" in note for note in json.loads(done.stdout)["notes"]), done.stdout
    for words in (["layout", "run.toml"], ["start-from", "run.toml", str(tmp_path), "--home", "home"]):
        with pytest.raises(OperatorError, match="--allow-code"):
            CliRunner().invoke(peer.app, words, catch_exceptions=False)
    assert not Path("made").exists()


def test_an_own_module_of_the_working_folder_is_imported_with_a_yes_and_no_other_file(tmp_path: Path) -> None:
    folder = hostile(tmp_path / "from-somebody")
    (folder / "mine.py").write_text(OWN)
    (folder / "run.toml").write_text('name = "mine"\n[model]\nfactory = "mine:model"\n')
    done = command(folder, "swarmentum-coordinator", "run", "check", "run.toml", "--json", "--allow-code")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layout"]["parameters"] == 256 * 256
    assert (folder / "called").exists()
    assert not (folder / "ran").exists(), "the working folder comes after the libraries"


LM_EVAL = """
import json, pathlib, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out = pathlib.Path(words["--output_path"]); out.mkdir()
told = {"arguments": words["--model_args"]}
told |= {"stands_in": str(pathlib.Path.cwd()), "held": [str(it) for it in pathlib.Path().iterdir()]}
(out / "results_1.json").write_text(json.dumps({"results": {}, "lm_eval_version": told | words}))
"""


def test_lm_eval_is_the_installed_one_and_stands_in_an_empty_folder(tmp_path: Path) -> None:
    library = tmp_path / "installed" / "lm_eval"
    library.mkdir(parents=True)
    (library / "__init__.py").touch()
    (library / "__main__.py").write_text(LM_EVAL)
    folder = hostile(tmp_path / "from-somebody")
    export(build(ModelSpec(TINY), 3), ByteTokenizer(), folder / "model", {})
    words = ("--tasks", "arc_easy,own/task.yaml", "--include-path", "tasks", "--json")
    done = command(folder, "swarmentum", "evaluate", "model", *words, PYTHONPATH=str(library.parent))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["lm_eval"]
    assert not (folder / "ran").exists()
    assert (told["held"], Path(told["stands_in"]).parent == folder) == ([], False)
    assert told["arguments"].startswith(f"pretrained={folder / 'model'},dtype=float32,trust_remote_code=False")
    assert told["--tasks"] == f"arc_easy,{folder / 'own/task.yaml'}"
    assert told["--include_path"] == str(folder / "tasks")


@pytest.mark.parametrize("cut", [False, True])
def test_figures_are_shown_where_there_is_no_room_for_them(
    tmp_path: Path, cut: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An evaluation takes hours. Its figures were gone if FOLDER could not take them; a cut-off file was a traceback."""
    library = tmp_path / "installed" / "lm_eval"
    library.mkdir(parents=True)
    (library / "__init__.py").touch()
    (library / "__main__.py").write_text(LM_EVAL.replace("told | words})", "told | words})[:20]") if cut else LM_EVAL)
    folder = tmp_path / "model"
    export(build(ModelSpec(TINY), 3), ByteTokenizer(), folder, {})
    (folder / "evaluation.json").mkdir()  # as of a disk that is full: nothing can be written in its place
    monkeypatch.setenv("PYTHONPATH", str(library.parent))
    error, why = (EvaluationError, "results_1.json of lm-eval is cut off") if cut else (DiskError, "evaluation.json")
    with pytest.raises(error, match=why):
        evaluate(folder, "arc", as_json=True)
    assert cut or json.loads(capfd.readouterr().out)["lm_eval"]["--tasks"] == "arc"


def test_lm_eval_beside_an_export_is_no_installed_lm_eval(tmp_path: Path) -> None:
    folder = hostile(tmp_path / "from-somebody")
    export(build(ModelSpec(TINY), 3), ByteTokenizer(), folder / "model", {})
    command(folder, "swarmentum", "evaluate", str(folder / "model"), "--tasks", "no_such_task")
    assert not (folder / "ran").exists()


def with_code(folder: Path) -> Path:
    """A model's folder whose tokenizer brings code."""
    folder.mkdir()
    (folder / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(folder / 'ran')!r}).touch()\n"
        "class Evil:\n    from_pretrained = classmethod(print)\n"
    )
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
    return folder


def test_evaluate_never_asks_for_a_tokenizers_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from node.commands.evaluate import _model_args

    folder = with_code(tmp_path / "model")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 5))
    with pytest.raises(OperatorError, match="tokenizer cannot be loaded"):
        _model_args(folder)
    assert not (folder / "ran").exists()


def test_a_configuration_brings_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A type without a language model of its own, and a map that names one: the library would ask, and take a `y`."""
    folder = with_code(tmp_path / "model")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 5))
    config = {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": f"{folder}--evil.Evil"}}
    with pytest.raises(ModelError, match="vit"):
        build_meta(ModelSpec(config))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("place", ["top", "inner"])
def test_a_configuration_names_no_kernel_at_any_depth(tmp_path: Path, place: str) -> None:
    kernel = {"attn_implementation": "some/kernel"}
    config = {"model_type": "llama", **(kernel if place == "top" else {"text_config": kernel})}
    with pytest.raises(ModelError, match=r"attn_implementation = 'some/kernel'"):
        build_meta(ModelSpec(config))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OperatorError, match=r"config.json: .*attn_implementation = 'some/kernel'"):
        evaluated(tmp_path, None, [])


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("allow_code", "true", "code"),
        ("allow_data", "true", "data"),
        ("yes", "true", "requests"),
        ("allow", '"code"', "code"),
    ],
)
def test_a_file_in_the_working_folder_agrees_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SWARMENTUM_CONFIG", raising=False)
    Path("swarmentum.toml").write_text(f'device = "cpu"\n{name} = {value}\n')
    with pytest.raises(OperatorError, match=rf"swarmentum.toml:2: {name}: .*cannot agree for you.*SWARMENTUM_ALLOW"):
        load_settings()
    monkeypatch.setenv("SWARMENTUM_CONFIG", str(tmp_path / "swarmentum.toml"))
    assert load_settings().allow == [word]


@pytest.mark.parametrize("value", ['"[code"', "'[\"code\"'", "7", "{code = true}"])
def test_what_is_no_list_agrees_to_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SWARMENTUM_CONFIG", raising=False)
    Path("swarmentum.toml").write_text(f"allow = {value}\n")
    with pytest.raises(OperatorError, match=r"swarmentum\.toml:1: allow: .*cannot agree for you"):
        load_settings()
    for yes in ("true", "false"):
        monkeypatch.setenv("SWARMENTUM_CONFIG", str(tmp_path / "swarmentum.toml"))
        monkeypatch.setenv("SWARMENTUM_YES", yes)
        with pytest.raises(OperatorError):
            load_settings()
