"""What is done to one service's processes: started, signalled, killed, forgotten, all through the keeper.

What is particular to containers is done here too, with supervisor.service.container: the engine is asked before the
start, and where the container stands is looked at after it. Refusals and errors come back as values; what became of the
processes is found out by looking, never by believing.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from election.clock import Clock
from supervisor.config.service import Service
from supervisor.gpu.aside import Aside, StillStuckError
from supervisor.gpu.driver import GpuDriver, GpuFacts
from supervisor.keeper.client import KeeperGone, KeeperRefused, KeeperSilent
from supervisor.keeper.protocol import LOOK, MAIN, SIDECAR
from supervisor.service import container
from supervisor.service.container import ContainerError, OutsideError
from supervisor.service.footprint import Footprint
from supervisor.service.line import Line
from supervisor.service.messages import Ended
from supervisor.service.order import OrderError, Surroundings, make_look_order, make_order, make_sidecar_order
from supervisor.service.ready import NoLookError
from supervisor.service.record import Record

CALL_LIMIT = 2.0
"""Seconds for one answer of the keeper, which never waits for anything itself."""
ORDER_LIMIT = 10.0
"""Seconds for a look-up of the account, which may ask a directory server, and the env_file."""
WANTED_EVERY = 0.05
"""Seconds between looks at whether a container is still wanted, while an engine is waited for."""


NOT_STARTED = (KeeperRefused, KeeperGone, OrderError, StillStuckError, ContainerError, OSError, ValueError)
"""What a start can come to."""

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
        self.pid: int | None = None
        """Of its main process, which may have ended; None while only sidecars run."""
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
        self._looks: dict[str, asyncio.Future[int | None]] = {}
        self._runtime: container.Runtime | None = None
        """Of a service that is a container."""
        self._look: asyncio.Task[None] | None = None
        """At where an adopted container stands."""
        if spec.container is not None:
            labels = container.own_labels(name, shared.where.node, shared.where.run)
            self._runtime = container.Runtime(spec.container, name, labels, shared.clock)

    @property
    def wants_lock(self) -> bool:
        """The GPU's lock is taken with the first start, and kept until its end."""
        return self._spec.lock == "lifetime"

    async def start(self, token: int, sidecar: str | None, wanted: Callable[[], bool]) -> Busy | Ended | int:
        """Its main process, or a sidecar of it. The pid: it runs. Busy: later. Ended: it does not, and why.

        `wanted` is asked again after what may take long, so that nothing starts after a stop.
        """
        if self._runtime is not None and (other := self._lock_holder()) is not None:
            return Busy(f"GPU {self._spec.gpu} is held by {other}")  # no engine is asked once a second meanwhile
        runtime = self._runtime if sidecar is None else None
        try:
            if runtime is not None:
                deadline = self._shared.clock.now() + container.PREPARE_LIMIT
                await self._while_wanted(runtime.prepare(deadline=deadline), wanted)
            size = await self._log_size()
            order = await self._order(token, sidecar)
            if not wanted():
                return Ended("asked to stop", failure=False, graceful=True)
            pid = await self._stand(order)
        except NOT_STARTED as error:
            return self._not_started(error, sidecar)
        if sidecar is None:
            self.pid = pid
        trouble = None if runtime is None else await self._until_placed(runtime, size, wanted)
        return pid if trouble is None else trouble

    async def _stand(self, order: dict[str, Any]) -> int:
        """The keeper starts it; its pid."""
        deadline = self._shared.clock.now() + CALL_LIMIT
        lock = self._spec.gpu if self.wants_lock else None
        self.emptied = self._keeper_lost = False
        reply = await self._shared.keeper.call("start", deadline=deadline, lock=lock, **order)
        if self.footprint is not None:
            self.footprint.close()
        self.footprint = Footprint(reply["pid"], reply["start_ticks"], reply.get("cgroup"))
        self.holds_lock = self.wants_lock
        return int(reply["pid"])

    def _not_started(self, error: Exception, sidecar: str | None) -> Busy | Ended:
        found = self._why_not(error)
        if isinstance(found, Busy):
            return found
        why = found.why if sidecar is None else f"sidecar {sidecar}: {found.why}"
        return replace(found, why=why, graceful=self.footprint is not None)  # sidecars may be up

    def _why_not(self, error: Exception) -> Busy | Ended:
        match error:
            case KeeperRefused():
                return self._refused(error)
            case KeeperSilent():
                self.uncertain = True
                where = "is its log, its cwd or its command on a disk that does not answer?"
                return Ended(f"did not start within {CALL_LIMIT:g} s: {where}")
            case KeeperGone():
                self.refusal, self.uncertain = error, True
                return Ended(f"the keeper did not answer: {error}")
        return Ended(f"cannot be started: {error}")

    async def look(self, look: str, words: Sequence[str], token: int, patience: float) -> str | None:
        """Run a command beside its processes: None if it leaves with 0 within so many seconds, else what it did.
        Raises NoLookError."""
        ended = self._looks[look] = asyncio.get_running_loop().create_future()
        began = self._shared.clock.now()
        deadline = began + patience
        try:
            order = await self._aside(
                lambda: make_look_order(self._name, look, words, self._spec, self._shared.where, token=token)
            )
            await self._shared.keeper.call("start", deadline=deadline, lock=None, **order)
            async with asyncio.timeout_at(deadline):
                status = await ended
        except TimeoutError:
            await self._ask("kill", unit=LOOK + look)
            if self._shared.lost_at() >= began:
                raise NoLookError("its end may have been told to nobody") from None
            return f"`{words[0]}` did not end within {patience:g} s"
        except KeeperRefused as refusal:
            if refusal.error == "running":  # a supervisor before us began it, and it hangs
                await self._ask("kill", unit=LOOK + look)
            if refusal.error != "exec" or refusal.fields.get("stage") == "clone":
                raise NoLookError(str(refusal)) from None
            return f"`{words[0]}`: {refusal.fields.get('message', refusal)}"
        except (KeeperGone, OrderError, StillStuckError, OSError, ValueError) as error:
            raise NoLookError(str(error), lasting=isinstance(error, OrderError)) from None
        finally:
            del self._looks[look]
        if status is None:
            raise NoLookError("its exit code is lost")
        code = os.waitstatus_to_exitcode(status)
        return None if code == 0 else f"`{words[0]}` left with {code}"

    def looked(self, look: str, status: int | None) -> None:
        """A command that looks at it has ended."""
        ended = self._looks.get(look)
        if ended is not None and not ended.done():
            ended.set_result(status)

    def adopt(self, footprint: Footprint, *, holds_lock: bool, empty: bool) -> None:
        """Started by an earlier run of this supervisor, or by an earlier keeper."""
        self.drop()
        self.footprint, self.holds_lock, self.emptied = footprint, holds_lock, empty
        self.pid = footprint.pid or None
        self._keeper_lost = self.uncertain = False
        if self._runtime is not None and footprint.cgroup is not None and self.pid is not None:
            self._look = asyncio.create_task(self._look_at_adopted(self._runtime, footprint), name=f"look-{self._name}")

    async def find(self) -> None:
        """What came of a start that was not answered, as far as the keeper says."""
        try:
            found = (await self._hello())["services"].get(self._name)
        except (KeeperGone, KeeperRefused):
            await self.kill()
            return
        self.uncertain = False
        if found is not None:
            self.adopt(Footprint.of(found), holds_lock=found["lock"] is not None, empty=found["empty"])

    async def terminate(self) -> None:
        """SIGTERM to every process of it; of a container to what runs inside, and not to its client."""
        if self._signal_inside(signal.SIGTERM) == 0:
            await self._ask("signal", signal=int(signal.SIGTERM))
            return
        for name in self._spec.sidecars:
            await self._ask("signal", signal=int(signal.SIGTERM), unit=SIDECAR + name)

    async def drain(self) -> None:
        """Its `drain_signal`, if it has one, to its processes; sidecars and jobs do not know of it."""
        if self._spec.drain_signal is not None:
            signum = signal.Signals[f"SIG{self._spec.drain_signal}"]
            if self._signal_inside(signum) == 0:
                await self._ask("signal", signal=int(signum), unit=MAIN)

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
        self.footprint = self.pid = None

    async def _order(self, token: int, sidecar: str | None) -> dict[str, Any]:
        gpu, parent = self._gpu(), None
        if sidecar is not None:
            side = sidecar
            return await self._aside(
                lambda: make_sidecar_order(self._name, side, self._spec, self._shared.where, token=token, gpu=gpu)
            )
        if self._runtime is not None:
            parent = (await self._hello())["parent"]
        return await self._aside(
            lambda: make_order(self._name, self._spec, self._shared.where, token=token, gpu=gpu, parent=parent)
        )

    def _gpu(self) -> GpuFacts | None:
        if self._spec.gpu is None:
            return None
        gpu = self._shared.gpus.get(self._spec.gpu)
        if gpu is None:
            raise OrderError(f"there is no GPU {self._spec.gpu} on this node")
        return gpu

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

    def _signal_inside(self, signum: signal.Signals) -> int:
        """To what runs in its container; how many got it."""
        if self._runtime is None or self.footprint is None:
            return 0
        return container.signal_inner(self.footprint, signum)

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
            self.holds_lock = (
                self.holds_lock and self.footprint is not None
            )  # the keeper gives the lock back with a start that came to nothing
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
