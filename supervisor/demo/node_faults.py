"""Faults of a node: its processes, its GPU, its disk and its clock."""

import asyncio
import contextlib
import signal
from typing import ClassVar

from election.clock import boot_time
from supervisor import proc
from supervisor.demo.fault import Fault, FaultError, Stage, keeper_of, pids_of, send, start_if_down
from supervisor.demo.mounts import UnansweredFile
from supervisor.demo.store_faults import Switchover
from supervisor.gpu.simulated import set_persistenced, set_state

TURN = 10.0
"""Seconds within which some service has a turn."""
PERSISTENCE = 20.0
"""Seconds after which a take-over gives nvidia-persistenced up (supervisor/tenure.py)."""
BETWEEN = 1.5
"""Seconds between two steps of a clock: the supervisor looks more often."""


class NoFault(Fault):
    name = "none"
    proves = "Eight services take turns on one GPU, and nothing changes hands without a reason."


class KillSupervisor(Fault):
    name = "kill-supervisor"
    proves = "The keeper ends the services in time though its supervisor is dead; a standby takes over."
    takeovers = 1

    async def inject(self, stage: Stage) -> None:
        stage.cluster.kill_supervisor(stage.holder)

    async def heal(self, stage: Stage) -> None:
        start_if_down(stage)


class StopSupervisor(Fault):
    name = "stop-supervisor"
    proves = "A supervisor that hangs (SIGSTOP) loses its services before another node may claim, and stays harmless."
    takeovers = 1

    async def inject(self, stage: Stage) -> None:
        stage.cluster.stop_supervisor(stage.holder)

    async def heal(self, stage: Stage) -> None:
        stage.cluster.continue_supervisor(stage.holder)


class KillService(Fault):
    name = "kill-service"
    proves = "A service that dies is started again where it was; no fail-over for a failure of one service."

    def __init__(self) -> None:
        self.victim: tuple[str, int] | None = None

    async def inject(self, stage: Stage) -> None:
        services = (stage.watcher.statuses[stage.holder] or {}).get("services", [])
        running = [service for service in services if service.get("pid")]
        if not running:
            raise FaultError(f"{stage.holder} shows no service with a pid")
        self.victim = running[0]["name"], running[0]["pid"]
        found = proc.stat(self.victim[1])
        if found is None or not proc.kill(self.victim[1], found.start_ticks):
            raise FaultError(f"{self.victim[0]} of {stage.holder}: no process {self.victim[1]} to kill")

    def unproven(self, stage: Stage) -> str | None:
        if self.victim is None:
            return "no service was killed"
        name, pid = self.victim
        for service in (stage.watcher.statuses[stage.holder] or {}).get("services", []):
            if service["name"] == name and service.get("pid") not in (None, pid):
                return None
        return f"{name} of {stage.holder} was not started again after its process {pid} was killed"


class KillKeeper(Fault):
    name = "kill-keeper"
    needs_root = True
    proves = "The keeper is killed: its supervisor starts another, which adopts the services; none of them ends."

    def __init__(self) -> None:
        self.before: dict[str, int] = {}
        self.keeper = 0

    async def inject(self, stage: Stage) -> None:
        if stage.cluster.containment != "cgroup":
            raise FaultError("services outlive a keeper in cgroups only, and this demo has none: run it as root")
        found = stage.watcher.statuses[stage.holder] or {}
        self.before = pids_of(found)
        self.keeper = keeper_of(stage, stage.holder)
        send(self.keeper, self.number, f"the keeper of {stage.holder}")

    number: ClassVar[signal.Signals] = signal.SIGKILL

    def unproven(self, stage: Stage) -> str | None:
        found = stage.watcher.statuses[stage.holder] or {}
        if (found.get("keeper") or {}).get("pid") in (None, self.keeper):
            return f"{stage.holder} has no new keeper"
        lost = [name for name, pid in self.before.items() if pids_of(found).get(name) != pid]
        return f"services of {stage.holder} were started again: {', '.join(lost)}" if lost else None


