"""What the terminal views have in common: keys, signals, and an end that leaves the terminal as it was."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import ClassVar

from textual.app import App
from textual.binding import BindingType
from textual.screen import Screen

from node.terminal.widgets import Help
from protos.signals import EXIT_INTERRUPTED


class TerminalView(App[int]):
    """Its return value is an exit code. The mouse is left to the terminal, so that text can be selected."""

    TITLE = "swarmentum"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = []
    HELP_TEXT: ClassVar[str] = ""
    STOPPED: ClassVar[int] = EXIT_INTERRUPTED
    """The exit code after a SIGTERM."""
    CSS = """
    #main { padding: 0 1; height: 1fr; overflow: hidden; }
    Footer { dock: bottom; }
    """

    def __init__(self) -> None:
        super().__init__(ansi_color=None)
        self._signalled = False

    def show(self) -> int:
        """Show it until it ends; the exit code."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is a key here
        signal.signal(signal.SIGHUP, lambda *_: os._exit(EXIT_INTERRUPTED))  # no terminal is left to put in order
        code = self.run(mouse=False)
        return 1 if code is None else code

    def on_mount(self) -> None:
        """Ends in order when it is asked to."""
        if not self.is_headless:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.end, self.STOPPED)

    @property
    def main(self) -> Screen[object]:
        """The view itself, also while the help covers it."""
        return self.screen_stack[0]

    @property
    def is_up(self) -> bool:
        """Whether there is something to draw on: an answer may come while the view begins or ends."""
        return self.is_running and bool(self.screen_stack) and bool(self.main.query("Footer"))

    def end(self, code: int = 0) -> None:
        """Leave the terminal as it was."""
        self.exit(code)

    def action_explain(self) -> None:
        """The key `?`."""
        if not isinstance(self.screen, Help):
            self.push_screen(Help(self.HELP_TEXT))
