"""A node's services on a real keeper and simulated GPUs, for tests: no election, no HTTP, terms armed by hand."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from election.clock import BootClock, boot_time
from supervisor import mutex
from supervisor.config.service import Service
from supervisor.gpu.driver import GpuFacts
from supervisor.gpu.simulated import SimulatedDriver, device_file
from supervisor.proc import boot_id
from supervisor.service.manager import Services
from supervisor.service.record import Records
from supervisor.service.states import State
from tests.bed.keeper import PATIENCE, Bed, soon, until

GPUWARD = str(Path(sys.executable).with_name("gpuward"))


def spec(*command: str, **fields: Any) -> Service:
    """A service of our own user that is ready at once and fails fast."""
    quick = {"backoff": (0.3, 0.3, 0.3)}
    given: dict[str, Any] = {"user": os.geteuid(), "ready_after": 0.05, "stop_timeout": 5.0, "restart": quick}
    return Service(command=command, **(given | fields))


def shell(script: str, **fields: Any) -> Service:
    return spec("sh", "-c", script, **fields)


class NodeBed:
    """One node. `events` are the sentences that it told."""

    def __init__(self, bed: Bed, specs: Mapping[str, Service], driver: SimulatedDriver, folder: Path) -> None:
        self.bed = bed
        self.folder = folder
        self.driver = driver
        self.events: list[str] = []
        self.gpus: dict[int, GpuFacts] = {}
        self.token = 0
        self.services = Services(
            specs,
            bed.client,
            clock=BootClock(),
            node="gpu1",
            run=bed.run,
            log=bed.run,
            gpus=self.gpus,
            driver=driver,
            records=Records(bed.run, boot_id(), self.events.append),
            on_event=self.events.append,
        )
        seen, bed.client.on_event = bed.client.on_event, self._keeper_event
        self._seen = seen
        self._locks: list[mutex.LockFile] = []

    @property
    def device(self) -> Path:
        return device_file(self.folder, 0)

    @property
    def lock_file(self) -> Path:
        return self.bed.run / "gpu-0.lock"

    def _keeper_event(self, event: dict[str, Any]) -> None:
        assert self._seen is not None
        self._seen(event)
        self.services.keeper_event(event)

    async def arm(self, token: int, seconds: float = 60.0) -> None:
        """A term, with the lock files of a take-over."""
        self.token = token
        self.gpus.update({gpu.index: gpu for gpu in await self.driver.facts(deadline=soon())})
        await self.bed.arm(token, seconds)
        self._locks = [mutex.create(self.lock_file, token=token, node="gpu1")]
        fds = tuple(lock.fd for lock in self._locks)
        entries = [{"gpu": 0, "path": str(self.lock_file)}]
        await self.bed.call("locks", fds=fds, token=token, locks=entries)

    async def launch(self, token: int = 1) -> None:
        await self.arm(token)
        await self.services.launch(token, deadline=soon())

    async def end(self) -> None:
        """The end of the term: everything killed, the lock files removed."""
        await self.services.stop_all(by=boot_time(), graceful=False)
        await self.bed.call("end", token=self.token, by_ns=int(soon() * 1e9))
        for lock in self._locks:
            lock.remove()
        self._locks = []

    def row(self, name: str) -> dict[str, Any]:
        return next(row for row in self.services.snapshot() if row["name"] == name)

    async def state(self, name: str, *states: State, seconds: float = PATIENCE) -> dict[str, Any]:
        """Its row of the snapshot, once it is in one of these states."""

        def look() -> dict[str, Any] | None:
            return row if (row := self.row(name))["state"] in states else None

        return await until(look, f"{name} in {[state.value for state in states]}; told: {self.events[-8:]}", seconds)

    async def new_pid(self, name: str, old: int) -> int:
        """The pid of its next main process."""

        def look() -> int | None:
            pid: int | None = self.row(name)["pid"]
            return pid if pid not in (None, old) else None

        return await until(look, f"another pid of {name} than {old}; told: {self.events[-8:]}")

    async def file(self, name: str) -> str:
        """The content of a file that a service writes in the run folder, once it ends with a newline."""
        path = self.bed.run / name

        def look() -> str | None:
            text = path.read_text() if path.exists() else ""
            return text if text.endswith("\n") else None

        return await until(look, f"a line in {path}")


@contextlib.asynccontextmanager
async def node_on(bed: Bed, **specs: Service) -> AsyncIterator[NodeBed]:
    """Its monitor runs; at the end everything is stopped."""
    folder = bed.run / "gpu"
    driver = SimulatedDriver(folder)
    node = NodeBed(bed, {name.replace("_", "-"): service for name, service in specs.items()}, driver, folder)
    monitor = asyncio.create_task(node.services.run())
    try:
        yield node
    finally:
        if not bed.client.closed.is_set():
            await node.services.fence_now()
        monitor.cancel()
        await asyncio.gather(monitor, return_exceptions=True)
        for lock in node._locks:
            lock.close()
