"""Between the end of a GPU service and its next start: has the device let go, and does it want a reset?

An empty cgroup is not enough: a process can be gone for /proc and still be listed by the driver, with its memory
(sglang 39545). A GPU that is lost or a driver that is dead is the node's fault, and no service is started on it.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

from election.clock import Clock
from supervisor import proc
from supervisor.gpu.driver import DriverError, GpuDriver, GpuFacts, GpuVerdict

CLEAR_WAIT = 10.0
"""Seconds for the driver to let go of PIDs that have ended. A CUDA context takes a second or two to be torn down."""
ANSWER = 5.0
"""Seconds for the driver to answer; one that takes longer is unresponsive."""
LOOK_EVERY = 0.2
RESET_LIMIT = 120.0
"""Seconds: the upper end of what nvidia-smi is given for a reset (gpu-facts, "Reset")."""


@dataclass(frozen=True)
class DeviceRules:
    """What may be done to the device before the next start."""

    may_reset: bool
    """The service keeps the GPU's mutex, so nobody else can be using it rightfully."""
    killed: bool
    """The watchdog had to kill it."""
    policy: Literal["after-kill", "always", "on-fault", "never"] = "after-kill"
    """always: after each end. after-kill: after a kill, and when the driver asks for it. on-fault: only then."""

    def reset(self, wanted: bool) -> bool:
        """Is it to be reset? `wanted`: the driver asks for it."""
        if not self.may_reset or self.policy == "never":
            return False
        return wanted or self.policy == "always" or (self.killed and self.policy == "after-kill")


async def device_clear(
    driver: GpuDriver,
    gpu: GpuFacts,
    pids: Collection[int],
    rules: DeviceRules,
    *,
    clock: Clock,
    tell: Callable[[str], None],
) -> str | None:
    """Wait until the driver lists none of `pids`, then reset the GPU if the rules and its facts say so.

    None: start on it. Else what stands in the way, after CLEAR_WAIT and ANSWER (and RESET_LIMIT).
    """
    deadline = clock.now() + CLEAR_WAIT
    while True:
        now = await _facts(driver, gpu, clock.now() + ANSWER)
        left = sorted(set(pids) & (now.pids or frozenset()))
        silent = now.pids is None
        if now.verdict.node_fault and now.verdict is not GpuVerdict.UNRESPONSIVE:
            return f"GPU {gpu.index} is {now.verdict.value}: {now.why}"
        if not left and not silent:
            break
        if clock.now() >= deadline:
            what = f"still lists {left}" if left else f"does not say who is on it ({now.why})"
            return f"GPU {gpu.index}: the driver {what}, {CLEAR_WAIT:g} s after their end"
        await asyncio.sleep(LOOK_EVERY)
    if rules.reset(now.verdict.wants_reset):
        if now.pids:
            tell(f"GPU {gpu.index}: not reset: {', '.join(map(_named, sorted(now.pids)))} is on it")
        else:
            await _reset(driver, gpu, clock, tell)
    return None


def _named(pid: int) -> str:
    """With its command, unless the driver lists what does not exist."""
    found = proc.stat(pid)
    return f"{pid} ({'no such process' if found is None else found.comm})"


async def _reset(driver: GpuDriver, gpu: GpuFacts, clock: Clock, tell: Callable[[str], None]) -> None:
    """A reset that fails is told, no more: whether the GPU can be used is what its facts say at the next look."""
    began = clock.now()
    try:
        await driver.reset(gpu.uuid, deadline=began + RESET_LIMIT)
    except DriverError as error:
        tell(f"GPU {gpu.index}: not reset: {error}")
    else:
        tell(f"GPU {gpu.index}: reset in {clock.now() - began:.1f} s")


async def _facts(driver: GpuDriver, gpu: GpuFacts, deadline: float) -> GpuFacts:
    """Where the driver tells nothing at all, that is the fact."""
    try:
        for found in await driver.facts(deadline=deadline):
            if found.uuid == gpu.uuid:
                return found
    except DriverError as error:
        return replace(gpu, verdict=error.verdict, pids=None, why=str(error))
    return replace(gpu, verdict=GpuVerdict.LOST, pids=None, why="the driver no longer lists it")
