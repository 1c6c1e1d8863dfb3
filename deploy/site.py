"""Pages of the docs site that are made from the code: settings, commands, metrics, exit codes, decisions. A hook of mkdocs.

The start page is the README. What is made here cannot lag behind the code, since it is in no file.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from coordinator.__main__ import app as coordinator_app
from coordinator.serving.metrics import Metrics
from node.__main__ import app as node_app
from node.config import peer_settings
from protos import errors
from protos.example import example, settings_of
from protos.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[1]
PYTHON = (
    "swarmentum",
    "node.optim.torch_optimizer.DeMoOptimizer",
    "protos.run_config",
    "protos.log",
    "protos.tick",
    "protos.invite",
    "protos.errors",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs: adds the pages."""
    pages = {
        "index.md": start(),
        "decisions.md": decisions(),
        "reference/run.md": run_toml(),
        "reference/peer.md": swarmentum_toml(),
        "reference/commands.md": "\n".join(commands()),
        "reference/metrics.md": metrics(),
        "reference/exit-codes.md": exit_codes(),
        "reference/python.md": "# Python\n\n" + "\n\n".join(f"::: {name}" for name in PYTHON),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def start() -> str:
    """The README, with its links as they are from inside docs/."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\(docs/adr\)", "](decisions.md)", text)
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(
        r"\]\(((?!https?:)[A-Z]+(?:\.md)?)\)", r"](https://github.com/swarmentum/swarmentum/blob/main/\1)", text
    )


def decisions() -> str:
    """The list of ADRs."""
    rows = []
    for path in sorted((ROOT / "docs" / "adr").glob("[0-9]*.md")):
        title = path.read_text().splitlines()[0].removeprefix("# ")
        rows.append(f"- [{title}](adr/{path.name})")
    return (
        "# Decisions\n\nWhy things are as they are. Each decision is named in the modules that it shaped.\n\n"
        + "\n".join(rows)
    )


def run_toml() -> str:
    """Every key of run.toml."""
    lines = [
        "# run.toml",
        "",
        "Every key is optional. `swarmentum-coordinator run example --all` prints this file:",
        "",
    ]
    lines += ["```toml", example(RunConfig).rstrip(), "```", "", "## Bounds", "", "| key | allowed |", "|---|---|"]
    for it in settings_of(RunConfig):
        if it.allowed:
            lines.append(f"| `{f'{it.table}.{it.key}'.lstrip('.')}` | {it.allowed} |")
    return "\n".join(lines)


def swarmentum_toml() -> str:
    """Every setting of a peer."""
    rows = [
        f"| `{it.key}` | {f'`{it.default}`' if it.default else ''} | {_words(it.allowed)} | {_words(it.text)} |"
        for it in peer_settings()
    ]
    return "\n".join(
        [
            "# swarmentum.toml",
            "",
            "A setting is a line of swarmentum.toml, a variable `SWARMENTUM_<KEY>`, or `join --set KEY=VALUE`. "
            "`swarmentum settings` prints them as a file.",
            "",
            "| setting | default | values | what it does |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def commands() -> Iterator[str]:
    """Every command with its options, from the programs themselves."""
    yield "# Commands\n"
    for name, app in (("swarmentum", node_app), ("swarmentum-coordinator", coordinator_app)):
        yield from _command(name, typer.main.get_command(app))


def _command(name: str, command: Any) -> Iterator[str]:
    if command.hidden:
        return
    yield f"## {name}\n\n{_words(command.help)}\n"
    rows = [row for parameter in command.params if not getattr(parameter, "hidden", False) for row in _row(parameter)]
    if rows:
        yield "\n".join(["| option | what it does |", "|---|---|", *rows, ""])
    for inner in getattr(command, "commands", {}).values():
        yield from _command(f"{name} {inner.name}", inner)


def _row(parameter: Any) -> Iterator[str]:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name or ""
        names = f"`{name.upper()}`"
    if "--help" not in names:
        yield f"| {names} | {_words(getattr(parameter, 'help', ''))} |"


def _words(text: str | None) -> str:
    """On one line, without the markup of terminals."""
    plain = re.sub(r"\[/?[a-z]*\]", "", " ".join(inspect.cleandoc(text or "").split()))
    return plain.replace("|", "\\|").replace("<", "&lt;")


def metrics() -> str:
    """The coordinator's metrics."""
    rows = [
        "# Metrics",
        "",
        "`serve --metrics-listen HOST:PORT` serves them for Prometheus.",
        "",
        "| metric | kind | labels | what it is |",
    ]
    rows.append("|---|---|---|---|")
    registry = Metrics().registry
    labels = {name: getattr(it, "_labelnames", ()) for name, it in registry._names_to_collectors.items()}
    for metric in registry.collect():
        named = ", ".join(labels.get(metric.name, ())) or "run" * metric.name.startswith("swarmentum_")
        rows.append(f"| `{metric.name}` | {metric.type} | {named} | {metric.documentation} |")
    return "\n".join(rows)


def exit_codes() -> str:
    """The classes of errors with their codes."""
    rows = [
        "# Exit codes",
        "",
        "| code | when |",
        "|---|---|",
        "| 0 | done |",
        "| 1 | an error of the program itself |",
    ]
    found = {}
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        code = kind.__dict__.get("exit_code")
        if code is not None:
            found.setdefault(code, " ".join((kind.__doc__ or "").split()))
    rows += [f"| {code} | {text} |" for code, text in sorted(found.items()) if code > 1]
    return "\n".join(rows)
