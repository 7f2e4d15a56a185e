"""Time, as every deadline here understands it: CLOCK_BOOTTIME, in seconds.

CLOCK_MONOTONIC stops while a machine is suspended and the wall clock jumps (clock_gettime(2)), so neither may
carry a deadline (rule 1). An event loop made by `boot_time_loop` uses the boot-time clock as its own time, so
`asyncio.timeout_at(deadline)` and `loop.call_at(deadline, …)` take our absolute deadlines as they are. The wall
clock is for display only.
"""

import asyncio
import selectors
import time
from typing import Protocol


def boot_time() -> float:
    """Seconds since boot, suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clock(Protocol):
    """What code that needs the time is given."""

    def now(self) -> float:
        """Boot-time seconds: for deadlines."""
        ...

    def wall(self) -> float:
        """Seconds since 1970: for display, and for noticing that the clock was set."""
        ...

    async def sleep_until(self, deadline: float) -> None:
        """Return at `deadline` (boot-time seconds) or a little later; at once if it has passed."""
        ...


class BootClock:
    """The real clock. Its sleeps need a loop made by `boot_time_loop`."""

    def now(self) -> float:
        return boot_time()

    def wall(self) -> float:
        return time.time()

    async def sleep_until(self, deadline: float) -> None:
        await asyncio.sleep(max(0.0, deadline - boot_time()))


class _BootTimeLoop(asyncio.SelectorEventLoop):
    def time(self) -> float:
        return boot_time()


def boot_time_loop() -> asyncio.AbstractEventLoop:
    """A loop whose time is the boot-time clock: pass it to `asyncio.Runner(loop_factory=boot_time_loop)`."""
    return _BootTimeLoop()


class _JumpingSelector(selectors.DefaultSelector):
    """Where the loop would sleep, time jumps instead."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.now = start

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise DeadlockError("virtual time stands still: nothing is ready and no timer is set" + _waiting())
        self.now += timeout
        return []


def _waiting() -> str:
    loop = asyncio._get_running_loop()
    tasks = asyncio.all_tasks(loop) if loop else set()
    return "".join(sorted(f"; {task.get_name()} waits in {task.get_coro()!r}" for task in tasks))


class DeadlockError(RuntimeError):
    """Every task waits for another one: on a real loop the program would hang."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer as soon as nothing is ready: hours pass in milliseconds, and the
    same program takes the same steps every time. Not for I/O or threads: time would not wait for them."""

    def __init__(self, start: float = 1000.0) -> None:
        """`start`: its first `time()`, in seconds."""
        self._jumping = _JumpingSelector(start)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def virtual_loop() -> VirtualLoop:
    """Pass it to `asyncio.Runner(loop_factory=virtual_loop)`. `DeadlockError` comes out of `run`."""
    return VirtualLoop()


class VirtualClock:
    """A machine's clock in virtual time: several on one loop can differ, and be set (`offset`, `wall_offset`)."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, offset: float = 0.0, wall_offset: float = 1_800_000_000.0
    ) -> None:
        """Offsets in seconds, to the loop's time."""
        self._loop = loop
        self.offset = offset
        self.wall_offset = wall_offset

    def now(self) -> float:
        return self._loop.time() + self.offset

    def wall(self) -> float:
        return self._loop.time() + self.wall_offset

    async def sleep_until(self, deadline: float) -> None:
        await asyncio.sleep(max(0.0, deadline - self.now()))
