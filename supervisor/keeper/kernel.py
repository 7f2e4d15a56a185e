"""System calls that Python 3.11 has no function for, by ctypes.

PyDLL keeps the GIL during the call: the keeper has one thread, and the child of a raw clone must go on in Python
as if nothing had happened. Numbers: include/uapi/linux/{sched,prctl,timerfd,mman}.h; clone3 and close_range have one
number on every architecture.
"""

import ctypes
import os
import resource
import signal
import struct
import time

_SYS_CLONE3 = 435
_SYS_CLOSE_RANGE = 436
_SYS_PIDFD_GETFD = 438
_CLOSE_RANGE_CLOEXEC = 1 << 2
_CLONE_PIDFD = 0x1000
_CLONE_INTO_CGROUP = 0x2_0000_0000
_TFD_TIMER_ABSTIME = 1
_MCL_CURRENT = 1
_MCL_FUTURE = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NAME = 15

_libc = ctypes.PyDLL(None, use_errno=True)


def boot_ns() -> int:
    """CLOCK_BOOTTIME in nanoseconds."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def clone3(cgroup_fd: int | None) -> tuple[int, int]:
    """Fork into `cgroup_fd` at once. (pid, pidfd) in the parent, (0, -1) in the child. Raises OSError."""
    pidfd = ctypes.c_int(-1)
    flags = _CLONE_PIDFD | (0 if cgroup_fd is None else _CLONE_INTO_CGROUP)
    # struct clone_args: flags pidfd child_tid parent_tid exit_signal stack stack_size tls set_tid set_tid_size cgroup
    args = struct.pack("=11Q", flags, ctypes.addressof(pidfd), 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, cgroup_fd or 0)
    pid = _libc.syscall(ctypes.c_long(_SYS_CLONE3), ctypes.c_char_p(args), ctypes.c_size_t(len(args)))
    if pid < 0:
        _fail("clone3")
    return pid, (pidfd.value if pid else -1)


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """A duplicate of another process's fd (Linux 5.6), close-on-exec. Raises OSError; EPERM: we may not trace it."""
    got: int = _libc.syscall(ctypes.c_long(_SYS_PIDFD_GETFD), ctypes.c_int(pidfd), ctypes.c_int(fd), ctypes.c_uint(0))
    if got < 0:
        _fail("pidfd_getfd")
    return got


def close_on_exec_from(first: int) -> None:
    """Mark every fd from `first` on as close-on-exec (Linux 5.11)."""
    if _libc.syscall(
        ctypes.c_long(_SYS_CLOSE_RANGE),
        ctypes.c_uint(first),
        ctypes.c_uint(0xFFFFFFFF),
        ctypes.c_uint(_CLOSE_RANGE_CLOEXEC),
    ):
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            if fd >= first:
                try:
                    os.set_inheritable(fd, False)
                except OSError:
                    continue


def boot_timer() -> int:
    """A timerfd on CLOCK_BOOTTIME: it counts suspended time and fires at once after a resume."""
    fd: int = _libc.timerfd_create(time.CLOCK_BOOTTIME, os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        _fail("timerfd_create")
    return fd


def set_timer(fd: int, at_ns: int | None) -> None:
    """Set the timer to an absolute boot time; None disarms it."""
    value = 0 if at_ns is None else max(1, at_ns)
    spec = struct.pack("@llll", 0, 0, value // 1_000_000_000, value % 1_000_000_000)
    if _libc.timerfd_settime(fd, _TFD_TIMER_ABSTIME, ctypes.c_char_p(spec), None):
        _fail("timerfd_settime")


def lock_memory() -> str | None:
    """Lock all memory, present and future (mlockall(2)). None: done; else why not.

    With a limit in force a later allocation could fail; so without CAP_IPC_LOCK or an unlimited RLIMIT_MEMLOCK
    nothing is locked.
    """
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    elif not _has_ipc_lock():
        return f"RLIMIT_MEMLOCK is {hard} bytes and CAP_IPC_LOCK is missing"
    if _libc.mlockall(_MCL_CURRENT | _MCL_FUTURE):
        return f"mlockall: {os.strerror(ctypes.get_errno())}"
    return None


def real_time() -> None:
    """The lowest real-time priority, so that the switch is punctual on a busy machine; not for children. Does nothing
    where that is not allowed (sched(7): CAP_SYS_NICE, and a real-time budget of the cgroup)."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        return


def die_with_parent() -> None:
    """SIGKILL to this process when its parent ends; to be called after privileges were dropped (prctl(2))."""
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        _fail("PR_SET_PDEATHSIG")


def become_subreaper() -> None:
    """Orphans below this process become its children."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        _fail("PR_SET_CHILD_SUBREAPER")


def set_name(name: str) -> None:
    """What ps shows (15 bytes)."""
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode("ascii")), 0, 0, 0)


def rss_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _has_ipc_lock() -> bool:
    with open("/proc/self/status", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) & (1 << 14))  # CAP_IPC_LOCK, capability.h
    return False


def _fail(what: str) -> None:
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")
