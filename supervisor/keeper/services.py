"""Services: started, watched by pidfd and by their cgroup, signalled, killed. Nothing here waits."""

import contextlib
import os
import select
import signal
from collections.abc import Callable
from typing import Any

from supervisor import proc
from supervisor.keeper import spawn
from supervisor.keeper.kernel import boot_ns
from supervisor.keeper.left import LeftProcess, LeftService
from supervisor.keeper.locks import Busy, Lock, holder_of
from supervisor.keeper.loop import Loop, rearm
from supervisor.keeper.places import Box, TermPlace
from supervisor.keeper.protocol import SIDECAR

Reply = Callable[..., None]
"""reply(error: str | None, **fields): the answer to one request."""
Event = Callable[..., None]
"""event(name, **fields)"""


class Process:
    """One process started by us, in its last start."""

    def __init__(self) -> None:
        self.pid = 0
        self.start_ticks = 0
        self.running = False
        """It has not been reaped yet."""
        self.since_ns = 0
        """Boot time of its start."""
        self.ready = False
        """It, or one that it started, has said READY=1."""
        self.status: int | None = None
        """How it ended, as wait(2) gives it."""
        self.hear: Callable[[], None] | None = None
        """Until exec has happened or failed: reads the child's report, if there is one."""

    def tell(self) -> dict[str, Any]:
        """What `hello` says of any process."""
        return {
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "running": self.running,
            "status": self.status,
            "ready": self.ready,
        }


