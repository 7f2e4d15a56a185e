"""A keeper in virtual time, with processes that exist only here, and that fails the test where the real one would hide
a mistake: it never gives in to a start beside a former run, without a term, after a stop, or in place of a pause.

`Machine` is a node around it: processes, a GPU, its driver. What the supervisor believes plays no part here.
"""

import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from supervisor.gpu.aside import Aside
from supervisor.gpu.driver import GpuFacts, GpuVerdict
from supervisor.keeper.client import KeeperGone, KeeperRefused, KeeperSilent
from supervisor.service.footprint import Footprint

GPU = GpuFacts("GPU-0", 0, 0, Path("/dev/null"), GpuVerdict.HEALTHY, frozenset(), True)
DIES_AFTER = 0.01
"""Seconds from a kill to the end of what can be killed."""


@dataclass
class Process:
    """What one start has put on the machine: its first process, and children that may outlive it."""

    service: str
    pid: int
    lock: int | None
    since: float
    alive: bool = True
    children: int = 0
    deaf: bool = False
    """It ignores SIGTERM."""
    stuck: bool = False
    """It stands in the kernel: no signal ends it before it is let go."""
    killed: bool = False
    answered: bool = False
    """The supervisor has been told that it was started."""
    told_empty: bool = False
    status: int | None = None
    held_back: list[dict[str, Any]] = field(default_factory=list)
    """Events that come after the answer to its start."""

    @property
    def there(self) -> bool:
        return self.alive or self.children > 0

    @property
    def pids(self) -> list[int]:
        return [self.pid] * self.alive + [self.pid * 1000 + number for number in range(self.children)]


@dataclass
class Driver:
    """One GPU. `lists`: pids that the driver has not let go of."""

    gpu: GpuFacts = GPU
    lists: set[int] = field(default_factory=set)
    resets: int = 0
    before_reset: Callable[[], None] = lambda: None

    async def facts(self, *, deadline: float) -> tuple[GpuFacts, ...]:
        await asyncio.sleep(0)
        pids = frozenset(self.lists)
        return (GpuFacts("GPU-0", 0, 0, self.gpu.device, self.gpu.verdict, pids, True),)

    async def reset(self, uuid: str, *, deadline: float) -> None:
        self.before_reset()
        self.resets += 1

    async def ensure_persistence(self, *, deadline: float) -> None:
        return


