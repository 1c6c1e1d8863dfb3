"""Coroutines for a program that may have an event loop already, as a notebook has: `asyncio.run` refuses to start there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which runs in a loop and a thread of its own."""
    with ThreadPoolExecutor(1, "swarmentum") as pool:
        return pool.submit(asyncio.run, work).result()
