"""Faults of the store, and what operators and strangers do there."""

import asyncio
import signal

from election.clock import BootClock, boot_time
from election.requests import RefusedError, Requests
from election.store import Delete, Put, Txn
from supervisor.demo.fault import STORE_CALL, Fault, FaultError, Stage, start_if_down


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
        start_if_down(stage)
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
