"""`swarmentum evaluate`: tasks of EleutherAI's lm-eval on an export, by `python -m lm_eval` in a process of its own.

lm-eval may be in another environment than this program (`--python`). Refuses an export that transformers cannot load, and any
code that comes with a model or lies beside it. lm-eval downloads the texts of its tasks itself, unless they are files here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from node.commands.options import Json, need_node_extra
from node.export.card import MARK
from protos.disk import write_bytes
from protos.errors import OperatorError, SwarmentumError
from protos.process import python_command, safe_environment
from protos.text import print_json

RESULTS: Final = "evaluation.json"
_HERE: Final = "import importlib.util, sys; sys.exit(importlib.util.find_spec('lm_eval') is None)"
_SEPARATORS: Final = ",="
"""lm-eval separates the arguments of a model by these, so no path may have them."""
_A_FILE: Final = re.compile(r"/|\.ya?ml$")
"""In `--tasks`, a path and no name. lm-eval stands in another folder, so it gets the absolute path."""


class EvaluationError(SwarmentumError):
    """lm-eval ended without results."""


def evaluate(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="An export of a run, or any Hugging Face model's folder.")
    ],
    tasks: Annotated[str, typer.Option(help="Tasks of lm-eval, with commas between them.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many samples of each task (default: all).")] = None,
    fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question (default: the task's).")
    ] = None,
    device: Annotated[str, typer.Option(help="A torch device such as cuda:0.")] = "cpu",
    batch_size: Annotated[int, typer.Option(min=1, help="Questions in one forward pass.")] = 1,
    include_path: Annotated[
        Path | None, typer.Option(help="A folder with more tasks, as YAML files of lm-eval.")
    ] = None,
    python: Annotated[
        Path | None, typer.Option(help="The Python that has lm-eval (default: the one that runs this program).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate an export on tasks of lm-eval. The results are printed, and written to evaluation.json in FOLDER."""
    need_node_extra()
    results = evaluated(
        folder,
        None if python is None else str(python),
        _options(tasks, limit, fewshot, device, batch_size, include_path),
    )
    try:
        write_bytes(folder / RESULTS, (json.dumps(results, indent=2) + "\n").encode())
    finally:  # a full disk is told after what took hours
        _show(results, as_json)


def _show(results: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(results)
        return
    table = Table("task", "metric", "value")
    for task, found in results["tasks"].items():
        for metric, value in found.items():
            table.add_row(task, metric, f"{value:.4f}")
    Console().print(table)


def _options(
    tasks: str, limit: int | None, fewshot: int | None, device: str, batch_size: int, include_path: Path | None
) -> list[str]:
    named = ",".join(str(Path(task).absolute()) if _A_FILE.search(task) else task for task in tasks.split(","))
    options = ["--tasks", named, "--device", device, "--batch_size", str(batch_size)]
    include_path = None if include_path is None else include_path.absolute()
    for name, value in (("--limit", limit), ("--num_fewshot", fewshot), ("--include_path", include_path)):
        if value is not None:
            options += [name, str(value)]
    return options


def evaluated(folder: Path, python: str | None, options: list[str]) -> dict[str, Any]:
    """Run lm-eval; its figures by task and metric, with what the export says of itself. OperatorError, EvaluationError.

    lm-eval stands in an empty folder of its own, and no Python of it imports from a folder in which it stands.
    """
    folder = folder.absolute()
    if not (folder / "config.json").is_file():
        raise OperatorError(f"{folder}: holds no config.json, so neither transformers nor lm-eval can load it")
    if any(mark in str(folder) for mark in _SEPARATORS):
        raise OperatorError(f"{folder}: lm-eval takes no path with a comma or an equals sign; move the folder")
    _refuse_kernels(folder / "config.json")
    _need_lm_eval(python)
    with tempfile.TemporaryDirectory(prefix="swarmentum-lm-eval-") as made:
        out, stands = Path(made) / "results", Path(made) / "empty"
        stands.mkdir()
        model = ("--model", "hf", "--model_args", _model_args(folder), "--output_path", str(out))
        command = python_command("-m", "lm_eval", *model, *options, python=python)
        done = subprocess.run(command, check=False, stdout=sys.stderr, cwd=stands, env=safe_environment())
        written = sorted(out.rglob("results_*.json"))
        if done.returncode or not written:
            raise EvaluationError(f"lm-eval ended with exit code {done.returncode} and no results; it says why above")
        try:
            return _facts(folder) | _figures(json.loads(written[-1].read_bytes()))
        except ValueError as error:  # a full disk cuts it off, and lm-eval goes on
            raise EvaluationError(
                f"{written[-1].name} of lm-eval is cut off ({error}); its table stands above"
            ) from error


def _refuse_kernels(file: Path) -> None:
    """Raises OperatorError for a configuration that would have transformers fetch code."""
    from node.model.spec import foreign_attention

    try:
        config = json.loads(file.read_bytes())
        foreign = foreign_attention(config) if isinstance(config, dict) else "it holds no table"
    except (OSError, ValueError, RecursionError) as error:
        raise OperatorError(f"{file}: cannot be read: {error}; export the model again") from error
    if foreign:
        raise OperatorError(f"{file}: {foreign}; correct it, if you trust the model")


def _need_lm_eval(python: str | None) -> None:
    """Raises OperatorError if the Python cannot be run, or has no lm-eval."""
    named = python or sys.executable
    try:
        found = subprocess.run(python_command("-c", _HERE, python=python), check=False, capture_output=True)
    except OSError as error:
        raise OperatorError(f"--python {named}: cannot be run: {error.strerror}") from error
    if found.returncode:
        raise OperatorError(
            f"{named} has no lm-eval: pip install '.[evaluate]' in the folder of the repository, or install lm-eval[hf] in an "
            "environment of its own (Python 3.11 or newer) and name its Python with --python"
        )


def _model_args(folder: Path) -> str:
    """For lm-eval. A question without a context begins with a newline, if the tokenizer has no token for a beginning."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise OperatorError(f"{folder}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}") from error
    args = f"pretrained={folder},dtype=float32,trust_remote_code=False"
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        newline: int = tokenizer("\n")["input_ids"][0]
        args += f",prefix_token_id={newline}"
    return args


def _facts(folder: Path) -> dict[str, Any]:
    """What an export says of itself; nothing for another model's folder."""
    try:
        facts = json.loads((folder / MARK).read_bytes())
        return {name: facts[name] for name in ("run_id", "steps", "state_digest") if name in facts}
    except (OSError, ValueError, TypeError):
        return {}


def _figures(results: dict[str, Any]) -> dict[str, Any]:
    """Numbers by task and metric, as lm-eval names them, without its other facts."""
    tasks = {
        task: {
            metric.removesuffix(",none"): value
            for metric, value in found.items()
            if "," in metric and isinstance(value, int | float)
        }
        for task, found in results["results"].items()
    }
    return {"tasks": tasks, "lm_eval": results.get("lm_eval_version")}
