"""Reads that can block for ever, done beside the event loop.

A stat through /proc/PID/fd of a file on a dead NFS or FUSE mount, or /proc/PID/maps of a process that is stuck in the
kernel with its address space locked, may never return. Such a read runs in a daemon thread; at the deadline it is
left behind. Only MOST_STUCK may be left behind at a time, so a stuck process costs a few threads and not one per look;
more than one, since one impatient caller must not make the others believe that nothing answers.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

MOST_STUCK = 4

T = TypeVar("T")
V = TypeVar("V")


class StillStuckError(TimeoutError):
    """The read did not return by its deadline, or an earlier one has not returned yet."""


class Aside:
    """A few lanes for blocking reads of one kind."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.stuck = 0
        """Threads whose caller has gone: they came too late, or it was cancelled."""

    async def read(self, work: Callable[[], T], *, deadline: float) -> T:
        """The result of `work()`, run in a thread. Raises StillStuckError at `deadline` (loop time = boot time)."""
        if self.stuck >= MOST_STUCK:
            raise StillStuckError(f"{self._name}: {self.stuck} earlier reads have not returned yet")
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        thread = threading.Thread(target=_run, args=(work, loop, result), name=self._name, daemon=True)
        thread.start()
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(result)
        except TimeoutError:
            if result.done():
                return result.result()
            raise StillStuckError(f"{self._name}: no answer by the deadline; left behind") from None
        finally:
            if not result.done():
                self.stuck += 1
                result.add_done_callback(self._returned)

    def _returned(self, result: "asyncio.Future[T]") -> None:
        self.stuck -= 1
        if not result.cancelled():
            result.exception()


def _run(work: Callable[[], T], loop: asyncio.AbstractEventLoop, result: "asyncio.Future[T]") -> None:
    try:
        value = work()
    except BaseException as error:  # noqa: BLE001 - handed to the one who waits, whatever it is
        _tell(loop, result, result.set_exception, error)
    else:
        _tell(loop, result, result.set_result, value)


def _tell(loop: asyncio.AbstractEventLoop, result: "asyncio.Future[T]", say: Callable[[V], None], outcome: V) -> None:
    def unless_cancelled() -> None:
        if not result.done():
            say(outcome)

    with contextlib.suppress(RuntimeError):  # the loop has ended while we were stuck: nobody waits any more
        loop.call_soon_threadsafe(unless_cancelled)
