"""A folder from somebody runs no code: each Python child leaves the working folder out, and no model brings code of its own."""

import ast
import re

import pytest

from tests.house.test_tree import ROOT, name, ours, syntax, tracked

MAKER = ROOT / "protos" / "process.py"
SPAWNERS = ("multiprocessing", "concurrent.futures.process", "runpy")
"""Standard modules that start a Python, or run a module, without `python_command`."""
LOADERS = ("from_pretrained", "from_config", "pipeline")
LOADED = re.compile(r"\b(?:from_pretrained|pipeline)\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
CHILDREN = re.compile(
    r"(?:python3?|sys\.executable\S*)\s+(?!-P\b)(?:-\S+\s+)*-m (?:node|coordinator|lm_eval)\b"
    r"|torchrun[^\n]* -m (?:node|coordinator)\b"
)
SAFE = "trust_remote_code"


def parsed(*words: str) -> list[tuple[str, ast.Module]]:
    """Files of which one of these words is a part."""
    files = [*ours(), *(path for path in tracked(".py") if name(path).startswith(("deploy/", "docs/")))]
    return [
        (name(path), syntax(path))
        for path in files
        if path != MAKER and any(word in path.read_text() for word in words)
    ]


def is_isolated(words: list[ast.expr], at: int) -> bool:
    """Whether `-I`, which implies `-P`, follows the interpreter in a command line."""
    following = words[at + 1] if at + 1 < len(words) else None
    return isinstance(following, ast.Constant) and following.value == "-I"


def unsafe_children(tree: ast.Module) -> list[int]:
    """Lines that name the interpreter, or that import a module which starts one, beside `python_command`."""
    isolated = {
        id(each)
        for node in ast.walk(tree)
        if isinstance(node, ast.List | ast.Tuple)
        for at, each in enumerate(node.elts)
        if is_isolated(node.elts, at)
    }
    # an error that names the interpreter starts nothing
    named = {id(part) for node in ast.walk(tree) if isinstance(node, ast.BoolOp) for part in node.values}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "executable" and ast.unparse(node) == "sys.executable":
            lines += [] if id(node) in isolated | named else [node.lineno]
        elif isinstance(node, ast.Import):
            lines += [node.lineno for each in node.names if each.name.startswith(SPAWNERS)]
        elif isinstance(node, ast.ImportFrom):
            lines += [node.lineno] if (node.module or "").startswith(SPAWNERS) else []
    return lines


def unsafe_loads(tree: ast.Module) -> list[int]:
    """Lines that load a model, a tokenizer or a configuration and do not refuse its code. Also in a snippet for people."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            refuses = any(
                each.arg == SAFE and isinstance(each.value, ast.Constant) and each.value.value is False
                for each in node.keywords
            )
            lines += [node.lineno] if called in LOADERS and not refuses else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            lines += [node.lineno for inner in LOADED.findall(node.value) if f"{SAFE}=False" not in inner]
    return lines


def test_every_python_child_leaves_the_working_folder_out() -> None:
    found = {path: lines for path, tree in parsed("executable", *SPAWNERS) if (lines := unsafe_children(tree))}
    assert not found, f"use protos.process.python_command: {found}"


def test_no_model_and_no_tokenizer_brings_code() -> None:
    found = {path: lines for path, tree in parsed(*LOADERS) if (lines := unsafe_loads(tree))}
    assert not found, f"say trust_remote_code=False: {found}"


def test_what_people_copy_is_safe_too() -> None:
    """Pages, units and images: no command that imports from the working folder, and no load that runs a model's code."""
    unsafe = []
    for path in tracked(".md", ".service", ".plist", "Dockerfile", ".yml", ".yaml", ".sh", "Makefile"):
        if name(path) == "CHANGELOG.md":
            continue
        text = path.read_text()
        unsafe += [f"{name(path)}: {found.group()}" for found in CHILDREN.finditer(text)]
        unsafe += [
            f"{name(path)}: {found.group()}" for found in LOADED.finditer(text) if f"{SAFE}=False" not in found[1]
        ]
    assert not unsafe, "\n".join(unsafe)


@pytest.mark.parametrize(
    "line",
    [
        'import subprocess, sys; subprocess.run([sys.executable, "-m", "node"])',
        'import sys; command = (sys.executable, "-c", "pass")',
        "from multiprocessing import Process",
        "import concurrent.futures.process",
    ],
)
def test_the_rule_sees_a_child(line: str) -> None:
    assert unsafe_children(ast.parse(line)) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "AutoTokenizer.from_pretrained(folder)",
        "AutoModel.from_pretrained(folder, trust_remote_code=True)",
        "AutoModel.from_config(config)",
        "pipeline('text-generation', model=folder)",
        "text = 'model = AutoModelForCausalLM.from_pretrained(path)'",
    ],
)
def test_the_rule_sees_a_load(line: str) -> None:
    assert unsafe_loads(ast.parse(line)) == [1]
