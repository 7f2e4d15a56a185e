"""Processes on a GPU that gpuward did not start, and what `gpu.foreign` makes of them.

    refuse      a take-over fails while one is there; one that comes later is alarmed
    terminate   SIGTERM, TERM_WAIT, SIGKILL, and only while it is on the GPU
    ignore      told, no more

Monitors (`gpu.monitors`, by their executable) are left alone whatever the policy is: they look at a GPU and do not
compute on it, and killing one can wedge the GPU (dcgm-exporter 84). So is whatever cannot be identified.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from election.clock import Clock
from supervisor import proc
from supervisor.config.schema import Gpu
from supervisor.gpu.driver import GpuDriver, GpuFacts
from supervisor.gpu.holders import DeviceId, Hold, any_holder, holders, holds

TERM_WAIT = 10.0
"""Seconds from SIGTERM to SIGKILL (docs/services.md)."""
KILL_WAIT = 1.0
"""Seconds from SIGKILL to its end."""
POLL = 0.05


@dataclass(frozen=True)
class Foreigner:
    """A process on a GPU."""

    gpu: GpuFacts
    pid: int
    start_ticks: int | None
    """None: the driver lists it, and there is no such process (VisEdit 5)."""
    program: str
    """Its executable; empty where that is not known."""

    def __str__(self) -> str:
        named = (
            f" ({self.program})" if self.program else "" if self.start_ticks is not None else ", which does not exist"
        )
        return f"{self.pid}{named}"


class Foreign:
    """The policy of one node."""

    def __init__(
        self,
        config: Gpu,
        driver: GpuDriver,
        clock: Clock,
        note: Callable[[str], None],
        alarm: Callable[[str, str], None],
    ) -> None:
        self._policy, self._monitors = config.foreign, frozenset(map(str, config.monitors))
        self._driver, self._clock, self._note, self._alarm = driver, clock, note, alarm
        self._told: set[tuple[int, int | None]] = set()

    async def clear(self, gpus: Iterable[GpuFacts], *, by: float) -> None:
        """Before anything of ours is started: whoever is on one of the GPUs is a stranger. Raises RuntimeError, which
        names no program: it is told to other nodes."""
        found = await asyncio.to_thread(self._on_devices, tuple(gpus))
        if any(one.start_ticks is None for one in found):  # it may have ended since the driver was asked
            found = await asyncio.to_thread(self._on_devices, await self._driver.facts(deadline=by))
        while found and self._policy == "terminate" and await self._end_all(found, by=by):
            found = await asyncio.to_thread(self._on_devices, await self._driver.facts(deadline=by))
        if found and self._policy == "ignore":
            self._note(f"{_sentence(found)}: left alone, as `gpu.foreign` says")
        elif found:
            self._note(f"{_sentence(found)}: end these processes, which gpuward did not start")
            raise RuntimeError(f"{_sentence(found, named=False)}: end these processes, which gpuward did not start")

    async def look(self, gpus: Iterable[GpuFacts], is_ours: Callable[[int], bool]) -> None:
        """While services run: who else the driver lists. Costs as much as there are processes on the GPUs."""
        listed = [one for gpu in gpus for one in await asyncio.to_thread(self._identified, gpu, gpu.pids or ())]
        found = [one for one in listed if not is_ours(one.pid)]
        fresh = [one for one in found if (one.pid, one.start_ticks) not in self._told]
        self._told = {(one.pid, one.start_ticks) for one in found}
        if fresh and self._policy == "ignore":
            self._note(f"{_sentence(fresh)}: left alone, as `gpu.foreign` says")
        elif fresh:
            self._alarm("foreign", f"{_sentence(fresh)}, which gpuward did not start")
        if self._policy == "terminate":
            await self._end_all(fresh, by=float("inf"))

    def _on_devices(self, gpus: Iterable[GpuFacts]) -> list[Foreigner]:
        """By the open files of every process, and by the driver. Blocks."""
        found = []
        for gpu in gpus:
            open_by = any_holder(holders(DeviceId.of(gpu.device)))
            there = [one for one in self._identified(gpu, open_by) if one.start_ticks is not None]
            found += there + self._identified(gpu, (gpu.pids or frozenset()) - open_by)
        return found

    def _identified(self, gpu: GpuFacts, pids: Collection[int]) -> list[Foreigner]:
        """Without the monitors, and those that are just ending. Blocks."""
        found = []
        for pid in sorted(pids):
            stat, program = proc.stat(pid), _program(pid)
            ended = stat is not None and stat.state in "ZX" and proc.is_over(pid)
            if program not in self._monitors and not ended:
                found.append(Foreigner(gpu, pid, None if stat is None else stat.start_ticks, program))
        return found

    async def _end_all(self, found: Iterable[Foreigner], *, by: float) -> bool:
        """At once. False: none of them can be ended."""
        return any(await asyncio.gather(*(self._end(one, by=by) for one in found)))

    async def _end(self, one: Foreigner, *, by: float) -> bool:
        """Exactly this process, and only while it is on the GPU. True: it has ended."""
        pidfd = None if one.start_ticks is None else proc.open_pidfd(one.pid, one.start_ticks)
        if pidfd is None:
            return False
        try:
            for signum, patience in ((signal.SIGTERM, TERM_WAIT), (signal.SIGKILL, KILL_WAIT)):
                if await asyncio.to_thread(_hold, one) is not Hold.HELD:
                    break
                self._note(f"GPU {one.gpu.index}: {signum.name} to {one}, which gpuward did not start")
                proc.send(pidfd, signum)
                until = min(self._clock.now() + patience, by - KILL_WAIT if signum == signal.SIGTERM else by)
                while not proc.pidfd_exited(pidfd) and self._clock.now() < until:
                    await self._clock.sleep_until(self._clock.now() + POLL)
            return proc.pidfd_exited(pidfd)
        finally:
            os.close(pidfd)


def _hold(one: Foreigner) -> Hold:
    try:
        return holds(one.pid, [DeviceId.of(one.gpu.device)])[0]
    except OSError:
        return Hold.UNKNOWN


def _program(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return ""


def _sentence(found: Iterable[Foreigner], *, named: bool = True) -> str:
    by_gpu: dict[int, list[str]] = {}
    for one in found:
        by_gpu.setdefault(one.gpu.index, []).append(str(one) if named else str(one.pid))
    return "; ".join(f"GPU {index} is in use by {', '.join(who)}" for index, who in by_gpu.items())
