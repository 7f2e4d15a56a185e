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
from supervisor.keeper.left import LeftService
from supervisor.keeper.locks import Busy, Lock, holder_of
from supervisor.keeper.loop import Loop, rearm
from supervisor.keeper.places import Box, TermPlace

Reply = Callable[..., None]
"""reply(error: str | None, **fields): the answer to one request."""
Event = Callable[..., None]
"""event(name, **fields)"""


class Service:
    """One service of the term, from its start until `remove`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.box: Box | None = None
        self.pid = 0
        self.start_ticks = 0
        self.running = False
        """Its first process has not been reaped yet."""
        self.occupied = False
        """`empty` has not been told yet."""
        self.lock: Lock | None = None
        self.lock_fd: int | None = None
        self.since_ns = 0
        """Boot time of its start."""
        self.ready = False
        """It has said READY=1."""
        self.status: int | None = None
        """How its first process ended, as wait(2) gives it."""
        self.hear: Callable[[], None] | None = None
        """Until exec has happened or failed: reads the child's report, if there is one."""

    def summary(self) -> dict[str, Any]:
        """What `hello` says of it."""
        return {
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "cgroup": None if self.box is None else self.box.cgroup,
            "running": self.running,
            "empty": not self.occupied,
            "lock": None if self.lock is None else self.lock.gpu,
            "since_ns": self.since_ns,
            "status": self.status,
            "ready": self.ready,
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
        self._children: dict[int, tuple[int, Service]] = {}
        """pid → (pidfd, service): every child that is not reaped yet, also of a term that is over."""
        self._leaving: dict[str, Box] = {}
        """Boxes whose last process was still on its way out when they were dropped."""

    def start(self, term: TermPlace, name: str, order: spawn.Order, lock: Lock | None, reply: Reply) -> None:
        """Start it; the reply comes when exec has happened or failed."""
        service = self.all.get(name)
        if service is not None and (service.running or service.occupied):
            reply("running", f"{name} runs already, pid {service.pid}", pid=service.pid)
            return
        if service is None:
            service = Service(name)
        elif service.box is not None:
            self._drop_box(service)
        try:
            taken = self._take(service, lock, term.token)
        except Busy as busy:
            reply("busy", f"the lock of GPU {lock.gpu if lock else '?'} is held", holder=busy.holder)
            return
        try:
            child = self._spawn(term, service, order)
        except OSError as error:
            self._abandon(service, taken)
            reply("exec", f"no child: {error}", stage="clone", errno=error.errno)
            return
        except BaseException:
            self._abandon(service, taken)
            raise
        self.all[name] = service
        self._watch(service, child, taken, reply)

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

    def _spawn(self, term: TermPlace, service: Service, order: spawn.Order) -> spawn.Child:
        leaving = self._leaving.pop(service.name, None)
        if leaving is not None:
            leaving.close()
        service.box = box = term.service(service.name)
        child = spawn.spawn(
            order, cgroup_fd=box.clone_fd, direct=box.direct, lock_fd=service.lock_fd, die_with_keeper=self._weak
        )
        found = proc.stat(child.pid)
        service.pid = child.pid
        service.start_ticks = 0 if found is None else found.start_ticks
        service.since_ns = boot_ns()
        service.status, service.ready = None, False
        service.running = service.occupied = True
        box.started(child.pid)
        return child

    def _watch(self, service: Service, child: spawn.Child, taken: bool, reply: Reply) -> None:
        def hear() -> None:
            with contextlib.suppress(BlockingIOError):
                failure = spawn.read_report(child.report)
                service.hear = None
                self._loop.remove(child.report)
                os.close(child.report)

                def tell() -> None:
                    service.hear = None
                    self._started(service, failure, taken, reply)

                if failure is None or not service.running:
                    tell()
                else:
                    service.hear = tell  # once it is reaped: until then it has its GPU's lock open

        def reported(_: int) -> None:
            if service.hear is hear:
                hear()

        service.hear = hear

        self._watch_process(service, child.pidfd)
        self._loop.add(child.report, reported)

    def adopt(self, name: str, box: Box, row: LeftService | None, held: tuple[Lock, int] | None) -> None:
        """What an earlier keeper started. `row` None: its first process is not known."""
        self.all[name] = service = Service(name)
        service.box, service.occupied = box, box.populated()
        if held is not None:
            service.lock, service.lock_fd = held
        pidfd = None
        if row is not None:
            service.pid, service.start_ticks, service.since_ns, service.ready = row
            pidfd = proc.open_pidfd(row.pid, row.start_ticks)
        if pidfd is not None and box.holds(service.pid):
            service.running = True
            self._watch_process(service, pidfd)
        else:
            self._watch_box(service)
            if pidfd is not None:
                os.close(pidfd)

    def _watch_process(self, service: Service, pidfd: int) -> None:
        pid = service.pid
        self._children[pid] = (pidfd, service)
        self._loop.add(pidfd, lambda _: self.reap(pid))
        self._watch_box(service)

    def _watch_box(self, service: Service) -> None:
        box = service.box
        if box is not None and box.events is not None:
            events = box.events
            self._loop.add(events, lambda _: self._stirred(service, events), select.EPOLLPRI)

    def _started(self, service: Service, failure: tuple[str, int] | None, taken: bool, reply: Reply) -> None:
        if self.ending or self.all.get(service.name) is not service:
            reply("over", f"the term ended while {service.name} was being started")
            return
        if failure is None:
            if service.lock is not None and service.lock.holder is not None:
                service.lock.holder = {**service.lock.holder, "pid": service.pid}
                service.lock.describe()
                lock = service.lock  # kept through a restart, with a new first process
                self._event("lock-taken", gpu=lock.gpu, holder=lock.holder, since_ns=lock.taken_ns)
            cgroup = None if service.box is None else service.box.cgroup
            self._remember()
            reply(None, "", pid=service.pid, start_ticks=service.start_ticks, cgroup=cgroup)
            return
        stage, code = failure
        del self.all[service.name]
        self._abandon(service, taken)
        reply(
            "exec", os.strerror(code) if stage == "exec" else f"{stage}: {os.strerror(code)}", stage=stage, errno=code
        )

    def _abandon(self, service: Service, taken: bool) -> None:
        """A start that came to nothing: the lock goes back if it was taken for it."""
        if taken or service.name not in self.all:
            self.release(service)
        if service.box is not None:
            self._drop_box(service)

    def _stirred(self, service: Service, events: int) -> None:
        rearm(events)
        self.look(service)

    def look(self, service: Service) -> None:
        """Tell `empty` once, after `exited`."""
        if service.occupied and not service.running and not (service.box and service.box.populated()):
            service.occupied = False
            if self.all.get(service.name) is service:
                self._event("empty", service=service.name)

    def look_at_all(self) -> None:
        """For containment without events, and as a slow check otherwise."""
        for service in list(self.all.values()):
            self.look(service)
        self._leaving = {name: box for name, box in self._leaving.items() if not box.discard()}

    def reap(self, pid: int) -> None:
        """The child `pid` has ended."""
        pidfd, service = self._children[pid]
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
        service.running, service.status = False, status
        if service.hear is not None and service.pid == pid:
            service.hear()  # the answer to `start` comes before `exited`
        if self.all.get(service.name) is service:
            self._event("exited", service=service.name, pid=pid, status=status)
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

    def whose(self, pid: int) -> Service | None:
        """The service in whose box this process stands now, its jobs included."""
        if self._weak:
            return next((one for one in self.all.values() if one.box is not None and one.box.holds(pid)), None)
        path = proc.cgroup_path(pid) or ""
        for service in self.all.values():
            if service.box is not None and path.startswith(f"{service.box.cgroup}/"):
                return service
        return None

    def ready(self, service: Service) -> None:
        """It has said READY=1."""
        if not service.ready:
            service.ready = True
            self._remember()

    def signal(self, service: Service, signum: int) -> int:
        """A signal to every process of the service, each proven by pidfd and place; how many got it."""
        count = 0
        box = service.box
        for pid, ticks in [] if box is None else box.members():
            pidfd = proc.open_pidfd(pid, ticks)
            if pidfd is not None:
                try:
                    if box is not None and box.holds(pid):
                        count += proc.send(pidfd, signum)
                finally:
                    os.close(pidfd)
        return count

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
