"""Jobs: `gpuward lock run` and `gpu_lock` ask here for a GPU's lock (keeper.sock).

Order (rule 16): authority and deadline, then the flock, then the caller is moved into a fenced box of its own, then it
is proven that the caller still lives and stands there; only then does it get the fd. The keeper's duplicate of the lock
stays until the box is empty, whatever the job does with its own fd. The one exception: a caller in `scope` mode that
says `leave` on the connection by which it entered. It lives on, still fenced, without the lock.
"""

import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

from supervisor import proc
from supervisor.keeper.kernel import boot_ns
from supervisor.keeper.locks import Busy, Lock, holder_of
from supervisor.keeper.loop import Loop, log, rearm
from supervisor.keeper.packets import Connection, Packet
from supervisor.keeper.places import Box, TermPlace
from supervisor.keeper.services import Event

_SO_PEERPIDFD = 77  # include/uapi/asm-generic/socket.h, Linux 6.5
_MAX_CONNECTIONS = 512
_PATIENCE_S = 10.0  # for a caller that connects and asks nothing
_MAX_COMMAND = 200  # characters of a job's command that are kept, for people
MODES = ("exec", "scope")


class Job:
    """One taking of one GPU's lock."""

    def __init__(
        self, pid: int, service: str | None, box: Box, lock: Lock | None = None, lock_fd: int | None = None
    ) -> None:
        self.pid = pid
        self.service = service
        self.box = box
        self.lock = lock
        self.lock_fd = lock_fd


