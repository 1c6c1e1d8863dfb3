"""What the owner lets the training thread take of the machine, applied on that thread: OpenMP counts threads for each caller.

Refuses to decide: the settings do. Knows no step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from node.donor.settings import LiveSettings


class Throttle:
    """Of one training thread. `wanted` gives the settings as they are now."""

    def __init__(self, wanted: Callable[[], LiveSettings] = LiveSettings) -> None:
        self._wanted = wanted
        self._choice = torch.get_num_threads()
        self._threads: int | None = None

    def heed(self) -> None:
        """Take the number of threads that is wanted now."""
        threads = self._wanted().threads
        if threads != self._threads:
            torch.set_num_threads(threads or self._choice)
            self._threads = threads
