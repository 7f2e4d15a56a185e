"""The end of one run: SIGTERM and patience, SIGKILL, its cgroup empty, its GPU clear."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from supervisor.config.service import Service
from supervisor.service.device import DeviceRules, device_clear
from supervisor.service.hand import Hand, Shared
from supervisor.service.messages import Ended, Stop

KILL_WAIT = 5.0
"""Seconds from SIGKILL to an empty cgroup (docs/services.md); what is then left stands in D state."""
LOOK_EVERY = 0.25
"""Seconds between own looks while a cgroup empties: the keeper's event normally comes first."""


class Ending:
    """See above. Of one service, for one run after the other."""

    def __init__(
        self,
        spec: Service,
        hand: Hand,
        shared: Shared,
        stirred: Callable[[float], Awaitable[object]],
        stop: Callable[[], Stop | None],
    ) -> None:
        """`stirred` returns at a message, or at the given boot time; `stop` tells whether its end is asked for."""
        self._spec, self._hand, self._shared = spec, hand, shared
        self._stirred, self._stop = stirred, stop
        self.hasten = asyncio.Event()
        """Nothing is waited for any more that does not end a process."""
        self._pids: set[int] = set()

    async def make_empty(self, ended: Ended) -> str | None:
        """SIGTERM and patience where there is to be any, then SIGKILL. What is wrong, if something survives."""
        if self._hand.uncertain:
            await self._hand.find()
        footprint = self._hand.footprint
        if footprint is None:
            return None
        self._pids = {footprint.pid, *footprint.pids()}
        if ended.graceful:
            patience = self._spec.stop_timeout if ended.patience is None else ended.patience
            deadline = self._shared.clock.now() + patience
            if ended.by_itself:
                await self._until(lambda: not footprint.main_lives(), deadline, patient=True)
            await self._hand.terminate()
            if await self._until(self._hand.empty, deadline, patient=True):
                return None
        self._pids |= set(footprint.pids())
        soon = self._shared.clock.now() + LOOK_EVERY
        if footprint.empty() and await self._until(self._hand.empty, soon, patient=False):
            return None  # a cgroup that was never killed can be started in again
        await self._hand.kill()
        if await self._until(self._hand.empty, self._shared.clock.now() + KILL_WAIT, patient=False):
            return None
        return f"survived SIGKILL: {', '.join(map(str, footprint.pids()))} ({ended.why})"

    async def _until(self, done: Callable[[], bool], deadline: float, *, patient: bool) -> bool:
        """True when it is so. While `patient`, a Stop's own time wins, and an impatient one ends the wait."""
        while not done():
            stop = self._stop()
            if patient and stop is not None:
                deadline = min(deadline, stop.by if stop.graceful else 0.0)
            now = self._shared.clock.now()
            if now >= deadline:
                return False
            await self._stirred(min(deadline, now + LOOK_EVERY))
        return True

    async def device_trouble(self, ended: Ended) -> str | None:
        """Why it may not be started on its GPU now; after the reset that may be due."""
        if self._spec.gpu is None or self._hand.footprint is None:
            return None
        rules = DeviceRules(may_reset=self._hand.holds_lock, killed=ended.killed, policy=self._spec.reset_gpu)
        gpu = self._shared.gpus[self._spec.gpu]
        look = device_clear(
            self._shared.driver, gpu, self._pids, rules, clock=self._shared.clock, tell=self._shared.tell
        )
        return await self._unless_hastened(look)

    async def _unless_hastened(self, look: Coroutine[None, None, str | None]) -> str | None:
        """A stop does not wait for a driver: nothing of the service is left, and nothing will be started."""
        looking = asyncio.ensure_future(look)
        stop = asyncio.ensure_future(self.hasten.wait())
        try:
            await asyncio.wait({looking, stop}, return_when=asyncio.FIRST_COMPLETED)
            return looking.result() if looking.done() else None
        finally:
            stop.cancel()
            looking.cancel()
            await asyncio.gather(stop, looking, return_exceptions=True)
