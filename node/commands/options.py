"""What several commands of `swarmentum` share: options, the exit codes that each prints in its help, and the person at the
terminal.

The person gives an invite link that is not on the command line (every user of the machine can read that, `ps`, its ticket
too), sees a run, and is asked once. Refuses to ask if nobody can answer.

Options of commands, made from the peer's settings: a setting's field says its name, values, default and help, once.

A command names the settings that are options of it; `--set KEY=VALUE` takes every other one. Refuses an option that is a
setting but no option of the command, with the `--set` that a person can type instead. Reads no file and no environment.

Also the commands of earlier versions: each names what to type instead.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args, get_origin

import typer
from typer.core import TyperCommand

from node.config import LISTEN, PeerSettings, load_settings, peer_settings
from node.earlier_settings import EARLIER, GIVEN, GONE, OPTIONS, WORDS, of_today, shown
from protos.errors import OperatorError, StoppedError
from protos.invite import PASTED_CHARACTERS_MAX
from protos.toml_file import OFF, WRITTEN, listed

if TYPE_CHECKING:
    from node.admission.consent import MachineRequest

FIRST, LIMITS, NETWORK, STORAGE, OUTPUT, MORE = (
    "What you need first", "Limits", "Network", "Data and results", "Output", "All other settings",
)  # fmt: skip
"""Panels of a command's help, in the order in which a newcomer needs them."""
PANELS: Final[Mapping[str, Sequence[str]]] = {
    FIRST: ("home", "device", "owner", "yes", "allow_data", "allow_code"),
    LIMITS: ("hours", "nice", "threads", "upload_mbit", "disk_gb"),
    NETWORK: ("listen",),
    STORAGE: ("data",),
}
"""The settings that a person types in a first week. All commands share them; the others have `--set`."""
PANEL_OF: Final = {key: panel for panel, keys in PANELS.items() for key in keys}
FLAGS: Final[Mapping[str, str]] = {
    "yes": "Agree to the run's requests without a question.",
    "allow_data": "Allow the run to use files of this machine that it names: only for operators you trust.",
    "allow_code": "Allow the run to call Python code of this machine, installed or in the working folder: only for operators "
    "you trust.",
    "allow_left_out": "Go on although more than 1 % of the text is left out.",
}
"""Options that are a word of the setting `allow`."""
SHORT: Final = {"yes": ("-y",)}
RENAMED: Final = {"relay": "relays"}
"""Options of earlier versions whose name was not that of their setting."""
SET: Final = "--set"
NEAR: Final = 0.6
SHAPES: Final[Mapping[Any, str]] = {int: "number", float: "number", Path: "path"}
Settings = Callable[..., PeerSettings]
"""What a command calls for its settings; flags of its own may be added."""


class SettingCommand(TyperCommand):
    """A command that knows the options of other commands and of earlier versions: they are settings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """OperatorError for an option that is a setting here."""
        mine = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for number, word in enumerate(args if SET in mine else ()):
            if word == "--":
                break
            name, has_value, value = word.partition("=")
            key = _key_of(name)
            if key is not None and name not in mine:
                following = args[number + 1] if number + 1 < len(args) else ""
                raise OperatorError(_instead(name, key, value if has_value else following))
        return super().parse_args(ctx, args)


def with_settings(*keys: str, **defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command options for these settings, and `--set`. Its argument `settings` then loads them, when it is called.

    `defaults`: values of this command's own, which count unless an option says otherwise.
    """

    def made(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True).parameters

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            options = {key: values.pop(key) for key in keys}
            given = given_settings(options, values.pop("set_") or [])
            return command(settings=functools.partial(load_settings, **{**defaults, **given}), **values)

        parameters = [it.replace(kind=it.KEYWORD_ONLY) for it in own.values() if it.name != "settings"]
        parameters += [_parameter(key, option(key, defaults.get(key))) for key in keys]
        parameters += [_parameter("set_", SET_OPTION)]
        parameters.sort(key=_place)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {it.name: it.annotation for it in parameters}
        return run

    return made


