"""What is done to one service's processes: started, signalled, killed, forgotten, all through the keeper.

What is particular to containers is done here too, with supervisor.service.container: the engine is asked before the
start, and where the container stands is looked at after it. Refusals and errors come back as values; what became of the
processes is found out by looking, never by believing.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from election.clock import Clock
from supervisor.config.schema import Service
from supervisor.gpu.aside import Aside, StillStuckError
from supervisor.gpu.driver import GpuDriver, GpuFacts
from supervisor.keeper.client import KeeperGone, KeeperRefused, KeeperSilent
from supervisor.service import container
from supervisor.service.container import ContainerError, OutsideError
from supervisor.service.footprint import Footprint
from supervisor.service.line import Line
from supervisor.service.messages import Ended
from supervisor.service.order import OrderError, Surroundings, make_order
from supervisor.service.record import Record

CALL_LIMIT = 2.0
"""Seconds for one answer of the keeper, which never waits for anything itself."""
ORDER_LIMIT = 10.0
"""Seconds for a look-up of the account, which may ask a directory server, and the env_file."""
WANTED_EVERY = 0.05
"""Seconds between looks at whether a container is still wanted, while an engine is waited for."""


T = TypeVar("T")


class Keeper(Protocol):
    """The part of KeeperClient that is used here."""

    async def call(self, op: str, *, deadline: float, **fields: Any) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Shared:
    """What all services of a node have in common."""

    keeper: Keeper
    clock: Clock
    where: Surroundings
    gpus: Mapping[int, GpuFacts]
    driver: GpuDriver
    lines: Mapping[int, Line]
    keep: Callable[[str, Record], None]
    """Write what a restarted supervisor must know of this service."""
    missing: Callable[[Sequence[str]], list[str]]
    """Which of these services are not running, each with its state."""
    lost_at: Callable[[], float]
    """When messages of services were last lost (boot-time seconds)."""
    wake: Callable[[str], None]
    """Look again, you of this name: it may be your turn."""
    tell: Callable[[str], None]


@dataclass(frozen=True)
class Busy:
    """Not started: another has the lock of its GPU."""

    why: str


class Hand:
    """One service's processes, of one start after the other."""

    def __init__(self, name: str, spec: Service, shared: Shared) -> None:
        self.footprint: Footprint | None = None
        self.holds_lock = False
        self.emptied = False
        """The keeper has said `empty` since the last start."""
        self.uncertain = False
        """The keeper may have processes of it that we were not told of."""
        self.refusal: Exception | None = None
        """Why the keeper starts nothing at all any more, if so."""
        self._name = name
        self._spec = spec
        self._shared = shared
        self._lane = Aside(f"order-{name}")
        self._keeper_lost = False
        self._runtime: container.Runtime | None = None
        """Of a service that is a container."""
        self._look: asyncio.Task[None] | None = None
        """At where an adopted container stands."""
        if spec.container is not None:
            labels = container.own_labels(name, shared.where.node, shared.where.run)
            self._runtime = container.Runtime(spec.container, name, labels, shared.clock)

    @property
    def wants_lock(self) -> bool:
        """The GPU's lock is taken with the start, and kept until its end."""
        return self._spec.lock == "lifetime"

    async def start(self, token: int, wanted: Callable[[], bool]) -> Busy | Ended | None:
        """None: it runs (`footprint`). Busy: later. Ended: it does not, and why.

        `wanted` is asked again after what may take long, so that nothing starts after a stop.
        """
        self.emptied = self._keeper_lost = False
        if self._runtime is not None and (other := self._lock_holder()) is not None:
            return Busy(f"GPU {self._spec.gpu} is held by {other}")  # no engine is asked once a second meanwhile
        try:
            if self._runtime is not None:
                deadline = self._shared.clock.now() + container.PREPARE_LIMIT
                await self._while_wanted(self._runtime.prepare(deadline=deadline), wanted)
            size = await self._log_size()
            order = await self._order(token)
            if not wanted():
                return Ended("asked to stop", failure=False)
            deadline = self._shared.clock.now() + CALL_LIMIT
            lock = self._spec.gpu if self.wants_lock else None
            reply = await self._shared.keeper.call("start", deadline=deadline, lock=lock, **order)
        except KeeperRefused as refusal:
            return self._refused(refusal)
        except KeeperSilent:
            self.uncertain = True
            where = "is its log, its cwd or its command on a disk that does not answer?"
            return Ended(f"did not start within {CALL_LIMIT:g} s: {where}")
        except KeeperGone as error:
            self.refusal, self.uncertain = error, True
            return Ended(f"the keeper did not answer: {error}")
        except (OrderError, StillStuckError, ContainerError, OSError, ValueError) as error:
            return Ended(f"cannot be started: {error}")
        self.footprint = Footprint(reply["pid"], reply["start_ticks"], reply.get("cgroup"))
        self.holds_lock = self.wants_lock
        return None if self._runtime is None else await self._until_placed(self._runtime, size, wanted)

    def adopt(self, footprint: Footprint, *, holds_lock: bool, empty: bool) -> None:
        """Started by an earlier run of this supervisor, or by an earlier keeper."""
        self.drop()
        self.footprint, self.holds_lock, self.emptied = footprint, holds_lock, empty
        self._keeper_lost = self.uncertain = False
        if self._runtime is not None and footprint.cgroup is not None:
            self._look = asyncio.create_task(self._look_at_adopted(self._runtime, footprint), name=f"look-{self._name}")

    async def terminate(self) -> None:
        """SIGTERM to every process of it."""
        await self._signal(signal.SIGTERM)

    async def drain(self) -> None:
        """Its `drain_signal`, if it has one, to every process of it."""
        if self._spec.drain_signal is not None:
            await self._signal(signal.Signals[f"SIG{self._spec.drain_signal}"])

    async def kill(self) -> None:
        """SIGKILL to every process of it; by ourselves where the keeper does not do it."""
        self.uncertain = False
        if not await self._ask("kill") and self.footprint is not None:
            self.footprint.kill()

    def empty(self) -> bool:
        """Nothing of it is left: as the kernel shows it, and (while there is one) as the keeper has said."""
        if self.footprint is None:
            return True
        return self.footprint.empty() and (self.emptied or self._keeper_lost)

    async def forget(self) -> None:
        """It is empty: its lock is freed and its cgroup removed."""
        self.drop()
        self.holds_lock = False
        await self._ask("remove")

    def drop(self) -> None:
        """It is empty, and about to be started again: its lock is kept."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if self.footprint is not None:
            self.footprint.close()
        self.footprint = None

    async def _order(self, token: int) -> dict[str, Any]:
        gpu = parent = None
        if self._spec.gpu is not None:
            gpu = self._shared.gpus.get(self._spec.gpu)
            if gpu is None:
                raise OrderError(f"there is no GPU {self._spec.gpu} on this node")
        if self._runtime is not None:
            parent = (await self._hello())["parent"]
        return await self._aside(
            lambda: make_order(self._name, self._spec, self._shared.where, token=token, gpu=gpu, parent=parent)
        )

    async def _until_placed(self, runtime: container.Runtime, size: int, wanted: Callable[[], bool]) -> Ended | None:
        """Until the container runs where it must, its client has ended, or nobody wants it any more."""
        assert self.footprint is not None
        deadline = self._shared.clock.now() + container.START_LIMIT
        try:
            await self._while_wanted(runtime.until_placed(self.footprint, deadline=deadline), wanted)
            if self.footprint.empty():
                said = await self._failure_said(size)
                return None if said is None else Ended(f"did not start: {said}")
        except (ContainerError, StillStuckError, OSError) as error:
            return Ended(f"did not start: {error}")
        finally:
            with contextlib.suppress(StillStuckError, OSError):
                await self._aside(container.env_file(self._shared.where.run, self._name).unlink)
        return None

    async def _while_wanted(self, work: Coroutine[None, None, None], wanted: Callable[[], bool]) -> None:
        """It is given up when nobody wants the service any more: a stop waits for no engine."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done() and wanted():
                await asyncio.wait({task}, timeout=WANTED_EVERY)
            if task.done():
                task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _failure_said(self, size: int) -> str | None:
        """Why there was no container, as its client has said."""
        with contextlib.suppress(KeeperRefused, KeeperSilent, KeeperGone, StillStuckError, OSError, KeyError):
            status = (await self._hello())["services"][self._name]["status"]
            return await self._aside(lambda: container.failure_said(status, self._log, size))
        return None

    async def _look_at_adopted(self, runtime: container.Runtime, footprint: Footprint) -> None:
        """Its start may have been under way when the supervisor before us was killed."""
        try:
            await runtime.until_placed(footprint, deadline=self._shared.clock.now() + container.START_LIMIT)
        except OutsideError as error:
            self._shared.tell(f"{self._name}: {error}")
            await self.kill()
        except (ContainerError, StillStuckError, OSError) as error:
            self._shared.tell(f"{self._name}: adopted, but where its container stands is not known: {error}")

    async def _signal(self, signum: signal.Signals) -> None:
        """To what runs in a container, without its client; to all of any other service."""
        if self._runtime is None or self.footprint is None or container.signal_inner(self.footprint, signum) == 0:
            await self._ask("signal", signal=int(signum))

    async def _hello(self) -> dict[str, Any]:
        return await self._shared.keeper.call("hello", deadline=self._shared.clock.now() + CALL_LIMIT)

    async def _log_size(self) -> int:
        """Bytes before what a container's client will say."""
        if self._runtime is None:
            return 0
        return await self._aside(lambda: self._log.stat().st_size if self._log.exists() else 0)

    async def _aside(self, work: Callable[[], T]) -> T:
        return await self._lane.read(work, deadline=self._shared.clock.now() + ORDER_LIMIT)

    @property
    def _log(self) -> Path:
        return self._shared.where.log / f"{self._name}.log"

    def _lock_holder(self) -> str | None:
        if self._spec.gpu is None or not self.wants_lock or self.holds_lock:
            return None
        return self._shared.lines[self._spec.gpu].other_holder(self._name, since=self._shared.clock.now())

    def _refused(self, refusal: KeeperRefused) -> Busy | Ended:
        if refusal.error == "busy":
            holder = refusal.fields.get("holder") or {}
            who = f"{holder.get('service', 'a process outside gpuward')} (pid {holder.get('pid', 'unknown')})"
            return Busy(f"GPU {self._spec.gpu} is held by {who}")
        if refusal.error in {"no-term", "over", "deadline"}:
            self.refusal = refusal
            return Ended(f"the keeper starts nothing now: {refusal}", failure=False, refused=True)
        if refusal.error == "exec":
            self.holds_lock = False  # the keeper gives the lock back with a start that came to nothing
            return Ended(f"did not start: its command: {refusal.fields.get('message', refusal)}")
        self.uncertain = refusal.error == "running"
        return Ended(f"did not start: {refusal}")

    async def _ask(self, op: str, **fields: Any) -> bool:
        """A request whose refusal changes nothing: its effect is found out by looking."""
        try:
            deadline = self._shared.clock.now() + CALL_LIMIT
            await self._shared.keeper.call(op, deadline=deadline, service=self._name, **fields)
        except KeeperRefused as refusal:
            if refusal.error == "no-such-service":  # its term has ended: the keeper will say no more about it
                self._keeper_lost = True
            return False
        except KeeperGone as error:
            self._keeper_lost = True
            self._shared.tell(f"{self._name}: the keeper did not {op}: {error}")
            return False
        return True
