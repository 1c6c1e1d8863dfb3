"""The tree keeps the rules of docs/style.md that can be counted: lengths, links, citations."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
LONG_FILES: dict[str, str] = {}
"""Files of ours that may be longer, each with the reason."""
LONG_FUNCTIONS: dict[str, str] = {}
GENERATED = ("_pb2.py", "_pb2_grpc.py")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CITED_FILE = re.compile(
    r"(?<![\w./-])(docs/[\w/.-]+\.(?:md|py|png|jsonl|toml)|(?:node|coordinator|protos|deploy)/[\w/.-]+\.(?:py|proto|nft|txt))"
)
CITED_DECISION = re.compile(r"\bADRs? (\d+)(?:(?:,| and) (\d+))*")
DECISIONS_MAX = 32
"""A new decision goes into the file of its subject. docs/adr/README.md says where the decisions of earlier numbers are."""


@cache
def tracked(*endings: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [ROOT / name for name in listed.splitlines() if name.endswith(endings) and not name.endswith(GENERATED)]
    return [path for path in found if path.is_file()]


def ours() -> list[Path]:
    return [path for path in tracked(".py") if path.relative_to(ROOT).parts[0] in ("node", "coordinator", "protos")]


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_files_fit_on_a_few_screens() -> None:
    long = {name(path): len(path.read_text().splitlines()) for path in ours()}
    long = {path: lines for path, lines in long.items() if lines > FILE_LINES_MAX}
    assert long.keys() == LONG_FILES.keys(), long


def test_functions_fit_on_a_screen() -> None:
    found = {}
    for path in ours():
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    found[f"{name(path)}:{node.name}"] = lines
    assert found.keys() == LONG_FUNCTIONS.keys(), found


def test_every_module_says_what_it_is() -> None:
    silent = [name(path) for path in ours() if syntax(path).body and not ast.get_docstring(syntax(path))]
    assert not silent, silent


@pytest.mark.parametrize("page", tracked(".md"), ids=name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    broken = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = page if not path else (page.parent / path).resolve()
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert not broken, broken


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def decisions_made() -> dict[int, str]:
    return {int(path.name[:4]): path.name for path in (ROOT / "docs" / "adr").glob("[0-9]*.md")}


def test_decisions_are_few_and_earlier_numbers_lead_to_them() -> None:
    decisions = decisions_made()
    assert len(decisions) <= DECISIONS_MAX
    rows = re.findall(r"^\| ([\d, ]+) \| \[(\d+)\]\((.*)\) \|$", (ROOT / "docs/adr/README.md").read_text(), flags=re.M)
    earlier = [int(old) for olds, _, _ in rows for old in olds.split(",")]
    assert earlier
    assert not decisions.keys() & set(earlier)
    assert not [file for _, new, file in rows if decisions.get(int(new)) != file]


def test_what_is_cited_exists() -> None:
    """Files in docs/ and decisions, in the code and in the pages."""
    decisions = decisions_made().keys()
    lost = []
    for path in tracked(".py", ".md", ".proto", ".toml"):
        if path == Path(__file__):
            continue
        text = path.read_text()
        lost += [f"{name(path)}: {cited}" for cited in CITED_FILE.findall(text) if not (ROOT / cited).exists()]
        for match in CITED_DECISION.finditer(text):
            numbers = {int(number) for number in re.findall(r"\d+", match.group())}
            lost += [f"{name(path)}: ADR {number}" for number in sorted(numbers - decisions)]
        if "OVERLAY.md" in text:
            lost.append(f"{name(path)}: OVERLAY.md, a page of the founders that is not in the repository")
    assert not lost, "\n".join(lost)


def test_every_decision_is_named_where_it_was_built() -> None:
    """A module that a decision shaped names it, so that a reader finds the reason from the code."""
    shaped = [
        *ours(),
        *tracked(".proto", "pyproject.toml"),
        *(path for path in tracked(".py") if "tests/sim/" in name(path)),
    ]
    said = " ".join(path.read_text() for path in shaped)
    cited = {int(number) for match in CITED_DECISION.finditer(said) for number in re.findall(r"\d+", match.group())}
    decisions = decisions_made()
    assert not decisions.keys() - cited, [decisions[number] for number in sorted(decisions.keys() - cited)]


RUN_BY = {
    r"swarmentum (mirror|verify https)": "tests/unit/archive/test_archive_copy.py",
    r"make demo|swarmentum (demo|verify|ledger|status)\b": "tests/system/test_demo.py",
    r"swarmentum (export-log|ledger \./)": "tests/system/test_log_file.py",
    r"make (test|check|sim|docs)": ".ci/run",
    r"swarmentum-coordinator serve --trace|swarmentum join --set track=otlp": "tests/system/test_trace.py",
    r"swarmentum-coordinator serve": "tests/system/test_coordinator_process.py",
    r"swarmentum-coordinator run (create|example)": "tests/unit/coordinator/test_planning.py",
    r"swarmentum-coordinator run check": "tests/unit/coordinator/test_checking.py",
    r"swarmentum-coordinator run fork": "tests/system/test_fork.py",
    r"swarmentum-coordinator order|swarmentum-coordinator run finish .* --key": "tests/unit/coordinator/test_orders.py",
    r"swarmentum-coordinator run (pause|resume|finish)": "tests/system/test_run_life.py",
    r"swarmentum start-from": "tests/system/test_start_from.py",
    r"swarmentum-coordinator run (change|show)": "tests/unit/coordinator/test_changes.py",
    r"swarmentum-coordinator run decay": "tests/unit/coordinator/test_run_life.py",
    r"swarmentum-coordinator run (archive|delete|list --all)": "tests/unit/coordinator/test_run_life.py",
    r"swarmentum-coordinator run list": "tests/system/test_operator_page.py",
    r"swarmentum-coordinator snapshot": "tests/attack/test_open_run.py",
    r"swarmentum-coordinator invite": "tests/system/test_invites.py",
    r"swarmentum-coordinator (backup|restore)": "tests/unit/coordinator/test_backup.py",
    r"swarmentum-coordinator web login": "tests/system/test_operator_web.py",
    r"swarmentum-coordinator health": "tests/unit/coordinator/test_checking.py",
    r"swarmentum runs|swarmentum-coordinator run list --public|jq ": "tests/unit/coordinator/test_public_runs.py",
    r"swarmentum-coordinator peer": "tests/unit/coordinator/test_peers.py",
    r"swarmentum join": "tests/system/test_life.py",
    r"swarmentum (me|pause|resume|set|finish|leave)\b": "tests/system/test_owner.py",
    r"swarmentum (web|export-page)\b": "tests/system/test_web.py",
    r"swarmentum export swarmentum://\S+ (--push-to-hub|\./models --every)": "tests/system/test_export_series.py",
    r"swarmentum evaluate": "tests/system/test_evaluate.py",
    r"hf upload": "tests/system/test_hub.py",
    r"swarmentum audit-folder": "tests/system/test_audit_folder.py",
    r"swarmentum export": "tests/system/test_export.py",
    r"swarmentum data build": "tests/unit/data/test_build.py",
    r"swarmentum service": "tests/unit/node/test_service.py",
    r"swarmentum doctor": "tests/system/test_doctor.py",
    r"swarmentum anchor": "tests/system/test_anchor.py",
    r"swarmentum relay|export https_proxy=": "tests/system/test_port443.py",
    r"torchrun .* swarmentum join": "tests/system/test_several_devices.py",
    r"torchrun .* docs/examples/": "tests/unit/optim/test_torch_optimizer.py",
    r"python -m tests\.bench": "tests/bench/test_convergence.py",
    r"python -m tests\.(sim|attack)": ".ci/run",
    r"prometheus --config.file": "tests/interop/test_prometheus.py",
    r"printf .*docker run": "tests/interop/test_deployment.py",
    r"pip install": "tests/system/test_wheel.py",
}
"""Commands of `console` blocks, and the test that runs them."""
NOT_RUN = {
    r"apt-get|python3 -m venv|/opt/|cp |mkdir|printf|systemctl|export |install |certbot": "an operator's server; "
    "tests/system/test_operator_page.py runs what the units start, tests/interop/test_deployment.py checks them",
    r"createuser|scp ": "needs machines of one's own; tests/system/test_failover.py does the same with a local PostgreSQL",
}


def test_every_command_of_the_docs_is_run_by_a_test_or_says_why_not() -> None:
    unknown = []
    for page in tracked(".md"):
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), flags=re.S | re.M):
            lines = [line for line in block.splitlines() if line.strip() and not line.startswith(("#", " "))]
            unknown += [
                f"{name(page)}: {line}"
                for line in lines
                if not any(re.match(pattern, line) for pattern in (*RUN_BY, *NOT_RUN))
            ]
    assert not unknown, "\n".join(unknown)
    assert not [where for where in RUN_BY.values() if not (ROOT / where).exists()]


def test_the_skill_page_says_in_yaml_what_it_is_for() -> None:
    """Programs that read skills look at the front matter alone."""
    _, front, text = (ROOT / "docs" / "SKILL.md").read_text(encoding="utf-8").split("---\n", 2)
    said = yaml.safe_load(front)
    assert said.keys() == {"name", "description"}
    assert all(isinstance(value, str) and value for value in said.values())
    assert text.strip()