def given_settings(options: Mapping[str, Any], pairs: Sequence[str]) -> dict[str, Any]:
    """The settings of a command line: its options, and each KEY=VALUE of `--set`. OperatorError for a pair that is none."""
    given = {key: value for key, value in options.items() if value is not None}
    for pair in pairs:
        key, has_value, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not has_value:
            raise OperatorError(f"{SET} {pair}: expected KEY=VALUE, for example {SET} micro_batch=4")
        if key not in PeerSettings.model_fields and key not in EARLIER and key not in GONE:
            near = get_close_matches(key, PeerSettings.model_fields, n=3, cutoff=NEAR)
            meant = f"; did you mean {' or '.join(near)}?" if near else ";"
            raise OperatorError(f"{SET} {pair}: {key!r} is no setting{meant} `swarmentum settings` lists them all")
        if _is_list(key):
            given[key] = [*listed(given.get(key)), *_parts(pair, text)] or OFF  # an empty list would count as not given
        elif key in given:
            raise OperatorError(f"{SET} {pair}: {key} is given twice; leave one of the two out")
        else:
            given[key] = text.strip()
    return given


def option(key: str, default: Any = None) -> Any:
    """The option of a setting."""
    if key in FLAGS:
        return typer.Option(*_names(key), help=FLAGS[key], rich_help_panel=PANEL_OF.get(key))
    [it] = [it for it in peer_settings() if it.key == key]
    shown = it.default.strip('"') if default is None else str(default)
    values = it.allowed.removesuffix(", or off")
    notes = [] if _is_flag(key) else [*([values] if values else []), *([f"default: {shown}"] if shown else [])]
    text = _first_sentence(it.text).rstrip(".") + (f" ({'; '.join(notes)})." if notes else ".")
    return typer.Option(*_names(key), help=text, metavar=_shape(key), rich_help_panel=PANEL_OF.get(key))


def _names(key: str) -> tuple[str, ...]:
    return (f"--{key.replace('_', '-')}", *SHORT.get(key, ()))


SET_OPTION: Final = typer.Option(
    SET,
    metavar="KEY=VALUE",
    help="Any setting of the peer, for example --set micro_batch=4; repeatable. `swarmentum settings` lists them all; "
    "swarmentum.toml and SWARMENTUM_<KEY> set them, too.",
    rich_help_panel=MORE,
)