class StopKeeper(KillKeeper):
    name = "stop-keeper"
    proves = "A keeper that hangs (SIGSTOP) is found within 3 s, killed and replaced; no service ends."
    number = signal.SIGSTOP


class LoseGpu(Fault):
    name = "lose-gpu"
    proves = (
        "A GPU that falls off the bus makes its node stand down in good order, and unfit; a standby goes on at once."
    )
    takeovers = 1

    async def inject(self, stage: Stage) -> None:
        set_state(stage.cluster.nodes[stage.holder].folder / "gpu", 0, verdict="lost")

    async def heal(self, stage: Stage) -> None:
        set_state(stage.cluster.nodes[stage.holder].folder / "gpu", 0, verdict="healthy")


class KillNode(Fault):
    name = "kill-node"
    proves = "Supervisor, keeper and services die in one moment, as in a power cut; a standby takes over after the TTL."
    takeovers = 1

    async def inject(self, stage: Stage) -> None:
        await asyncio.to_thread(stage.cluster.kill_node, stage.holder)

    async def heal(self, stage: Stage) -> None:
        start_if_down(stage)


class UnkillableHolder(Fault):
    name = "unkillable-holder"
    needs_root = True
    proves = "A process on the GPU that SIGKILL does not end keeps its node out, and a standby takes over all the same."
    takeovers = 1
    file: UnansweredFile | None = None

    async def inject(self, stage: Stage) -> None:
        self.file = UnansweredFile(stage.cluster.nodes[stage.holder].folder)
        stage.cluster.on_exit(self.file.close)
        deadline = boot_time() + TURN
        while self.file.waiting() is None:
            if boot_time() > deadline:
                raise FaultError(f"no service of {stage.holder} had a turn within {TURN:g} s")
            await asyncio.sleep(0.05)
        stage.cluster.kill_supervisor(stage.holder)

    async def heal(self, stage: Stage) -> None:
        if self.file is not None:
            self.file.close()
        start_if_down(stage)


class HangingStep(Switchover):
    name = "hanging-step"
    proves = "A take-over that hangs (no nvidia-persistenced) is given up in good order, and another node leads."
    takeovers = 2

    def needs(self, ttl: int) -> float:
        return super().needs(ttl) + PERSISTENCE

    async def inject(self, stage: Stage) -> None:
        self.others = [node for name, node in stage.cluster.nodes.items() if name != stage.holder]
        set_persistenced(self.others[0].folder / "gpu", running=False, start_s=10 * PERSISTENCE)
        await super().inject(stage)

    async def heal(self, stage: Stage) -> None:
        set_persistenced(self.others[0].folder / "gpu", start_s=0.0)

    def unproven(self, stage: Stage) -> str | None:
        last = stage.watcher.terms[-1].node
        return f"{last} leads, though its take-over hung" if last == self.target else None


class DiskFull(KillService):
    name = "disk-full"
    proves = "The holder's disk is full: its services run on, one that dies is started again, nothing changes hands."
    needs_root = small_disks = True

    async def inject(self, stage: Stage) -> None:
        self.filling = stage.cluster.nodes[stage.holder].folder / "filling"
        with contextlib.suppress(OSError), self.filling.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        await super().inject(stage)

    def lasts(self, ttl: int) -> float | None:
        return 1.5 * ttl

    async def heal(self, stage: Stage) -> None:
        self.filling.unlink(missing_ok=True)


class ClockJump(Fault):
    name = "clock-jump"
    proves = "The holder's wall clock is set, an hour ahead and then two back: no deadline knows of it."
    own_clocks = True

    def lasts(self, ttl: int) -> float | None:
        return 1.5 * ttl

    async def inject(self, stage: Stage) -> None:
        self.node = stage.cluster.nodes[stage.holder]
        for hours in (1, -1):
            self.node.set_clock(hours * 3600)
            await asyncio.sleep(BETWEEN)

    async def heal(self, stage: Stage) -> None:
        self.node.set_clock(0)
