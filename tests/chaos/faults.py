"""What breaks in a chaos run, beside the faults of the demo: the network, whole nodes, and pairs of processes."""

import asyncio
import contextlib
import os
import signal
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from election.clock import boot_time
from supervisor.cgroup import Group
from supervisor.demo import faults as demo
from supervisor.demo.fault import Fault, FaultError, Stage, keeper_of, send
from supervisor.demo.node_faults import (
    KillKeeper,
    KillNode,
    KillSupervisor,
    NoFault,
    StopKeeper,
    StopSupervisor,
    UnkillableHolder,
)
from supervisor.demo.store_faults import KillEtcdLeaderWithHolder
from tests.chaos import bed
from tests.chaos.bed import ChaosCluster

BACK = 20.0
"""Seconds for a supervisor to start on a busy machine."""
DELAY = 0.1
"""Seconds each way."""


@dataclass(frozen=True)
class Excuse:
    """An exception that docs/safety.md names: for so long overlaps count by themselves."""

    kind: str
    node: str
    begin: float
    end: float


class ChaosFault(Fault):
    """One on the network or on whole nodes. `excuses` are those of the last injection."""

    stores = ("etcd",)
    longest: ClassVar[float] = 2.5
    """Of a TTL: how long it lasts at most."""

    def __init__(self) -> None:
        self.excuses: list[Excuse] = []


class _Cut(ChaosFault):
    isolates_member: ClassVar[bool] = False
    """The member of etcd on the holder's machine, from the others."""

    @abstractmethod
    def matches(self, node: int) -> tuple[str, ...]:
        """Packets that are dropped, as expressions of nft."""

    async def inject(self, stage: Stage) -> None:
        self.cluster = _chaos(stage)
        self.cut = f"cut-{os.urandom(4).hex()}"
        node = self.cluster.number(stage.holder)
        if self.isolates_member:
            self.cluster.network.silence(self.cut, node)
        self.cluster.network.drop(self.cut, *self.matches(node))

    async def heal(self, stage: Stage) -> None:
        self.cluster.network.mend(self.cut)


class CutFromEtcd(_Cut):
    name = "cut-from-etcd"
    proves = "A node that no packet reaches ends its services before another may claim."
    takeovers = 1

    def matches(self, node: int) -> tuple[str, ...]:
        return bed.to_etcd(node), bed.from_etcd(node)


class Mute(_Cut):
    name = "mute"
    proves = "What the holder sends is lost, and what it is sent arrives."
    takeovers = 1

    def matches(self, node: int) -> tuple[str, ...]:
        return (bed.to_etcd(node),)


class Deaf(_Cut):
    name = "deaf"
    proves = "What the holder sends arrives, and no answer does: its refreshes may be applied, and extend nothing."
    takeovers = 1

    def matches(self, node: int) -> tuple[str, ...]:
        return (bed.from_etcd(node),)


class Lossy(_Cut):
    name = "lossy"
    proves = "One packet in five is lost on the holder's way to etcd and back."

    def matches(self, node: int) -> tuple[str, ...]:
        lost = "numgen random mod 100 < 20"
        return f"{bed.to_etcd(node)} {lost}", f"{bed.from_etcd(node)} {lost}"


class Slow(ChaosFault):
    name = "slow"
    proves = "Each packet on the holder's way to etcd and back is late: calls take longer, and nothing changes hands."

    async def inject(self, stage: Stage) -> None:
        self.network = _chaos(stage).network
        self.network.hold_back(DELAY, _chaos(stage).number(stage.holder))

    async def heal(self, stage: Stage) -> None:
        self.network.let_go()


class IsolateNode(_Cut):
    name = "isolate-node"
    isolates_member = True
    proves = (
        "The holder reaches its own member of etcd alone, and no other member reaches that one: it answers no read."
    )
    takeovers = 1

    def matches(self, node: int) -> tuple[str, ...]:
        own = bed.client_address(node, node)
        away = f"{bed.to_etcd(node)} ip daddr != {own}", f"{bed.from_etcd(node)} ip saddr != {own}"
        return *away, bed.to_member(node), bed.from_member(node)


class IsolateMember(_Cut):
    name = "isolate-member"
    isolates_member = True
    proves = "No member of etcd reaches the one on the holder's machine: the holder goes on with another one."

    def matches(self, node: int) -> tuple[str, ...]:
        return bed.to_member(node), bed.from_member(node)


class FreezeNode(ChaosFault):
    name = "freeze-node"
    proves = "A whole node stands still, and goes on: its services end as soon as its keeper's timer has run."
    takeovers = 1
    longest = 3.0

    async def inject(self, stage: Stage) -> None:
        self.group, self.began, self.node = _group_of(stage, stage.holder), boot_time(), stage.holder
        self.group.freeze()

    async def heal(self, stage: Stage) -> None:
        thawed = boot_time()
        thaw(self.group)
        self.group.close()
        self.excuses = [
            Excuse("frozen", self.node, self.began, thawed),
            Excuse("thawed", self.node, thawed, thawed + 1.0),
        ]