class Jobs:
    """All jobs of the present term, and those who ask to become one."""

    def __init__(self, loop: Loop, event: Event, remember: Callable[[], None]) -> None:
        self._loop = loop
        self._event = event
        self._remember = remember
        self.all: list[Job] = []
        self._scopes: dict[Connection, Job | None] = {}
        self._since: dict[Connection, float] = {}

    def accept(self, listener: socket.socket, answer: Any) -> None:
        """A new caller. `answer(connection, packet)` decides; too many callers are turned away."""
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            sock, _ = listener.accept()
            if len(self._scopes) >= _MAX_CONNECTIONS:
                sock.close()
                return
            connection = Connection(sock, self._loop, lambda c, p, _: answer(c, p), self._gone)
            self._scopes[connection] = None
            self._since[connection] = boot_ns() / 1e9

    def drop_idle(self) -> None:
        """Callers that connected long ago and have not entered."""
        limit = boot_ns() / 1e9 - _PATIENCE_S
        for connection, job in list(self._scopes.items()):
            if job is None and self._since[connection] < limit:
                connection.close()

    def _gone(self, connection: Connection) -> None:
        """A caller that vanished without `leave` keeps its lock until its box is empty."""
        self._scopes.pop(connection, None)
        self._since.pop(connection, None)

    def enter(self, connection: Connection, request: Packet, term: TermPlace, lock: Lock, mode: str) -> Packet:
        """Authority is given: flock, move, prove. The answer, and on success its fd is sent already."""
        if self._scopes.get(connection) is not None:
            return {"ok": False, "reason": "malformed", "message": "this connection has entered already"}
        caller = peer(connection.sock)
        if caller is None:
            return {"ok": False, "reason": "no-authority", "message": "the caller cannot be identified"}
        pid, pidfd = caller
        try:
            try:
                fd = lock.take(holder_of("job", pid, term.token))
            except Busy as busy:
                return {"ok": False, "reason": "busy", "holder": busy.holder}
            job = self._place(term, lock, fd, pid, pidfd)
            if job is None:
                lock.left(fd)
                return {"ok": False, "reason": "no-authority", "message": "the caller could not be moved"}
        finally:
            os.close(pidfd)
        self._announce(job, request, term.token)
        answer = {"ok": True, "token": term.token, "gpu": lock.gpu}
        if connection.send(answer, (fd,)) and mode == "scope":
            self._scopes[connection] = job
        return answer

    def _place(self, term: TermPlace, lock: Lock, fd: int, pid: int, pidfd: int) -> Job | None:
        for job in self.all:  # who stands in a job's box stays: moved out, it would take the box's lock out of sight
            if job.box.holds(pid) and not proc.pidfd_exited(pidfd):
                self.all.append(known := Job(pid, job.service, job.box, lock, fd))
                return known
        try:
            placed = term.job(pid, pidfd)
        except OSError as error:
            log(f"job {pid}: {error}")
            return None
        if placed is None:
            return None
        box, service = placed
        self._watch(box)
        self.all.append(new := Job(pid, service, box, lock, fd))
        return new

    def adopt(self, jobs: list[Job]) -> None:
        """The takings of one box, from an earlier keeper."""
        self._watch(jobs[0].box)
        self.all += jobs

    def _watch(self, box: Box) -> None:
        if box.events is not None:
            events = box.events
            self._loop.add(events, lambda _: self._stirred(events), select.EPOLLPRI)

    def _announce(self, job: Job, request: Packet, token: int) -> None:
        if job.lock is not None:
            command = str(request.get("command", ""))[:_MAX_COMMAND]
            job.lock.holder = {**holder_of(job.service or "job", job.pid, token), "command": command}
            job.lock.describe()
            self._remember()
            self._event("lock-taken", gpu=job.lock.gpu, holder=job.lock.holder, since_ns=job.lock.taken_ns)

    def leave(self, connection: Connection, gpu: object) -> Packet:
        """The end of a scope: the duplicate is closed, the process stays fenced."""
        job = self._scopes.get(connection) or self._of(connection, gpu)
        if job is None or job.lock is None:
            return {"ok": False, "reason": "not-entered"}
        self._free(job)
        self._scopes[connection] = None
        if any(other is not job and other.box is job.box for other in self.all):
            self.all.remove(job)  # one is enough to remember the box by
        return {"ok": True}

    def _of(self, connection: Connection, gpu: object) -> Job | None:
        """The taking of this very process, under an earlier keeper that had its connection."""
        caller = peer(connection.sock)
        if caller is None:
            return None
        pid, pidfd = caller
        os.close(pidfd)
        mine = (job for job in self.all if job.pid == pid and job.lock is not None and job.lock.gpu == gpu)
        return next((job for job in mine if job.box.holds(pid)), None)

    def _stirred(self, events: int) -> None:
        rearm(events)
        self.look_at_all()

    def look_at_all(self) -> None:
        """Free what empty boxes held, and remove those."""
        empty: dict[int, Box] = {}
        for box in {id(job.box): job.box for job in self.all}.values():
            if not box.populated():
                empty[id(box)] = box
        self._drop(empty)

    def _drop(self, boxes: dict[int, Box], *, removed: bool = False) -> None:
        for job in [job for job in self.all if id(job.box) in boxes]:
            self._free(job)
            self.all.remove(job)
        for box in boxes.values():
            self._loop.remove(box.events)
            if removed or not box.discard():
                box.close()

    def drop_all(self, term_removed: bool) -> None:
        """The term is over. Locks of what still lives are kept."""
        if term_removed:
            self._drop({id(job.box): job.box for job in self.all}, removed=True)
        else:
            self.look_at_all()

    def kill(self, service: str) -> None:
        """The jobs of a service; needed where they are not below its cgroup."""
        for job in self.all:
            if job.service == service:
                job.box.kill()

    def _free(self, job: Job) -> None:
        if job.lock is not None and job.lock_fd is not None:
            gpu = job.lock.gpu
            job.lock.left(job.lock_fd)
            job.lock = None
            self._remember()
            self._event("lock-free", gpu=gpu)


def peer(sock: socket.socket) -> tuple[int, int] | None:
    """(pid, pidfd) of who connected; the caller closes the pidfd. None: gone, or of another pid namespace."""
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if pid <= 0:
        return None
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
    os.set_inheritable(pidfd, False)
    if proc.pidfd_pid(pidfd) != pid or proc.pidfd_exited(pidfd):
        os.close(pidfd)
        return None
    return pid, pidfd
