"""The model card of an export: what the model is, how it was trained and by whom, and how to check that. Text only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from protos.address import is_web
from protos.disk import write_bytes
from protos.mistakes import NO_LICENCE, OWN_TEXT
from protos.run_config import RunConfig
from protos.text import printable

CARD: Final = "README.md"
MARK: Final = "swarmentum.json"
"""Distinguishes an export from a folder of other work, and holds the card's facts."""
_WEIGHTS: Final = re.compile(r"model(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")
_LATER: Final = "evaluation.json"
_WRITTEN: Final = re.compile(r".*\.(?:json|jinja|model)|README\.md|(?:merges|vocab)\.txt")
"""Of exports whose mark does not name their files."""
MARK_BYTES_MAX: Final = 1 << 20
IDENTITIES_SHOWN_MAX: Final = 20
NAME_CHARACTERS_MAX: Final = 64
_LEDGER: Final = "\n## Who trained it\n"
SEVERAL: Final = "Several peers"
_TRAINED: Final = re.compile(r"^(?:Several peers|\d+ peers?) trained this model", re.M)


def facts_of(config: RunConfig, run_id: bytes, **state: object) -> dict[str, object]:
    """The facts of a card, in a reader's order. `state`: of the exported state."""
    return {
        "run": config.name,
        "run_id": run_id.hex(),
        **state,
        "data": ", ".join(_data(source) for source, _, _ in config.data.sources()),
        "optimizer": json.dumps(config.optimizer.model_dump()),
    }


def mark_text(facts: Mapping[str, object], files: Iterable[str]) -> str:
    """The text of the mark of an export of these files."""
    return json.dumps({**facts, "files": sorted({*files, MARK})}, indent=2, default=str) + "\n"


def _mark(folder: Path) -> Mapping[str, Any]:
    try:
        with (folder / MARK).open("rb") as file:
            return dict(json.loads(file.read(MARK_BYTES_MAX)))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def run_of(folder: Path) -> str:
    """The run that an export is of, in hexadecimal digits; empty if nothing there says it."""
    return str(_mark(folder).get("run_id", ""))


def files_of(folder: Path) -> list[str]:
    """The names of an export's own files, and of what was said about its weights; the others are somebody's."""
    named = _mark(folder).get("files")
    here = [file.name for file in folder.iterdir() if file.is_file()]
    return sorted(
        name
        for name in here
        if _WEIGHTS.fullmatch(name)
        or name == _LATER
        or (name in named if isinstance(named, list) else _WRITTEN.fullmatch(name))
    )


def _data(source: str) -> str:
    """A source without the folders of the machine that it was on."""
    if source == "stdlib":
        return "the Python standard library"
    if source == OWN_TEXT:
        return "each peer's own text"
    return source if is_web(source) else f"{Path(source).name} (each peer had a copy)"


def card_text(card: Mapping[str, object], *, huggingface: bool = True, licence: str = NO_LICENCE) -> str:
    """The model card: a description, the code to load the model, the facts as a table, and how to verify them."""
    how = (
        "model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)"
        if huggingface
        else "# model: your own module; the file holds tied tensors once\n"
        'model.load_state_dict(safetensors.torch.load_file(f"{path}/model.safetensors"), strict=False)'
    )
    needs = "AutoModelForCausalLM, AutoTokenizer" if huggingface else "AutoTokenizer"
    facts, run = _rows(card), _cell(card.get("run_id", "ID"))
    return f"""---
license: {licence}
tags:
- swarmentum
{"library_name: transformers" if huggingface else "library_name: safetensors"}
pipeline_tag: text-generation
---

# A model trained by a swarm

{SEVERAL} trained this model together over ordinary internet with Swarmentum. In each step, every peer sent a few small
votes for each chunk of 4096 parameters instead of its gradient ([DeMo](https://arxiv.org/abs/2411.19870) with group
votes). All peers applied the same update, bit for bit.

```python
from transformers import {needs}
{"" if huggingface else "import safetensors.torch" + chr(10)}
{how}
tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
```

## How it was trained

| fact | value |
|---|---|
{facts}

## How to verify it

The coordinator's signed log of the run names, for each step, the votes that count and the digest of the state. An archive
of a peer (`swarmentum join --set archive=true`) holds this log and all votes.
`swarmentum verify ARCHIVE --model FOLDER --run {run}` replays the run from the archive alone, and
compares these weights with the replayed ones, bit for bit. Take the run's id (or its invite link) from the run's operator: this
card may be forged. `swarmentum ledger` shows from the same log who contributed.
"""


def add_ledger(folder: Path, ledger: Mapping[str, Any], losses: Mapping[str, Any] | None = None) -> None:
    """Put a ledger (`Ledger.values`) and losses into the card of an export, in place of earlier ones. Raises DiskError."""
    path = folder / CARD
    text = path.read_text(encoding="utf-8").partition(_LEDGER)[0]
    count = len(ledger["identities"])
    text = _TRAINED.sub(f"{count} {'peer' if count == 1 else 'peers'} trained this model", text, count=1)
    shown = f"| fact | value |\n|---|---|\n{_rows(losses)}\n\n" if losses else ""
    write_bytes(path, (text + _LEDGER + "\n" + shown + ledger_text(ledger)).encode())


def _rows(facts: Mapping[str, object]) -> str:
    return "\n".join(f"| {name} | {_cell(value)} |" for name, value in facts.items())


def ledger_text(ledger: Mapping[str, Any]) -> str:
    """The identities with the most votes, as a table."""
    lines: Sequence[Mapping[str, Any]] = ledger["identities"]
    rows = "\n".join(
        f"| `{line['id']}` | {_name(str(line['owner']))} | {line['votes_accepted']} | "
        f"{line['samples']} | {line['tokens']} |"
        for line in lines[:IDENTITIES_SHOWN_MAX]
    )
    more = len(lines) - IDENTITIES_SHOWN_MAX
    return (
        f"Steps {ledger['from_step']} to {ledger['to_step']} of the run's log: {ledger['votes_accepted']} accepted votes, "
        f"{ledger['tokens']} tokens, {len(lines)} identities, {len(ledger['exclusions'])} exclusions. "
        "The log proves the votes. Owners are names that peers gave themselves.\n\n"
        f"| identity | owner | votes | samples | tokens |\n|---|---|---|---|---|\n{rows}\n"
        + (f"\n{more} more identities are in the log.\n" if more > 0 else "")
    )


def _name(owner: str) -> str:
    """A name that a stranger gave itself, as code: it is no link and no picture on a page."""
    shown = printable(owner, NAME_CHARACTERS_MAX).replace("`", "'")
    return f"`{_cell(shown)}`" if shown else ""


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