class Service(Process):
    """One service of the term, from its start until `remove`: its first process, with what belongs to all of it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.box: Box | None = None
        self.units: dict[str, Process] = {}
        """What was started in its box besides its first process: sidecars, and looks from inside."""
        self.expected = False
        """Its box was made for sidecars, and its first process is still to come."""
        self.occupied = False
        """`empty` has not been told yet."""
        self.lock: Lock | None = None
        self.lock_fd: int | None = None

    def unit_of(self, process: Process) -> str | None:
        """None: it is the first process, or of an earlier start."""
        return next((unit for unit, found in self.units.items() if found is process), None)

    def no_room_for(self, unit: str | None) -> str:
        """Why this may not be started in it now; empty: it may."""
        if unit is None:
            taken = self.running or (self.occupied and not self.expected)
            return f"{self.name} runs already, pid {self.pid}" if taken else ""
        if (found := self.units.get(unit)) is not None and found.running:
            return f"{unit} of {self.name} runs already, pid {found.pid}"
        if is_sidecar(unit):
            taken = self.running or (self.occupied and not self.expected)
            return f"{self.name} runs already, pid {self.pid}: a sidecar starts before it" if taken else ""
        return "" if self.running else f"{self.name} does not run"

    def summary(self) -> dict[str, Any]:
        """What `hello` says of it."""
        return {
            **self.tell(),
            "cgroup": None if self.box is None else self.box.cgroup,
            "empty": not self.occupied,
            "lock": None if self.lock is None else self.lock.gpu,
            "since_ns": self.since_ns,
            "units": {unit: process.tell() for unit, process in self.units.items() if is_sidecar(unit)},
        }


class Services:
    """All services of the present term."""

    def __init__(self, loop: Loop, event: Event, weak: bool, remember: Callable[[], None]) -> None:
        """`remember` is called before the supervisor is told of a start: by then the next keeper knows it too."""
        self._loop = loop
        self._event = event
        self._remember = remember
        self._weak = weak
        self.all: dict[str, Service] = {}
        self.ending = False
        """Their term ends: what is killed before its exec looks as if it had got there."""
        self._children: dict[int, tuple[int, Service, Process]] = {}
        """pid → (pidfd, service, process): every child that is not reaped yet, also of a term that is over."""
        self._leaving: dict[str, Box] = {}
        """Boxes whose last process was still on its way out when they were dropped."""

    def start(
        self, term: TermPlace, name: str, unit: str | None, order: spawn.Order, lock: Lock | None, reply: Reply
    ) -> None:
        """Start it, or with `unit` something beside it; the reply comes when exec has happened or failed."""
        service = self.all.get(name) or Service(name)
        if why := service.no_room_for(unit):
            reply("running", why, pid=service.pid)
            return
        if service.box is not None and not service.running and not service.expected:
            self._drop_box(service)
        if unit is None or is_sidecar(unit):
            try:
                taken = self._take(service, lock, term.token)
            except Busy as busy:
                reply("busy", f"the lock of GPU {lock.gpu if lock else '?'} is held", holder=busy.holder)
                return
        else:
            taken = False
        try:
            process, child = self._spawn(term, service, unit, order)
        except OSError as error:
            self._abandon(service, taken)
            reply("exec", f"no child: {error}", stage="clone", errno=error.errno)
            return
        except BaseException:
            self._abandon(service, taken)
            raise
        self.all[name] = service
        self._watch(service, process, child, taken, reply)

    def _take(self, service: Service, lock: Lock | None, token: int) -> bool:
        """Take the lock unless the service has it still from before (kill, reset and restart keep it)."""
        if lock is service.lock:
            return False
        self.release(service)
        if lock is None:
            return False
        service.lock_fd = lock.take(holder_of(service.name, 0, token))
        service.lock = lock
        return True

    def _spawn(
        self, term: TermPlace, service: Service, unit: str | None, order: spawn.Order
    ) -> tuple[Process, spawn.Child]:
        leaving = self._leaving.pop(service.name, None)
        if leaving is not None:
            leaving.close()
        if service.box is None:
            service.box, service.units, service.expected = term.service(service.name), {}, unit is not None
            self._watch_box(service)
        process = service if unit is None else service.units.setdefault(unit, Process())
        child = _born(service, unit, order, die_with_keeper=self._weak)
        found = proc.stat(child.pid)
        process.pid = child.pid
        process.start_ticks = 0 if found is None else found.start_ticks
        process.since_ns = boot_ns()
        process.status, process.ready = None, False
        process.running = service.occupied = True
        service.expected = service.expected and unit is not None
        service.box.started(child.pid, unit)
        return process, child

    def _watch(self, service: Service, process: Process, child: spawn.Child, taken: bool, reply: Reply) -> None:
        def hear() -> None:
            with contextlib.suppress(BlockingIOError):
                failure = spawn.read_report(child.report)
                process.hear = None
                self._loop.remove(child.report)
                os.close(child.report)

                def tell() -> None:
                    process.hear = None
                    self._started(service, process, failure, taken, reply)

                if failure is None or not process.running:
                    tell()
                else:
                    process.hear = tell  # once it is reaped: until then it has its GPU's lock open

        def reported(_: int) -> None:
            if process.hear is hear:
                hear()

        process.hear = hear

        self._watch_process(service, process, child.pidfd)
        self._loop.add(child.report, reported)

    def adopt(self, name: str, box: Box, row: LeftService | None, held: tuple[Lock, int] | None) -> None:
        """What an earlier keeper started. `row` None: its first process is not known."""
        self.all[name] = service = Service(name)
        service.box, service.occupied = box, box.populated()
        if held is not None:
            service.lock, service.lock_fd = held
        self._watch_box(service)
        if row is None:
            return
        service.since_ns = row.since_ns
        self._adopt_process(service, service, row.process)
        for unit, found in row.units.items():
            service.units[unit] = Process()
            self._adopt_process(service, service.units[unit], found)

    def _adopt_process(self, service: Service, process: Process, found: LeftProcess) -> None:
        process.pid, process.start_ticks, process.ready = found
        pidfd = proc.open_pidfd(found.pid, found.start_ticks)
        if pidfd is None:
            return
        if service.box is not None and service.box.holds(found.pid):
            process.running = True
            self._watch_process(service, process, pidfd)
        else:
            os.close(pidfd)

    def _watch_process(self, service: Service, process: Process, pidfd: int) -> None:
        pid = process.pid
        self._children[pid] = (pidfd, service, process)
        self._loop.add(pidfd, lambda _: self.reap(pid))

    def _watch_box(self, service: Service) -> None:
        box = service.box
        if box is not None and box.events is not None:
            events = box.events
            self._loop.add(events, lambda _: self._stirred(service, events), select.EPOLLPRI)

    def _started(
        self, service: Service, process: Process, failure: tuple[str, int] | None, taken: bool, reply: Reply
    ) -> None:
        if self.ending or self.all.get(service.name) is not service:
            reply("over", f"the term ended while {service.name} was being started")
            return
        if failure is None:
            if process is service:
                self._name_holder(service)
            cgroup = None if service.box is None else service.box.cgroup
            self._remember()
            reply(None, "", pid=process.pid, start_ticks=process.start_ticks, cgroup=cgroup)
            return
        if service.units:
            if taken:
                self.release(service)
        else:
            del self.all[service.name]
            self._abandon(service, taken)
        stage, code = failure
        text = os.strerror(code) if stage == "exec" else f"{stage}: {os.strerror(code)}"
        reply("exec", text, stage=stage, errno=code)

    def _name_holder(self, service: Service) -> None:
        lock = service.lock
        if lock is not None and lock.holder is not None:
            lock.holder = {**lock.holder, "pid": service.pid}
            lock.describe()  # kept through a restart, with a new first process
            self._event("lock-taken", gpu=lock.gpu, holder=lock.holder, since_ns=lock.taken_ns)

    def _abandon(self, service: Service, taken: bool) -> None:
        """A start that came to nothing: the lock goes back if it was taken for it."""
        if taken or service.name not in self.all:
            self.release(service)
        if service.box is not None and not service.occupied:
            self._drop_box(service)

    def _stirred(self, service: Service, events: int) -> None:
        rearm(events)
        self.look(service)

    def look(self, service: Service) -> None:
        """Tell `empty` once, after `exited`."""
        if service.occupied and not service.running and not (service.box and service.box.populated()):
            service.occupied = service.expected = False
            if self.all.get(service.name) is service:
                self._event("empty", service=service.name)

    def look_at_all(self) -> None:
        """For containment without events, and as a slow check otherwise."""
        for service in list(self.all.values()):
            self.look(service)
        self._leaving = {name: box for name, box in self._leaving.items() if not box.discard()}

    def reap(self, pid: int) -> None:
        """The child `pid` has ended."""
        pidfd, service, process = self._children[pid]
        status: int | None = None
        try:
            ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
            if ended is None:
                return
            status = _wait_status(ended.si_code, ended.si_status)
        except ChildProcessError:  # not our child (`adopt`), or somebody else reaped it: its status is lost
            if not proc.pidfd_exited(pidfd):
                return
        del self._children[pid]
        self._loop.remove(pidfd)
        os.close(pidfd)
        process.running, process.status = False, status
        if process.hear is not None:
            process.hear()  # the answer to `start` comes before `exited`
        if self.all.get(service.name) is service:
            self._event("exited", service=service.name, unit=service.unit_of(process), pid=pid, status=status)
            self.look(service)

    def reap_orphans(self) -> None:
        """As subreaper: reap what became our child. Bounded: SIGCHLD comes again."""
        for _ in range(1000):
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in self._children:
                self.reap(ended.si_pid)
            else:
                os.waitpid(ended.si_pid, os.WNOHANG)

    def whose(self, pid: int) -> tuple[Service, str | None] | None:
        """The service in whose box this process stands now, its jobs included, and the unit there that is its own."""
        path = None if self._weak else proc.cgroup_path(pid)
        for service in self.all.values():
            box = service.box
            if box is None or (path is None and not self._weak):
                continue
            if self._weak and box.holds(pid):
                return service, box.unit_of(pid)
            if path is not None and path.startswith(f"{box.cgroup}/"):
                return service, box.unit_of(pid)
        return None

    def ready(self, process: Process) -> None:
        """It has said READY=1."""
        if not process.ready:
            process.ready = True
            self._remember()

    def signal(self, service: Service, unit: str | None, signum: int) -> int:
        """A signal to every process of the service, or of one unit, each proven by pidfd and place; how many got it."""
        count = 0
        box = service.box
        for pid, ticks in [] if box is None else box.members():
            pidfd = proc.open_pidfd(pid, ticks)
            if pidfd is not None:
                try:
                    if box is not None and box.holds(pid) and (unit is None or box.unit_of(pid) == unit):
                        count += proc.send(pidfd, signum)
                finally:
                    os.close(pidfd)
        return count

    def kill(self, service: Service, unit: str | None) -> None:
        """SIGKILL to all of it, or to one unit. Nothing can be born in a box that was killed (spawn.birth_works)."""
        if service.box is not None and unit is not None:
            service.box.kill_unit(unit)
        elif service.box is not None:
            service.expected = False
            service.box.kill()

    def release(self, service: Service) -> None:
        """Close our duplicate of its lock."""
        if service.lock is not None and service.lock_fd is not None:
            gpu = service.lock.gpu
            service.lock.left(service.lock_fd)
            service.lock = service.lock_fd = None
            self._remember()
            self._event("lock-free", gpu=gpu)
        service.lock = service.lock_fd = None

    def remove(self, service: Service) -> None:
        """Forget an empty service."""
        self.release(service)
        self._drop_box(service)
        del self.all[service.name]

    def drop_all(self, term_removed: bool) -> None:
        """The term is over. Locks of what still lives are kept."""
        for service in list(self.all.values()):
            if term_removed or service.box is None or not service.box.populated():
                self.release(service)
                if service.box is not None:
                    self._loop.remove(service.box.events)
                del self.all[service.name]
        for box in self._leaving.values():
            box.close()
        self._leaving.clear()

    def _drop_box(self, service: Service) -> None:
        if service.box is not None:
            self._loop.remove(service.box.events)
            if not service.box.discard():
                self._leaving[service.name] = service.box
            service.box = None


def _born(service: Service, unit: str | None, order: spawn.Order, *, die_with_keeper: bool) -> spawn.Child:
    """A child in the service's box; only its first process gets the lock."""
    assert service.box is not None
    box, folder = service.box, None
    lock_fd = service.lock_fd if unit is None else None
    if unit is not None:
        folder = box.unit(unit)
    try:
        fd = box.clone_fd if folder is None else folder.fd
        return spawn.spawn(order, cgroup_fd=fd, direct=box.direct, lock_fd=lock_fd, die_with_keeper=die_with_keeper)
    finally:
        if folder is not None:
            folder.close()


def is_sidecar(unit: str) -> bool:
    """A part of the service that starts before its first process; else a look from inside."""
    return unit.startswith(SIDECAR)


def _wait_status(code: int, status: int) -> int:
    """A waitid result as wait(2) would give it."""
    if code == os.CLD_EXITED:
        return status << 8
    return status | (0x80 if code == os.CLD_DUMPED else 0)


def check_signal(signum: object) -> int:
    """A signal number of the protocol. Raises ValueError."""
    if isinstance(signum, bool) or not isinstance(signum, int) or signum not in signal.valid_signals():
        raise ValueError(f"signal: expected a signal number, got {signum!r}")
    return signum
