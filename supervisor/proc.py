"""Which process is this, and what may be sent to it: /proc and pidfds, standard library only.

A bare pid is never an identity (pids are reused), nor is a start time in seconds (it moves with the wall clock).
A process is (boot id, pid, start ticks): field 22 of /proc/PID/stat counts ticks since boot and never changes
(proc_pid_stat(5)). A signal goes through a pidfd that was proven after it was opened (pidfd_open(2)).
"""

import errno
import os
import select
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

_PF_EXITING = 0x4  # include/linux/sched.h; `flags` is field 9 of /proc/PID/stat
_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)


class Identity(NamedTuple):
    """One process, for as long as this machine and the next one run."""

    boot_id: str
    pid: int
    start_ticks: int


class Stat(NamedTuple):
    """The part of /proc/PID/stat that is used here."""

    pid: int
    comm: str
    state: str
    ppid: int
    session: int
    flags: int
    start_ticks: int


STARVED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors for want of something of our own: no news about a process, and never to be taken for its end."""


def tells_nothing(error: OSError) -> bool:
    """The error is ours, and nothing follows from it."""
    return error.errno in STARVED


def boot_id() -> str:
    """The kernel's random id of this boot."""
    return _read("/proc/sys/kernel/random/boot_id").decode("ascii").strip()


def parse_stat(raw: bytes) -> Stat:
    """Parse /proc/PID/stat. The name may hold spaces, parentheses and newlines: fields count from the last `)`.

    Raises ValueError when it is not such a line.
    """
    head, bracket, tail = raw.rpartition(b")")
    pid, bracket2, comm = head.partition(b"(")
    fields = tail.split()
    if not bracket or not bracket2 or len(fields) < 20:
        raise ValueError(f"not a line of /proc/PID/stat: {raw[:80]!r}")
    return Stat(
        pid=int(pid),
        comm=comm.decode("utf-8", "replace"),
        state=fields[0].decode("ascii"),
        ppid=int(fields[1]),
        session=int(fields[3]),
        flags=int(fields[6]),
        start_ticks=int(fields[19]),
    )


def stat(pid: int) -> Stat | None:
    """What /proc says of this pid now; None when there is no such process. Raises OSError where it cannot be read,
    say for want of file descriptors: that is no news about the process."""
    return _stat_at(f"/proc/{pid}/stat")


def identity(pid: int) -> Identity | None:
    """The identity of the process that has this pid now."""
    found = stat(pid)
    return None if found is None else Identity(boot_id(), pid, found.start_ticks)


def is_alive(who: Identity) -> bool:
    """True while exactly this process runs; a zombie has ended."""
    found = stat(who.pid)
    return (
        found is not None
        and found.start_ticks == who.start_ticks
        and found.state not in "ZX"
        and who.boot_id == boot_id()
    )


def snapshot() -> dict[int, Stat]:
    """Every process that is visible now, by pid. Raises OSError as `stat` does."""
    return {found.pid: found for found in map(stat, all_pids()) if found is not None}


def all_pids() -> Iterator[int]:
    """Pids in /proc now."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def cgroup_path(pid: int) -> str | None:
    """Where the process stands in the cgroup v2 tree, as /proc/PID/cgroup says it ("/a/b").

    None: no such process, or no cgroup v2. A removed cgroup reads "/a/b (deleted)". Raises OSError (`STARVED`).
    """
    try:
        lines = _read(f"/proc/{pid}/cgroup").splitlines()
    except OSError as error:
        if tells_nothing(error):
            raise
        return None
    for line in lines:
        if line.startswith(b"0::"):
            return os.fsdecode(line[3:])
    return None


def environ_value(pid: int, name: str) -> str | None:
    """A variable of the environment that the process was started with, if it may be read. Raises OSError as above."""
    prefix = os.fsencode(name) + b"="
    try:
        items = _read(f"/proc/{pid}/environ").split(b"\0")
    except OSError as error:
        if tells_nothing(error):
            raise
        return None
    return next((os.fsdecode(item[len(prefix) :]) for item in items if item.startswith(prefix)), None)


def open_pidfd(pid: int, start_ticks: int) -> int | None:
    """A pidfd of exactly this process, or None when it has ended. The caller closes it. Raises OSError (`STARVED`).

    The identity is read after the pidfd was opened: had the pid been reused before, it would differ.
    """
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        if tells_nothing(error):
            raise
        return None
    try:
        found = stat(pid)
    except OSError:
        os.close(fd)
        raise
    if found is None or found.start_ticks != start_ticks:
        os.close(fd)
        return None
    return fd


def pidfd_exited(pidfd: int) -> bool:
    """True once every thread of the process has ended (pidfd_open(2): the pidfd becomes readable)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def pidfd_pid(pidfd: int) -> int | None:
    """The pid behind a pidfd as this pid namespace sees it; None when it has been reaped."""
    for line in _read(f"/proc/self/fdinfo/{pidfd}").splitlines():
        if line.startswith(b"Pid:"):
            pid = int(line[4:])
            return pid if pid > 0 else None
    return None


def send(pidfd: int, signum: int) -> bool:
    """Send a signal; False when the process has ended or may not be signalled."""
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except OSError:
        return False
    return True


def kill(pid: int, start_ticks: int, signum: int = signal.SIGKILL) -> bool:
    """Send a signal to exactly this process, proven by its start ticks; False when it has ended."""
    fd = open_pidfd(pid, start_ticks)
    if fd is None:
        return False
    try:
        return send(fd, signum)
    finally:
        os.close(fd)


def kill_pending(pid: int) -> bool:
    """True when the process can do nothing any more: each thread has SIGKILL pending, is exiting, or has ended.

    A fatal signal stands in SigPnd of every thread or in ShdPnd until the thread takes it (proc_pid_status(5));
    then the thread is marked as exiting, where it may still hang in a driver. A process that is gone counts too.
    """
    return _all_threads(pid, lambda folder, found: _sigkill_pending(folder))


def is_over(pid: int) -> bool:
    """True when the process is gone but for what the kernel does: each thread has ended, is exiting, or hangs in D
    state with SIGKILL pending. One that was only not scheduled since its SIGKILL is not over yet."""
    return _all_threads(pid, lambda folder, found: found.state == "D" and _sigkill_pending(folder))


def _all_threads(pid: int, counts: Callable[[str, Stat], bool]) -> bool:
    """True when each thread has ended, is exiting, or `counts`."""
    try:
        for tid in os.listdir(f"/proc/{pid}/task"):
            folder = f"/proc/{pid}/task/{tid}"
            found = _stat_at(folder + "/stat")
            ended = found is None or found.state in "ZX" or found.flags & _PF_EXITING
            if found is not None and not ended and not counts(folder, found):
                return False
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # not readable: not proven
        return False
    return True


def _sigkill_pending(folder: str) -> bool:
    for line in _read(folder + "/status").splitlines():
        if line.startswith((b"SigPnd:", b"ShdPnd:")) and int(line.split()[1], 16) & _SIGKILL_BIT:
            return True
    return False


def _stat_at(path: str) -> Stat | None:
    try:
        return parse_stat(_read(path))
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)
