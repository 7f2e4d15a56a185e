"""The faults of `gpuward demo`, one class each: what is broken, how it is mended, and what that proves.

`inject` breaks something on the node that leads, or in the store; `heal` mends it when the take-over is through (or
after `lasts`), so that the rest of the demo shows that what comes back does no harm.
"""

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import ClassVar

from election.clock import BootClock, boot_time
from election.requests import RefusedError, Requests
from election.store import Delete, LockStore, Put, Txn
from supervisor import proc
from supervisor.demo.cluster import DemoCluster
from supervisor.demo.watch import Status, Watcher
from supervisor.gpu.simulated import set_state

STORE_CALL = 2.0
"""Seconds for one call to the store."""
SETTLE = 2.0
"""Seconds between the first complete start and the fault."""
WORK = 8.0
"""Seconds allowed for detection beyond the TTL, the take-over itself and a look at what follows."""


class FaultError(Exception):
    """The fault could not be injected; the text says why."""


@dataclass
class Stage:
    """What a fault works on."""

    cluster: DemoCluster
    watcher: Watcher
    holder: str
    """The node that led when the fault was injected."""

    @property
    def store(self) -> LockStore:
        return self.watcher.store


class Fault:
    """One way to break things."""

    name: ClassVar[str]
    proves: ClassVar[str]
    takeovers: ClassVar[int] = 0
    """How many take-overs must follow: neither more nor fewer."""
    stores: ClassVar[tuple[str, ...]] = ("local", "etcd")

    def available(self, store: str) -> bool:
        return store in self.stores

    def lasts(self, ttl: int) -> float | None:
        """Seconds until it must be mended; None: when the take-over is through."""
        return None

    def needs(self, ttl: int) -> float:
        """The shortest demo, in seconds, in which it can show what it proves."""
        return SETTLE + WORK + (self.lasts(ttl) or 0) + (ttl if self.takeovers else 0)

    async def inject(self, stage: Stage) -> None:
        """Break it. Raises FaultError, StoreError or OSError."""

    async def heal(self, stage: Stage) -> None:
        """Mend it; also called where `inject` failed half-way."""

    def unproven(self, stage: Stage) -> str | None:
        """At the end: what this fault should have led to besides take-overs and did not, if anything."""
        return None


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
        _start_if_down(stage)


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
    proves = "The keeper is killed: its supervisor starts another, which adopts the services; none of them ends."

    def __init__(self) -> None:
        self.before: dict[str, int] = {}
        self.keeper = 0

    async def inject(self, stage: Stage) -> None:
        if stage.cluster.containment != "cgroup":
            raise FaultError("services outlive a keeper in cgroups only, and this demo has none: run it as root")
        found = stage.watcher.statuses[stage.holder] or {}
        self.before = _pids(found)
        self.keeper = keeper_of(stage, stage.holder)
        send(self.keeper, self.number, f"the keeper of {stage.holder}")

    number: ClassVar[signal.Signals] = signal.SIGKILL

    def unproven(self, stage: Stage) -> str | None:
        found = stage.watcher.statuses[stage.holder] or {}
        if (found.get("keeper") or {}).get("pid") in (None, self.keeper):
            return f"{stage.holder} has no new keeper"
        lost = [name for name, pid in self.before.items() if _pids(found).get(name) != pid]
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


class Switchover(Fault):
    name = "switchover"
    proves = "An operator passes the lock on to a named node: services end here in good order, and start there at once."
    takeovers = 1

    def __init__(self) -> None:
        self.target = ""

    async def inject(self, stage: Stage) -> None:
        self.target = next(name for name in stage.cluster.nodes if name != stage.holder)
        requests = Requests(stage.watcher.keys, stage.store, BootClock(), "demo")
        try:
            await requests.switch_over(self.target, deadline=boot_time() + STORE_CALL)
        except RefusedError as error:
            raise FaultError(str(error)) from None

    def unproven(self, stage: Stage) -> str | None:
        last = stage.watcher.terms[-1].node
        return None if last == self.target else f"{last} leads, and not {self.target}"


class KillNode(Fault):
    name = "kill-node"
    proves = "Supervisor, keeper and services die in one moment, as in a power cut; a standby takes over after the TTL."
    takeovers = 1

    async def inject(self, stage: Stage) -> None:
        await asyncio.to_thread(stage.cluster.kill_node, stage.holder)

    async def heal(self, stage: Stage) -> None:
        _start_if_down(stage)


class DeleteKey(Fault):
    name = "delete-key"
    proves = "The leader key is deleted by hand: the holder ends its services first, and only then others may claim."
    takeovers = 1

    async def inject(self, stage: Stage) -> None:
        txn = Txn((), (Delete(stage.watcher.keys.leader),))
        await stage.store.commit(txn, deadline=boot_time() + STORE_CALL)


class RevokeLease(Fault):
    name = "revoke-lease"
    proves = "The lease is revoked by hand: the holder ends its services first, and only then others may claim."
    takeovers = 1

    async def inject(self, stage: Stage) -> None:
        deadline = boot_time() + STORE_CALL
        entry = (await stage.store.read([stage.watcher.keys.leader], deadline=deadline)).get(stage.watcher.keys.leader)
        if entry is None or not entry.lease:
            raise FaultError(f"{stage.watcher.keys.leader} is under no lease")
        await stage.store.revoke(entry.lease, deadline=deadline)


