"""What a fault of `gpuward demo` is, and what it works on."""

import os
import signal
from dataclasses import dataclass
from typing import ClassVar

from election.store import LockStore
from supervisor.demo.cluster import DemoCluster
from supervisor.demo.watch import Status, Watcher

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
    needs_root: ClassVar[bool] = False
    small_disks: ClassVar[bool] = False
    own_clocks: ClassVar[bool] = False
    """What it needs of the cluster: see DemoCluster."""

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


def keeper_of(stage: Stage, name: str) -> int:
    """Pid of a node's keeper, as its supervisor tells it. Raises FaultError."""
    pid = ((stage.watcher.statuses[name] or {}).get("keeper") or {}).get("pid")
    if not pid:
        raise FaultError(f"{name} has no keeper")
    return int(pid)


def pids_of(status: Status) -> dict[str, int]:
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


def start_if_down(stage: Stage) -> None:
    if not stage.cluster.nodes[stage.holder].running:
        stage.cluster.start_node(stage.holder)
