"""Rules of the house that matter enough to be tests."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.house import generate_protos
from tests.house.test_tree import name, ours, syntax

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protos", "coordinator", "node")
SECONDS_MAX = 600

# Third parties first (what they do at import is theirs), then all of ours: what changes then is our doing.
_IMPORT_ALL = """
import importlib, json, os, pkgutil, sys, threading
packages, theirs = sys.argv[1].split(","), sys.argv[2].split(",")
for name in theirs:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
import logging, random, signal
def around():
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    return dict(os.environ), set(threading.enumerate()), logging.root.handlers[:], random.getstate(), handlers
for package in packages:
    before, names = around(), [package]
    top = importlib.import_module(package)
    for module in pkgutil.walk_packages(getattr(top, "__path__", ()), package + "."):
        if not any(module.name.startswith(other) for other in sys.argv[3:]):
            names.append(module.name)
            importlib.import_module(module.name)
    for what, one, other in zip(("environment", "threads", "log handlers", "random state", "signals"), before, around()):
        assert one == other, f"importing {package} changes the {what}: {one} -> {other}"
    print(json.dumps({"imported": len(names), "torch": "torch" in sys.modules, "hivemind": "hivemind" in sys.modules}))
"""


def _import_all(packages: str, theirs: str = "", without: tuple[str, ...] = ()) -> list[dict[str, int]]:
    """Facts of each of these packages or modules, which one process imports in their order."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, packages, theirs, *without],
        cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_generated_code_is_what_the_proto_files_say() -> None:
    assert generate_protos.drift() == []


def test_who_may_import_whom() -> None:
    script = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [str(script), "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "0 broken" in done.stdout, done.stdout[done.stdout.find("Contracts") :] + done.stderr


def test_importing_what_needs_no_torch_does_nothing_and_loads_neither_torch_nor_hivemind() -> None:
    """The contract, the coordinator, the page, and of the peer's wire the modules beside hivemind, which loads torch itself."""
    wire = ("node.swarm.inbox", "node.swarm.outbox", "node.swarm.facts", "node.link.client", "node.blobs.payloads")
    theirs = "grpc,grpc_tools,sqlalchemy,starlette,uvicorn,typer,rich,structlog,prometheus_client,pydantic"
    found = _import_all(",".join(("protos", "coordinator", "node.web", *wire)), theirs)
    assert [facts["imported"] >= least for facts, least in zip(found, (10, 10, 8), strict=False)] == [True] * 3
    assert len(found) == 3 + len(wire)
    assert not any(facts["torch"] or facts["hivemind"] for facts in found), found


def test_importing_the_peers_side_does_nothing() -> None:
    theirs = (
        "grpc,starlette,uvicorn,torch,transformers,safetensors.torch,hivemind,structlog,typer,rich,matplotlib.pyplot"
    )
    theirs += ",plotext"
    # triton comes with a CUDA build of torch; .ci/run installs it
    parts = ("triton", "triton_kernels", "triton_wide")
    no_triton = () if find_spec("triton") else tuple(f"node.optim.backends.{part}" for part in parts)
    [facts] = _import_all("node", theirs, without=("node.watch", *no_triton))
    assert facts["imported"] >= 20


# find_spec: libp2p cannot be imported in this process, where other tests have imported hivemind
@pytest.mark.skipif(find_spec("libp2p") is None, reason="needs the extra swarmentum[watch]")
def test_watching_needs_neither_torch_nor_hivemind() -> None:
    [facts] = _import_all("node.watch", "libp2p,trio,grpc,structlog,typer,rich")
    assert not facts["torch"]
    assert not facts["hivemind"]


def test_every_folder_of_tests_is_a_package_and_none_is_named_like_ours() -> None:
    for folder in (ROOT / "tests").rglob("*"):
        if folder.is_dir() and any(folder.glob("*.py")):
            assert (folder / "__init__.py").exists(), f"{folder} has no __init__.py"
    assert not {path.name for path in (ROOT / "tests").iterdir()} & set(PACKAGES)


def test_nothing_is_left_to_do_in_the_tree() -> None:
    marks = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = (".py", ".proto", ".md", ".toml", ".sh", ".yml", ".yaml", "Makefile")
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in listed.splitlines()
        if name.endswith(wanted) and (ROOT / name).is_file()
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("module", ["blobs", "fetcher"])
def test_what_is_cancelled_in_a_race_does_not_swallow_it(module: str) -> None:
    """`asyncio.wait_for` of Python 3.11 gives the result when the cancellation comes with it: a loser went on for ever."""
    assert "asyncio.wait_for(" not in (ROOT / "node" / "blobs" / f"{module}.py").read_text()


def doublings(module: ast.Module) -> list[int]:
    """Lines with a wait that is doubled by hand: `min(2 * delay, ...)`, `min(X_SECONDS * 2**n, ...)`, `wait *= 2`."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult | ast.LShift):
            inside = [node]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            inside = [part for part in ast.walk(node) if isinstance(part, ast.BinOp) and _doubles(part)]
        else:
            continue
        named = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        named |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
        if inside and any(re.search(r"seconds|delay|wait|patience|backoff|pause|again", name, re.I) for name in named):
            found.add(node.lineno)
    return sorted(found)


def _doubles(part: ast.BinOp) -> bool:
    if isinstance(part.op, ast.Pow | ast.LShift):
        return True
    sides = (part.left, part.right)
    return isinstance(part.op, ast.Mult) and any(isinstance(it, ast.Constant) and it.value == 2 for it in sides)


def test_waits_between_tries_have_one_place_and_jitter() -> None:
    found = {f"{name(path)}:{line}" for path in ours() if path.name != "clocks.py" for line in doublings(syntax(path))}
    assert not found, f"take protos.clocks.Waits: {sorted(found)}"


@pytest.mark.parametrize(
    "line",
    [
        "delay = min(delay * 2, RETRY_SECONDS_MAX)",
        "delay = min(2 * delay, waits.RETRY_SECONDS_MAX)",
        "self._delay = 0.0 if steady else min(max(2 * self._delay, FIRST), RESTART_SECONDS_MAX)",
        "wait = min(LACKING_SECONDS * 2**self._tries, ASK_AGAIN_SECONDS)",
        "delay *= 2",
        "wait <<= 1",
    ],
)
def test_the_rule_sees_a_wait_that_is_doubled_by_hand(line: str) -> None:
    assert doublings(ast.parse(line)) == [1]