class DeletePrefix(Fault):
    name = "delete-prefix"
    proves = (
        "All that stands in the store is deleted: an absent term is no end, so nobody claims before the holder is gone."
    )
    takeovers = 1

    async def inject(self, stage: Stage) -> None:
        deadline = boot_time() + STORE_CALL
        found = await stage.store.read([stage.watcher.keys.prefix], prefix=True, deadline=deadline)
        txn = Txn((), tuple(Delete(entry.key) for entry in found.entries))
        await stage.store.commit(txn, deadline=deadline)


class OverwriteKey(Fault):
    name = "overwrite-key"
    proves = (
        "A stranger writes over the leader key: the holder ends its services, and what cannot be read lets nobody in."
    )
    takeovers = 1

    async def inject(self, stage: Stage) -> None:
        txn = Txn((), (Put(stage.watcher.keys.leader, b"\xff mine now"),))
        await stage.store.commit(txn, deadline=boot_time() + STORE_CALL)


class _Member(Fault):
    """One member of etcd."""

    stores = ("etcd",)

    def __init__(self) -> None:
        self._broken: int | None = None

    def lasts(self, ttl: int) -> float | None:
        return 1.5 * ttl


class StopEtcdMember(_Member):
    name = "stop-etcd-member"
    proves = (
        "The etcd member that all nodes talk to hangs: their calls go on to the next one, and nothing changes hands."
    )

    async def inject(self, stage: Stage) -> None:
        assert stage.cluster.etcd is not None
        self._broken = 0  # the first endpoint, which everybody uses until it fails
        stage.cluster.etcd.stop(self._broken)

    async def heal(self, stage: Stage) -> None:
        if stage.cluster.etcd is not None and self._broken is not None:
            stage.cluster.etcd.cont(self._broken)


class KillEtcdLeader(_Member):
    name = "kill-etcd-leader"
    proves = "The etcd leader dies: etcd elects another within the holder's retries, and nothing changes hands."

    async def inject(self, stage: Stage) -> None:
        assert stage.cluster.etcd is not None
        self._broken = await asyncio.to_thread(stage.cluster.etcd.leader)
        await asyncio.to_thread(stage.cluster.etcd.kill, self._broken)

    async def heal(self, stage: Stage) -> None:
        if stage.cluster.etcd is not None and self._broken is not None:
            await asyncio.to_thread(stage.cluster.etcd.restart, self._broken)


class KillEtcdLeaderWithHolder(Fault):
    name = "kill-etcd-leader-with-holder"
    proves = "The node and the etcd leader die together; the take-over is not later for it (etcd restarts its leases)."
    takeovers = 1
    stores = ("etcd",)

    def __init__(self) -> None:
        self._member: int | None = None

    async def inject(self, stage: Stage) -> None:
        etcd = stage.cluster.etcd
        assert etcd is not None
        self._member = await asyncio.to_thread(etcd.leader)
        await asyncio.gather(
            asyncio.to_thread(stage.cluster.kill_node, stage.holder), asyncio.to_thread(etcd.kill, self._member)
        )

    async def heal(self, stage: Stage) -> None:
        _start_if_down(stage)
        if stage.cluster.etcd is not None and self._member is not None:
            await asyncio.to_thread(stage.cluster.etcd.restart, self._member)
            self._member = None


class EtcdDown(Fault):
    name = "etcd-down"
    proves = "All of etcd stands still for 1.5 TTL: the holder gives way in time, nobody claims, then one node does."
    takeovers = 1
    stores = ("etcd",)

    def lasts(self, ttl: int) -> float | None:
        return 1.5 * ttl

    async def inject(self, stage: Stage) -> None:
        self._signal_all(stage, signal.SIGSTOP)

    async def heal(self, stage: Stage) -> None:
        self._signal_all(stage, signal.SIGCONT)

    def _signal_all(self, stage: Stage, signum: int) -> None:
        etcd = stage.cluster.etcd
        assert etcd is not None
        for member in range(len(etcd.endpoints)):
            if signum == signal.SIGSTOP:
                etcd.stop(member)
            else:
                etcd.cont(member)


KINDS: tuple[type[Fault], ...] = (
    NoFault,
    KillSupervisor,
    StopSupervisor,
    KillKeeper,
    StopKeeper,
    KillService,
    KillNode,
    LoseGpu,
    Switchover,
    DeleteKey,
    DeletePrefix,
    OverwriteKey,
    RevokeLease,
    StopEtcdMember,
    KillEtcdLeader,
    KillEtcdLeaderWithHolder,
    EtcdDown,
)
NAMES = tuple(kind.name for kind in KINDS)


def make(name: str) -> Fault:
    """The fault of that name; KeyError where there is none."""
    return {kind.name: kind for kind in KINDS}[name]()


def keeper_of(stage: Stage, name: str) -> int:
    """Pid of a node's keeper, as its supervisor tells it. Raises FaultError."""
    pid = ((stage.watcher.statuses[name] or {}).get("keeper") or {}).get("pid")
    if not pid:
        raise FaultError(f"{name} has no keeper")
    return int(pid)


def _pids(status: Status) -> dict[str, int]:
    return {service["name"]: service["pid"] for service in status.get("services", []) if service.get("pid")}


def send(pid: int, number: int, what: str) -> None:
    """By pidfd, to the process that has the pid now."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise FaultError(f"{what}: {error.strerror}") from None
    try:
        signal.pidfd_send_signal(pidfd, number)
    finally:
        os.close(pidfd)


def _start_if_down(stage: Stage) -> None:
    if not stage.cluster.nodes[stage.holder].running:
        stage.cluster.start_node(stage.holder)
