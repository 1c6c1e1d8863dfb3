"""The event of a log line is a constant: people and programs look for it. What differs from line to line is a value."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
CHOSEN_ELSEWHERE = {
    "node/swarm/membership.py: event",
    "node/training/loop.py: event.words",
    "coordinator/serving/event_loop.py: effect.reason",
    "coordinator/serving/page.py: self._ready",
    "coordinator/serving/throttled_log.py: self.why",
}
"""Names of one of several constants, and notices of the coordinator, whose words all its peers get."""


def changing(path: Path, text: str) -> Iterator[str]:
    for call in ast.walk(ast.parse(text)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
            continue
        if call.func.attr not in METHODS or "log" not in ast.unparse(call.func.value).lower():
            continue
        event = call.args[0]
        branches = (event.body, event.orelse) if isinstance(event, ast.IfExp) else (event,)
        for it in branches:
            constant = isinstance(it, ast.Constant) or ast.unparse(it).rsplit(".", 1)[-1].isupper()
            if not constant and f"{path}: {ast.unparse(it)}" not in CHOSEN_ELSEWHERE:
                yield f"{path}:{it.lineno}: {ast.unparse(it)}"


def test_events_are_constants() -> None:
    files = [path for folder in ("node", "coordinator", "protos") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [line for path in files for line in changing(path.relative_to(ROOT), path.read_text())]
    assert not found, "\n".join(found)


def test_the_search_finds_what_changes() -> None:
    text = 'log.info(f"step {n}")\nself._log.info(WORDS, step=n)\nlog.error("a" if b else c)\nmath.log.info(text)\n'
    assert [line.split(": ")[1] for line in changing(Path("x.py"), text)] == ["f'step {n}'", "c", "text"]