def _parameter(name: str, option: Any) -> inspect.Parameter:
    kind: Any = list[str] | None if name == "set_" else bool | None if _is_flag(name) else str | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _place(parameter: inspect.Parameter) -> int:
    """Arguments first, then options by their panel."""
    [info] = get_args(parameter.annotation)[1:] or [None]
    order = (None, FIRST, LIMITS, NETWORK, STORAGE, OUTPUT, MORE)
    panel = getattr(info, "rich_help_panel", None)
    return order.index(panel) if isinstance(info, typer.models.OptionInfo) and panel in order else 0


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.;]) (?=[A-Z`])", text, maxsplit=1)[0]


def _shape(key: str) -> str | None:
    """Of the value, in the help. The value itself is checked with all others, wherever they come from."""
    kinds = get_args(PeerSettings.model_fields[key].annotation) or (PeerSettings.model_fields[key].annotation,)
    return None if bool in kinds else next((f"<{name}>" for kind, name in SHAPES.items() if kind in kinds), "<text>")


def _is_flag(key: str) -> bool:
    return key in FLAGS or PeerSettings.model_fields[key].annotation is bool


def _is_list(key: str) -> bool:
    return key in ("announce", "relays") or (
        key in PeerSettings.model_fields and get_origin(PeerSettings.model_fields[key].annotation) is list
    )


def _parts(pair: str, text: str) -> list[str]:
    try:
        return listed(text)
    except ValueError as error:
        raise OperatorError(f"{SET} {pair}: {error}") from error


def _key_of(word: str) -> str | None:
    """The setting that an option is, of today or of an earlier version."""
    if not word.startswith("--"):
        return None
    key = word[2:].replace("-", "_")
    key = RENAMED.get(key, key)
    return key if key in PeerSettings.model_fields or key in EARLIER else None


def _instead(name: str, key: str, value: str) -> str:
    """What to type instead of an option that is no option here."""
    flag = key in WORDS or key in ("fit_uplink", "quic", "relay_for_others") or (key not in EARLIER and _is_flag(key))
    flag = flag and value.lower() not in ("false", "no", "off", "0")
    text = "true" if flag else value if value and not value.startswith("-") else "VALUE"
    if key in OPTIONS or (key in EARLIER and text != "VALUE"):
        today = of_today([(GIVEN, {key: text})], LISTEN, lambda line: None)
        if EARLIER[key] not in today:
            return f"{name} is no option of this command: it is so by default; leave it out"
        text = shown(today[EARLIER[key]])
    key = EARLIER.get(key, key)
    quoted = f"'{key}={text}'" if re.search(r"[^\w./:*,@-]", text) else f"{key}={text}"
    return (
        f"{name} is no option of this command; it is a setting. Type {SET} {quoted} instead, or put {key} into "
        f"swarmentum.toml or SWARMENTUM_{key.upper()}"
    )


EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong use or configuration, 3 unreachable, 4 refused, 5 replicas differ, "
    "130 interrupted (left cleanly)."
)
InviteLink = Annotated[
    str, typer.Argument(metavar="INVITE", help="The run's invite link, swarmentum://..., or - to read it from stdin.")
]
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON for programs; logs go to stderr.", rich_help_panel=OUTPUT)
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print more log lines.", rich_help_panel=OUTPUT)]
MaybeInvite = Annotated[
    str | None,
    typer.Argument(
        metavar="[INVITE]", help="A run's invite link, or - to read it from stdin; without it, the machine alone."
    ),
]
InviteOrStdin = Annotated[
    str | None, typer.Argument(metavar="INVITE", help="The run's invite link, or - to read it from stdin.")
]
InviteFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with the link. All users of a machine can see a link on the command line.", rich_help_panel=FIRST
    ),
]
AllowCode = Annotated[bool, option("allow_code")]
AllowLeftOut = Annotated[bool, option("allow_left_out")]


def need_node_extra() -> None:
    """OperatorError with the install command if torch is missing: the base install serves a coordinator only."""
    missing = [
        name for name in ("torch", "hivemind", "transformers", "safetensors", "zstandard") if find_spec(name) is None
    ]
    if missing:
        raise OperatorError(
            f"this command needs {', '.join(missing)}: pip install '.[node]' in the folder of the repository"
        )


STDIN = "-"
COLUMNS_MIN = 40


def link_from(given: str | None, file: Path | None = None) -> str:
    """The invite link: as given, from stdin (`-`), or from a file. A terminal gives one line; a pipe and a file may have
    broken the link over several lines."""
    if (given is None) == (file is None):
        raise OperatorError(
            "give exactly one of these: the invite link, `-` to read the link from stdin, or --invite-file PATH"
        )
    if file is not None:
        try:
            with file.open(encoding=WRITTEN) as opened:
                text = opened.read(PASTED_CHARACTERS_MAX)
        except OSError as error:
            raise OperatorError(f"--invite-file {file}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise OperatorError(f"--invite-file {file}: is not UTF-8 text: save it as UTF-8") from error
        return _some(text, f"--invite-file {file}")
    assert given is not None, "one of them is"
    given = given.strip()
    if given != STDIN:
        return given
    read = sys.stdin.readline if sys.stdin.isatty() else sys.stdin.read
    return _some(read(PASTED_CHARACTERS_MAX), "stdin")


def _some(text: str, where: str) -> str:
    if not text.strip():
        raise OperatorError(f"{where}: nothing is there; put the invite link, swarmentum://..., there")
    return text.strip()


def can_be_asked() -> bool:
    """Whether a person reads stderr and writes to stdin."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def show(asked: MachineRequest) -> None:
    """On stderr: stdout is for results."""
    print("\n".join(asked.lines()), file=sys.stderr, flush=True)


def fitted(line: str) -> str:
    """The line, broken between words where stdout is a terminal that is too narrow for it."""
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(line, max(os.get_terminal_size(sys.stdout.fileno()).columns, COLUMNS_MIN))


def agreed_before(asked: MachineRequest) -> None:
    """The person has agreed to this run already: a peer takes part again after its disk was full."""


def ask(asked: MachineRequest) -> None:
    """Ask the person to join. Raises StoppedError unless the answer is yes; an empty line is a yes."""
    print("Join this run? [Y/n] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer or answer.strip().lower() not in ("", "y", "yes"):
        raise StoppedError(f"the answer was no: this machine does not join the run {asked.run}")


HIDDEN: Final[dict[str, Any]] = {
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
