"""`swarmentum evaluate`: the real lm-eval on an export, with a task that is a file here. It needs no network.

lm-eval may be in an environment of its own: SWARMENTUM_TEST_LM_EVAL names its Python (`make nightly` makes one).
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from node.commands.evaluate import RESULTS
from node.data.tokenizer import ByteTokenizer
from node.export.model_folder import export
from node.model.spec import ModelSpec, build
from tests.unit.model.test_spec import TINY

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

PYTHON = os.environ.get("SWARMENTUM_TEST_LM_EVAL") or (sys.executable if find_spec("lm_eval") else None)
TASK = """
task: spelling
dataset_path: json
dataset_kwargs:
  data_files:
    test: DATA
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def swarmentum(*command: str) -> tuple[int, str, str]:
    environment = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "node", *command], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.nightly
@pytest.mark.skipif(PYTHON is None, reason="needs the extra swarmentum[evaluate], or SWARMENTUM_TEST_LM_EVAL")
def test_lm_eval_evaluates_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    facts = {"run_id": "ab" * 32, "steps": 3, "state_digest": "cd" * 32}
    folder = export(build(ModelSpec(TINY), 3), ByteTokenizer(), tmp_path / "model", facts)
    questions = [{"question": "a", "choices": [" b", " c"], "right": n % 2} for n in range(4)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "spelling.yaml").write_text(TASK.replace("DATA", str(tmp_path / "test.jsonl")))
    more = ("--include-path", str(tmp_path / "tasks"), "--python", str(PYTHON))
    code, out, err = swarmentum("evaluate", str(folder), "--tasks", "spelling", "--limit", "4", *more, "--json")
    assert code == 0, err[-3000:]
    told = json.loads(out)
    assert told["tasks"]["spelling"]["acc"] == 0.5, "the same answer to four questions, two of which want it"
    assert {name: told[name] for name in facts} == facts
    assert json.loads((folder / RESULTS).read_text()) == told


def test_an_evaluation_that_fails_says_so(tmp_path: Path) -> None:
    folder = export(build(ModelSpec(TINY), 3), ByteTokenizer(), tmp_path / "model", {})
    fails = program(tmp_path / "python", '[ "$2" = -c ] || { echo "no such task" >&2; exit 3; }')
    code, out, err = swarmentum("evaluate", str(folder), "--tasks", "none", "--python", str(fails))
    assert (code, out) == (1, "")
    assert "no such task" in err
    assert "lm-eval ended with exit code 3 and no results" in err
    assert not (folder / RESULTS).exists()


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.long
def test_what_is_missing_is_named(tmp_path: Path) -> None:
    code, _, err = swarmentum("evaluate", str(tmp_path), "--tasks", "arc_easy")
    assert (code, "holds no config.json" in err) == (2, True), err
    (tmp_path / "config.json").write_text("{}")
    bare = program(tmp_path / "python", "exit 1")
    code, _, err = swarmentum("evaluate", str(tmp_path), "--tasks", "arc_easy", "--python", str(bare))
    assert code == 2
    assert f"{bare} has no lm-eval: pip install '.[evaluate]'" in err
    bare = program(tmp_path / "python", "exit 0")
    code, _, err = swarmentum("evaluate", str(tmp_path), "--tasks", "arc_easy", "--python", str(bare))
    assert (code, "its tokenizer cannot be loaded" in err) == (2, True), err
    code, _, err = swarmentum("evaluate", str(tmp_path), "--tasks", "arc_easy", "--python", str(tmp_path / "none"))
    assert (code, "cannot be run: No such file or directory" in err) == (2, True), err
