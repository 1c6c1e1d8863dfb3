"""Virtual time: an event loop whose clock jumps to the next thing that happens, and threads that wait on it.

Everything is deterministic: ready callbacks run in order, tasks hash by their number, `time.monotonic` is the loop's clock,
executors run at once. A training thread is a greenlet: the real blocking code, which gives way where it would block.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar
from unittest import mock

import greenlet

T = TypeVar("T")
BEGIN_SECONDS = 1_000.0  # monotonic clocks do not begin at zero
OWNER: ContextVar[str] = ContextVar("OWNER", default="")
"""The simulated process whose code runs; "" for the world's own."""


def context_of(owner: str) -> Context:
    """For a task or a callback of that process, whoever makes it."""
    context = copy_context()
    context.run(OWNER.set, owner)
    return context


class StandstillError(AssertionError):
    """Nothing will ever happen again."""


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """Sets of tasks are walked in the same order every time."""

    _numbers = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(self._numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is seconds since the world began; nothing ever really waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now = BEGIN_SECONDS
        self._clock_resolution = 1e-9
        self._held: dict[str, list[asyncio.Handle]] = {}
        self._slept: dict[str, float] = {}
        self.asleep: set[str] = set()
        """Processes whose machine sleeps."""
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> list[Any]:
            if timeout is None:
                raise StandstillError("nothing will ever happen again")
            self.now += timeout
            return select(0)  # type: ignore[no-any-return]

        self._selector.select = jump  # type: ignore[attr-defined]
        self.set_task_factory(lambda loop, coroutine, **kwargs: _Task(coroutine, loop=loop, **kwargs))
        _Task._numbers = itertools.count()

    def time(self) -> float:
        """What the running process takes for the time: its clock stands still while its machine sleeps."""
        return self.now - self._slept.get(OWNER.get(), 0.0)

    def call_at(self, when: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        return self.call_later(when - self.time(), *args, **kwargs)

    def call_later(self, delay: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        """Time passes with every wait, as it does: a clock that slept is not exact."""
        return super().call_at(self.now + max(delay, self._clock_resolution), *args, **kwargs)

    def stop_process(self, owner: str, *, asleep: bool = False) -> None:
        """As SIGSTOP does: nothing of it runs, and its timers are late. What comes for it waits, if its machine is awake."""
        self._held.setdefault(owner, [])
        if asleep:
            self.asleep.add(owner)

    def continue_process(self, owner: str, *, slept: float = 0.0) -> None:
        """As SIGCONT does: all that waited runs at once, in its order. `slept`: seconds by which its clock is behind."""
        if owner not in self._held:
            return
        self.asleep.discard(owner)
        self._slept[owner] = self._slept.get(owner, 0.0) + slept
        for handle in self._held.pop(owner):
            if isinstance(handle, asyncio.TimerHandle):
                handle._when += slept  # type: ignore[attr-defined]
                heapq.heappush(self._scheduled, handle)  # type: ignore[attr-defined]
            else:
                self._ready.append(handle)  # type: ignore[attr-defined]

    def _run_once(self) -> None:
        if self._held:
            self._hold()
        super()._run_once()  # type: ignore[misc]

    def _hold(self) -> None:
        for queue in (self._ready, self._scheduled):  # type: ignore[attr-defined]
            kept = []
            for handle in queue:
                self._held.get(handle._context.get(OWNER, ""), kept).append(handle)
            if len(kept) < len(queue):
                queue.clear()
                queue.extend(kept)
                if queue is self._scheduled:  # type: ignore[attr-defined]
                    heapq.heapify(queue)

    def run_in_executor(self, _executor: Any, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """At once, and done in the next turn of the loop."""
        future = self.create_future()
        try:
            result = function(*args)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits
            outcome: Callable[[], None] = lambda error=error: future.set_exception(error)  # type: ignore[misc]  # noqa: E731
        else:
            outcome = lambda: future.set_result(result)  # noqa: E731
        self.call_soon(lambda: None if future.done() else outcome())
        return future


@contextmanager
def virtual_time(seed: int) -> Iterator[VirtualLoop]:
    """A loop, with the process's clocks replaced. The wall clock jumps about: nothing may depend on it."""
    loop, wall = VirtualLoop(), random.Random(seed)
    clocks = {
        "monotonic": loop.time,
        "monotonic_ns": lambda: int(loop.now * 1e9),
        "perf_counter": loop.time,
        "time": lambda: 1.7e9 + loop.now + wall.uniform(-30.0, 30.0),
    }
    with mock.patch.multiple(time, **clocks):  # type: ignore[call-overload]
        asyncio.set_event_loop(loop)
        try:
            yield loop
        finally:
            asyncio.set_event_loop(None)
            loop.close()


class Thread:
    """A greenlet that runs blocking code; `wait` is where it blocks."""

    def __init__(self, loop: VirtualLoop, work: Callable[[], None], owner: str) -> None:
        self._loop = loop
        self._greenlet = greenlet.greenlet(work)
        self._greenlet.gr_context = context_of(owner)
        self._waiting: asyncio.Task[Any] | None = None
        loop.call_soon(self._resume, context=context_of(owner))

    @property
    def alive(self) -> bool:
        return not self._greenlet.dead

    def _resume(self, *_: Any) -> None:
        if not self._greenlet.dead:
            self._greenlet.switch()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Block until it is done. Only from within."""
        assert greenlet.getcurrent() is self._greenlet, "another thread's wait"
        task = self._loop.create_task(work)
        self._waiting = task
        task.add_done_callback(self._resume)
        parent = self._greenlet.parent
        assert parent is not None
        while not task.done():
            parent.switch()
        self._waiting = None
        return task.result()

    def sleep(self, seconds: float) -> None:
        self.wait(asyncio.sleep(seconds))

    def kill(self) -> None:
        """As kill -9 does: it does not go on from where it waits."""
        if self._waiting is not None:
            self._waiting.remove_done_callback(self._resume)
            self._waiting.cancel()
        if not self._greenlet.dead:
            self._greenlet.throw(greenlet.GreenletExit)


class InlineExecutor:
    """Stands for ThreadPoolExecutor where a training thread uses one."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def submit(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call it now; what it gives is nobody's."""
        function(*arguments)

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, function: Callable[[Any], T], items: Any) -> Iterator[T]:
        return map(function, items)