class StopSupervisorAndKeeper(ChaosFault):
    name = "stop-supervisor-and-keeper"
    proves = "Both of them hang: nobody ends the services until one of them goes on (a hardware watchdog would)."
    takeovers = 1

    async def inject(self, stage: Stage) -> None:
        self.began, self.node = boot_time(), stage.holder
        self.keeper = keeper_of(stage, stage.holder)
        stage.cluster.stop_supervisor(stage.holder)
        send(self.keeper, signal.SIGSTOP, "the keeper")

    async def heal(self, stage: Stage) -> None:
        stage.cluster.continue_supervisor(self.node)
        send(self.keeper, signal.SIGCONT, "the keeper")
        self.excuses = [Excuse("both-stopped", self.node, self.began, boot_time() + 1.0)]


class KillSupervisorAndKeeper(ChaosFault):
    name = "kill-supervisor-and-keeper"
    proves = (
        "Both of them die, and are started again within the authority, as systemd does: the services are adopted. On a "
        "machine so busy that the start takes longer than that, nobody ends them until then."
    )

    async def inject(self, stage: Stage) -> None:
        keeper = keeper_of(stage, stage.holder)
        began = boot_time()
        stage.cluster.kill_supervisor(stage.holder)
        send(keeper, signal.SIGKILL, "the keeper")
        await asyncio.sleep(0.5)
        stage.cluster.start_node(stage.holder)
        self.back = asyncio.create_task(self._wait(stage, stage.holder, keeper, began))

    async def _wait(self, stage: Stage, node: str, keeper: int, began: float) -> None:
        """Until its new supervisor tells of a new keeper."""

        def back() -> bool:
            with contextlib.suppress(FaultError):
                return keeper_of(stage, node) != keeper
            return False

        await stage.watcher.until(back, boot_time() + BACK)
        self.excuses = [Excuse("both-killed", node, began, boot_time() + 1.0)]

    async def heal(self, stage: Stage) -> None:
        await self.back


class StopStandby(ChaosFault):
    name = "stop-standby"
    proves = "A standby hangs: nothing changes, and when it goes on it claims nothing on what it saw before."

    async def inject(self, stage: Stage) -> None:
        self.node = next(name for name in stage.cluster.nodes if name != stage.holder)
        stage.cluster.stop_supervisor(self.node)

    async def heal(self, stage: Stage) -> None:
        stage.cluster.continue_supervisor(self.node)


KINDS: tuple[type[Fault], ...] = (
    CutFromEtcd,
    Mute,
    Deaf,
    Lossy,
    Slow,
    IsolateNode,
    IsolateMember,
    FreezeNode,
    StopSupervisorAndKeeper,
    KillSupervisorAndKeeper,
    StopStandby,
    *(kind for kind in demo.KINDS if kind is not NoFault),
)
NAMES = {kind.name: kind for kind in KINDS}


SUPERVISOR = {kind.name for kind in (KillSupervisor, StopSupervisor)}
KEEPER = {kind.name for kind in (KillKeeper, StopKeeper)}
ALONE = {kind.name for kind in (FreezeNode, StopSupervisorAndKeeper)}
"""Nothing can be started in a frozen cgroup, and what is not promised is measured by itself."""


KILLS = {kind.name for kind in (KillNode, KillEtcdLeaderWithHolder, KillSupervisorAndKeeper)}


def go_together(one: str, other: str) -> bool:
    """May both be played at once? Supervisor and keeper of one node disabled is a fault of its own, and what cannot be
    killed cannot be waited for."""
    both = {one, other}
    if KillSupervisorAndKeeper.name in both and both & (SUPERVISOR | KEEPER | KILLS - {KillSupervisorAndKeeper.name}):
        return False
    unkillable = UnkillableHolder.name in both and bool(both & (SUPERVISOR | KEEPER | KILLS))
    return not both & ALONE and not unkillable and not (both & SUPERVISOR and both & KEEPER)


def thaw(group: Group) -> None:
    fd = os.open("cgroup.freeze", os.O_WRONLY | os.O_CLOEXEC, dir_fd=group.fd)
    try:
        os.write(fd, b"0")
    finally:
        os.close(fd)


def _group_of(stage: Stage, name: str) -> Group:
    group = stage.cluster.nodes[name].group
    if group is None:
        raise FaultError("needs a writable cgroup2 mount (root)")
    return Group.open(group)


def _chaos(stage: Stage) -> ChaosCluster:
    assert isinstance(stage.cluster, ChaosCluster)
    return stage.cluster
