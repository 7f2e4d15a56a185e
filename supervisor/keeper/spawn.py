"""Start one process: clone3 straight into its cgroup, then everything that could hang or fail in the child.

The keeper does no name look-up and no file I/O for a start (rule 16): the log is opened, privileges are dropped and
the path is searched in the child. What fails there comes back over a close-on-exec pipe as "stage errno"; the pipe
closing without a word means that exec has happened. The keeper polls that pipe, it never waits for it.
"""

import errno
import fcntl
import os
import resource
import signal
import stat
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from supervisor.keeper import kernel

LOCK_FD = 3
"""Where a service finds its flocked lock file, when it was started with one."""
_REPORT_FD = 10  # the lowest fd of the pipe's end in the child: never LOCK_FD
_FAILED = 127


class Order(NamedTuple):
    """What to start. Numeric ids only; `uid` None: as the keeper."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    uid: int | None
    gid: int | None
    groups: Sequence[int]
    log: str | None
    log_gid: int | None = None
    """Who may read the log besides root; None: as it is."""


class Child(NamedTuple):
    """A started process: both fds belong to the caller."""

    pid: int
    pidfd: int
    report: int


def spawn(order: Order, *, cgroup_fd: int | None, direct: bool, lock_fd: int | None, die_with_keeper: bool) -> Child:
    """Start `order` in the cgroup of `cgroup_fd` (None: in ours). Raises OSError when there is no child.

    `direct`: born there, by CLONE_INTO_CGROUP. Else the child enters it as its first step, before anything else.
    """
    keeper = os.getpid()
    report, low_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    report_end = fcntl.fcntl(low_end, fcntl.F_DUPFD_CLOEXEC, _REPORT_FD)
    os.close(low_end)
    try:
        pid, pidfd, enter = _clone(cgroup_fd, direct)
        if pid == 0:
            _become(order, report_end, lock_fd, enter, keeper if die_with_keeper else None)
    except OSError:
        os.close(report)
        raise
    finally:
        os.close(report_end)
    return Child(pid, pidfd, report)


def read_report(report: int) -> tuple[str, int] | None:
    """What the child said: (stage, errno) of its failure, None when exec has happened."""
    text = os.read(report, 256).decode("ascii", "replace").split()
    return (text[0], int(text[1])) if len(text) == 2 else None


def _clone(cgroup_fd: int | None, direct: bool) -> tuple[int, int, int | None]:
    """(pid, pidfd, cgroup that the child has still to enter by itself)."""
    try:
        return *kernel.clone3(cgroup_fd if direct else None), None if direct else cgroup_fd
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):  # old seccomp filters refuse clone3
            raise
    pid = os.fork()
    return pid, (os.pidfd_open(pid) if pid else -1), cgroup_fd


def birth_works(cgroup_fd: int) -> bool:
    """True when a child can be born into this fresh cgroup.

    Linux 6.18 counts the kills of a cgroup and compares, at CLONE_INTO_CGROUP, the count of the target with that of the
    *parent's* cgroup; when they differ the child is killed at birth. So a keeper in a group that was once killed
    cannot use it, and nobody can for a group that was once killed. (Measured; kernel/cgroup/cgroup.c, kill_seq.)
    """
    try:
        pid, pidfd = kernel.clone3(cgroup_fd)
    except OSError:
        return False
    if pid == 0:
        os._exit(0)
    os.close(pidfd)
    return os.waitpid(pid, 0)[1] == 0


def _become(order: Order, report: int, lock_fd: int | None, enter: int | None, keeper: int | None) -> NoReturn:
    """In the child. Never returns, never raises."""
    stage = ["session"]
    try:
        _steps(order, lock_fd, enter, keeper, stage)
    except OSError as error:
        code = error.errno or errno.EIO
    except BaseException:  # noqa: BLE001 - the child must not run on in the keeper's code
        code = errno.EINVAL
    try:
        os.write(report, f"{stage[0]} {code}".encode("ascii"))
    finally:
        os._exit(_FAILED)


def _steps(order: Order, lock_fd: int | None, enter: int | None, keeper: int | None, stage: list[str]) -> None:
    if enter is not None:
        stage[0] = "cgroup"
        procs = os.open("cgroup.procs", os.O_WRONLY, dir_fd=enter)
        os.write(procs, b"0")
    os.setsid()
    _reset_signals()
    stage[0] = "log"
    _set_stdio(order.log, order.log_gid)
    stage[0] = "user"
    _drop_privileges(order)
    stage[0] = "parent"
    if keeper is not None:
        kernel.die_with_parent()
        if os.getppid() != keeper:
            raise OSError(errno.ESRCH, "the keeper is gone")
    stage[0] = "cwd"
    os.chdir(order.cwd)
    stage[0] = "exec"
    _arrange_fds(lock_fd)
    os.execvpe(order.argv[0], list(order.argv), dict(order.env))


def _reset_signals() -> None:
    for signum in signal.valid_signals():
        if signum not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    soft, hard = ORIGINAL_FILES_LIMIT
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _set_stdio(log: str | None, log_gid: int | None) -> None:
    os.umask(0o022)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    out = null
    if log is not None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
        out = os.open(log, flags | os.O_NONBLOCK, 0o640)  # a FIFO without a reader: ENXIO
        found = os.fstat(out)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if log_gid is not None and found.st_gid != log_gid and (found.st_uid, os.geteuid()) == (0, 0):
            os.fchown(out, -1, log_gid)
        os.set_blocking(out, True)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)


def _drop_privileges(order: Order) -> None:
    if order.uid is None or (order.uid == os.geteuid() and os.geteuid() != 0):
        return
    os.setgroups(list(order.groups))
    os.setgid(order.uid if order.gid is None else order.gid)
    os.setuid(order.uid)


def _arrange_fds(lock_fd: int | None) -> None:
    """0, 1, 2 and the lock stay; the report pipe closes by itself at exec."""
    kernel.close_on_exec_from(3)
    if lock_fd is not None:
        os.dup2(lock_fd, LOCK_FD, inheritable=True)
        os.set_inheritable(LOCK_FD, True)


ORIGINAL_FILES_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)
"""(soft, hard) before the keeper raised its own; what children get."""