class Machine:
    """The keeper's side of a node. `tell` gets its events; `may_start` says why a start would be wrong now, or ''."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.token = 0
        self.now: dict[str, Process] = {}
        """As the keeper knows them, until `remove`."""
        self.lock: str | None = None
        """Who holds the lock of GPU 0: a service, or a job of somebody."""
        self.starts: list[Process] = []
        self.given_back: set[str] = set()
        """Services whose lock was given back since their last start."""
        self.next_start: str = ""
        """What becomes of the next start: exec, over, silent, silent and done, gone, or '' for the usual."""
        self.answers_after = 0.0
        self.tell: Callable[[dict[str, Any]], None] = lambda event: None
        self.may_start: Callable[[str], str] = lambda name: ""
        self.violations: list[str] = []
        """What must never happen, and did. Who is refused may believe that it was a failure: so it is noted here."""
        self.driver.before_reset = self._before_reset
        self._pids = 100
        self._by_pid: dict[int, Process] = {}

    def wrong(self, what: str) -> None:
        self.violations.append(what)

    def _before_reset(self) -> None:
        there = [process.service for process in self.now.values() if process.lock is not None and process.there]
        if there or self.driver.lists:
            self.wrong(f"the GPU is reset while {there or self.driver.lists} are on it")

    # The keeper's protocol.

    async def call(self, op: str, *, deadline: float, **fields: Any) -> dict[str, Any]:
        """As KeeperClient.call."""
        if op == "start":
            return await self._start(deadline, **fields)
        if op == "hello":
            await asyncio.sleep(self.answers_after)
            services, held = self.hello()
            return {"services": services, "held": held}
        process = self.now.get(fields["service"])
        await asyncio.sleep(self.answers_after)
        if process is None or self.now.get(fields["service"]) is not process:
            raise KeeperRefused("no-such-service", {})
        if op == "signal":
            self._signal(process, fields["signal"])
        elif op == "kill":
            self._kill(process)
        elif op in {"remove", "release"}:
            self._give_back(op, process)
        else:
            raise AssertionError(f"an unknown request: {op}")
        return {}

    async def _start(self, deadline: float, **fields: Any) -> dict[str, Any]:
        name, lock = fields["service"], fields["lock"]
        how, self.next_start = self.next_start, ""
        before = self.now.get(name)
        wrong = self.may_start(name)
        if wrong:
            self.wrong(f"{name} is started {wrong}")
        if how == "gone":
            raise KeeperGone("the connection broke")
        if how == "silent":
            await self._silence(deadline)
        if how == "over" or fields["token"] != self.token:
            raise KeeperRefused("no-term", {})
        if before is not None and before.there:
            if before.answered:
                self.wrong(f"{name} is started beside its former run, of which {before.pids} are there")
            raise KeeperRefused("running", {"pid": before.pid})
        if lock is not None and self.lock not in (None, name):
            raise KeeperRefused("busy", {"holder": {"service": self.lock, "pid": 1}})
        if how == "exec":
            self.now.pop(name, None)
            self.given_back.discard(name)
            self._free(name)
            raise KeeperRefused("exec", {"stage": "exec", "message": "No such file or directory"})
        process = self._make(name, lock)
        if how == "silent and done":
            await self._silence(deadline)
        await asyncio.sleep(self.answers_after)
        process.answered = True
        for event in process.held_back:  # one read of the socket has the answer and what follows it
            self.tell(event)
        return {"pid": process.pid, "start_ticks": process.pid, "cgroup": None}

    async def _silence(self, deadline: float) -> None:
        await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time()))
        raise KeeperSilent("start: no answer by the deadline")

    def _make(self, name: str, lock: int | None) -> Process:
        self._pids += 1
        self.given_back.discard(name)
        process = Process(name, self._pids, lock, asyncio.get_running_loop().time())
        if lock is not None and self.lock is None:
            self.lock = name
            self.tell({"event": "lock-taken", "gpu": 0, "holder": {"service": name, "pid": process.pid}})
        self.now[name] = self._by_pid[process.pid] = process
        self.starts.append(process)
        return process

    def _signal(self, process: Process, number: int) -> None:
        if number == signal.SIGTERM and not process.deaf and not process.stuck:
            self.die(process, number)

    def _kill(self, process: Process) -> None:
        process.killed = True
        if not process.stuck:
            asyncio.get_running_loop().call_later(DIES_AFTER, self.die, process, int(signal.SIGKILL))

    def _give_back(self, op: str, process: Process) -> None:
        if process.there:
            if op == "release":
                self.wrong(f"the lock of {process.service} is given back while {process.pids} are there")
            raise KeeperRefused("not-empty", {})
        if self.lock == process.service:
            self.given_back.add(process.service)
        self._free(process.service)
        if op == "remove":
            del self.now[process.service]

    def _free(self, name: str) -> None:
        if self.lock == name:
            self.lock = None
            self.tell({"event": "lock-free", "gpu": 0})

    # What happens on the machine.

    def die(self, process: Process, number: int) -> None:
        """All of it ends by a signal."""
        process.children = 0
        self.exit(process, number)

    def exit(self, process: Process, status: int) -> None:
        """Its first process ends; its children, if any, live on."""
        if process.alive:
            process.alive, process.status = False, status
            self._event(process, {"event": "exited", "service": process.service, "pid": process.pid, "status": status})
        self.look(process)

    def look(self, process: Process) -> None:
        """Tell that it is empty, once."""
        if not process.there and not process.told_empty:
            process.told_empty = True
            self._event(process, {"event": "empty", "service": process.service})

    def let_go(self, process: Process) -> None:
        """It stands in the kernel no more: a pending kill takes it."""
        process.stuck = False
        if process.killed:
            self.die(process, int(signal.SIGKILL))

    def take(self, who: str) -> None:
        """A job takes the lock."""
        self.lock = who
        self.tell({"event": "lock-taken", "gpu": 0, "holder": {"service": who, "pid": 2}})

    def leave(self, who: str) -> None:
        self._free(who)

    def end_term(self) -> None:
        """Everything that can be killed is dead, and the keeper has forgotten all of it."""
        self.token += 1
        for process in self.now.values():
            process.alive, process.children = process.stuck, 0
        self.now, self.lock = {}, None

    def hello(self) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """`services` and `held`, as a supervisor that comes back gets them."""
        rows = {
            name: {
                "pid": process.pid,
                "start_ticks": process.pid,
                "cgroup": None,
                "running": process.alive,
                "empty": not process.there,
                "lock": process.lock,
                "since_ns": int(process.since * 1e9),
                "status": process.status,
                "ready": False,
            }
            for name, process in self.now.items()
        }
        for process in self.now.values():
            process.answered = True
        return rows, [] if self.lock is None else [{"gpu": 0, "holder": {"service": self.lock}}]

    def _event(self, process: Process, event: dict[str, Any]) -> None:
        if self.now.get(process.service) is not process:
            return
        if process.answered:
            self.tell(event)
        else:
            process.held_back.append(event)

    def footprint(self, found: Footprint) -> Process:
        return self._by_pid[found.pid]


def stand_in_for(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """Processes are looked for in `machine`, and what blocks is done at once: virtual time waits for no thread."""

    async def at_once(self: Aside, work: Callable[[], Any], *, deadline: float) -> Any:
        await asyncio.sleep(machine.answers_after)
        return work()

    patch.setattr(Footprint, "pids", lambda self: machine.footprint(self).pids)
    patch.setattr(Footprint, "empty", lambda self: not machine.footprint(self).there)
    patch.setattr(Footprint, "kill", lambda self: machine._kill(machine.footprint(self)))
    patch.setattr(Footprint, "frozen", lambda self: False)
    patch.setattr(Footprint, "close", lambda self: None)
    patch.setattr(Aside, "read", at_once)


class AtOnce(ThreadPoolExecutor):
    """For `loop.set_default_executor`: work is done when it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done
