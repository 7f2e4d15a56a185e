"""One look at the processes of our own services: what /proc, cgroupfs and the lock files show. Only reads.

Its cost grows with our own processes, never with the machine's. It can block where a process is stuck in the kernel
(see supervisor.gpu.aside), so `look` runs in a thread. What cannot be read is unknown, and stays unknown.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from supervisor import proc
from supervisor.gpu.holders import DeviceId, Hold, holds
from supervisor.service.footprint import Footprint

Who = tuple[int, int]
"""(pid, start ticks): a process, for as long as this boot lasts."""


@dataclass(frozen=True)
class Target:
    """A service that is meant to have a process, as its runner knows it at the moment of the look."""

    name: str
    footprint: Footprint
    started_at: float
    gpu: int | None
    device: Path | None
    """Of its GPU, if it has one."""
    lock_file: Path | None
    needs_device: bool
    start_grace: float
    has_mutex: bool
    """The whole service has its GPU's mutex (`lifetime`)."""
    sections: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """(pid, id) → since when a GPU section goes on, as its processes said (boot-time seconds)."""
    max_section: float = float("inf")
    heard_at: float | None = None
    """When a heartbeat was last heard; None: none is expected."""
    heartbeat: float | None = None
    """Seconds within which the next one must come."""
    not_alive: str = ""
    """Why its liveness looks say that it does not work any more."""
    heard_until: float = float("inf")
    """What its processes said before this moment is known; a keeper that is late tells it late."""


@dataclass(frozen=True)
class Stuck:
    """A thread in D state."""

    tid: int
    switches: int
    """Context switches so far: one that is merely busy with a disk makes more of them, a stuck one makes none."""


@dataclass(frozen=True)
class Process:
    who: Who
    zombie: bool
    """No thread of it lives. (A process whose first thread has ended shows Z too, and lives.)"""
    stuck: tuple[Stuck, ...]
    unit: str | None
    """Its cgroup below the service's: `/main`, `/job-N`; None in weak containment."""
    device: Hold
    flock: bool
    """It has the lock file of the service's GPU flocked by itself."""


@dataclass(frozen=True)
class ServiceSeen:
    """One service at one moment."""

    target: Target
    main: Who
    main_there: bool
    frozen: bool
    device_found: bool
    """False: there is no such device, so nothing is concluded from who has it open."""
    processes: tuple[Process, ...]
    job_mutex: bool
    """The keeper holds the mutex for a job of it, or did at some moment of this look."""


def look(targets: Iterable[Target]) -> list[ServiceSeen]:
    """Blocks; for a thread. A service that could not be read (no file descriptor left, say) is left out: nothing is
    concluded about it. `job_mutex` is False here: only the loop knows the keeper's events."""
    seen = []
    for target in targets:
        with contextlib.suppress(OSError):
            seen.append(_service(target))
    return seen


def _service(target: Target) -> ServiceSeen:
    footprint = target.footprint
    found = proc.stat(footprint.pid)
    device = _device(target.device)
    lock = _inode(target.lock_file)
    return ServiceSeen(
        target=target,
        main=(footprint.pid, footprint.start_ticks),
        main_there=found is not None and found.start_ticks == footprint.start_ticks,
        frozen=footprint.frozen(),
        device_found=device is not None,
        processes=tuple(
            seen for pid in footprint.pids() if (seen := _process(pid, footprint, device, lock)) is not None
        ),
        job_mutex=False,
    )


def _process(pid: int, footprint: Footprint, wanted: DeviceId | None, lock: tuple[int, int] | None) -> Process | None:
    """One process of the service; None when it has ended meanwhile.

    The device is read before and after the mutex: one that takes the mutex, opens the device, closes it and lets go
    between two reads must not look like one that has the device and no mutex.
    """
    found = proc.stat(pid)
    if found is None:
        return None
    threads = _threads(pid)
    device, flock = Hold.NOT_HELD, False
    if wanted is not None:
        device = _hold(pid, wanted)
        if device is Hold.HELD and lock is not None:
            flock = _flocks(pid, lock)
            device = _hold(pid, wanted)
    return Process(
        who=(pid, found.start_ticks),
        zombie=all(thread.state in "ZX" for thread in threads) if threads else found.state in "ZX",
        stuck=tuple(_stuck(pid, thread.pid) for thread in threads if thread.state == "D"),
        unit=_unit(pid, footprint.cgroup),
        device=device,
        flock=flock,
    )


def _device(path: Path | None) -> DeviceId | None:
    try:
        return None if path is None else DeviceId.of(path)
    except OSError:
        return None


def _inode(path: Path | None) -> tuple[int, int] | None:
    try:
        found = None if path is None else os.stat(path)
    except OSError:
        return None
    return None if found is None else (found.st_dev, found.st_ino)


def _hold(pid: int, device: DeviceId) -> Hold:
    try:
        return holds(pid, [device])[0]
    except OSError:
        return Hold.UNKNOWN


def _threads(pid: int) -> list[proc.Stat]:
    threads = []
    with _unless_gone():
        for tid in os.listdir(f"/proc/{pid}/task"):
            with _unless_gone(), contextlib.suppress(ValueError), open(f"/proc/{pid}/task/{tid}/stat", "rb") as file:
                threads.append(proc.parse_stat(file.read()))
    return threads


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    """What has ended, or may not be read, is left out; a want of our own leaves out the whole service (see `look`)."""
    try:
        yield
    except OSError as error:
        if proc.tells_nothing(error):
            raise


def _stuck(pid: int, tid: int) -> Stuck:
    """proc_pid_status(5): voluntary and involuntary context switches."""
    switches = 0
    with _unless_gone(), contextlib.suppress(ValueError), open(f"/proc/{pid}/task/{tid}/status", "rb") as lines:
        switches = sum(int(line.split()[1]) for line in lines if b"ctxt_switches:" in line)
    return Stuck(tid, switches)


def _unit(pid: int, cgroup: str | None) -> str | None:
    if cgroup is None:
        return None
    path = proc.cgroup_path(pid)
    return None if path is None or not path.startswith(cgroup) else path[len(cgroup) :]


def _flocks(pid: int, inode: tuple[int, int]) -> bool:
    """Whether an fd of the process carries a FLOCK on this inode: proc_pid_fdinfo(5), its `lock:` lines."""
    folder = f"/proc/{pid}"
    with _unless_gone():
        for name in os.listdir(f"{folder}/fd"):
            with _unless_gone():
                found = os.stat(f"{folder}/fd/{name}")
                if (found.st_dev, found.st_ino) == inode and _is_flocked(f"{folder}/fdinfo/{name}"):
                    return True
    return False


def _is_flocked(fdinfo: str) -> bool:
    with open(fdinfo, "rb") as lines:
        return any(line.startswith(b"lock:") and b"FLOCK" in line for line in lines)


def live(processes: Sequence[Process]) -> list[Process]:
    """Those that can still do something."""
    return [process for process in processes if not process.zombie]
