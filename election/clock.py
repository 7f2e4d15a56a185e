"""Time, as every deadline here understands it: CLOCK_BOOTTIME, in seconds.

CLOCK_MONOTONIC stops while a machine is suspended and the wall clock jumps (clock_gettime(2)), so neither may
carry a deadline (rule 1). An event loop made by `boot_time_loop` uses the boot-time clock as its own time, so
`asyncio.timeout_at(deadline)` and `loop.call_at(deadline, …)` take our absolute deadlines as they are. The wall
clock is for display only.
"""

import asyncio
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
