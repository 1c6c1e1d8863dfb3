"""Commands of earlier versions. Each names what to type instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import typer

from protos.errors import OperatorError

GONE: Final[dict[str, Any]] = {
    "hidden": True,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
"""For typer: no help, and any arguments."""


def push(context: typer.Context) -> None:
    """The hub's own command also goes on with an upload that broke off."""
    from node.commands.hugging_face import upload_line

    named = [word for word in context.args if not word.startswith("-")]
    folder, repo_id = (*named, *("FOLDER", "OWNER/NAME")[len(named) :])[:2]
    raise OperatorError(
        f"`swarmentum push` is gone; the hub's own command uploads an export: `{upload_line(Path(folder), repo_id)}`"
    )


def owner() -> None:
    """Owners' keys are gone; the name stayed."""
    raise OperatorError(
        "`swarmentum owner` is gone, and with it owners' keys; `swarmentum set owner NAME` shows a name, as a claim"
    )
