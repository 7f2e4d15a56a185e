"""A new keeper goes on with the term of one that was killed: same token, same deadline, same cgroups (rule 16).

cgroupfs says what runs, keeper.json what it is. The folder of a service is made before anything is started in it: so
whatever a keeper was doing when it was killed, its successor finds. What is found but not proven is killed by its
cgroup: a service whose first process is not on record (its start was under way), and a holder of a GPU's lock that
lost it together with the keeper, while somebody else has it now.
"""

import os

from supervisor import flock, proc
from supervisor.keeper import kernel
from supervisor.keeper.jobs import Job, Jobs
from supervisor.keeper.left import Left, LeftLock
from supervisor.keeper.locks import Lock
from supervisor.keeper.loop import log
from supervisor.keeper.places import CgroupBox, CgroupTerm
from supervisor.keeper.services import Services


def adopt(place: CgroupTerm, left: Left, services: Services, jobs: Jobs) -> dict[int, Lock]:
    """Take over what stands below `place`. Returns the locks by GPU."""
    locks: dict[int, Lock] = {}
    held: dict[str | None, list[tuple[Lock, int]]] = {}
    found = place.found()
    boxes = {box.cgroup: box for _, box, _ in found}
    for gpu, row in left.locks.items():
        box = boxes.get(row.box) if row.box is not None else None
        lock = _lock(gpu, row, box)
        if lock is not None:
            locks[gpu] = lock
        if box is None or row.holder is None or not box.populated():
            continue
        fd = None if lock is None else lock.retake(row.holder, row.taken_ns, _duplicate(row.inode, box))
        if lock is None or fd is None:
            log(f"GPU {gpu}: {row.holder.get('service')} lost its lock with the last keeper: killed")
            box.kill()
        else:
            held.setdefault(box.cgroup, []).append((lock, fd))
    for name, box, is_job in found:
        mine = held.get(box.cgroup, [])
        if is_job:
            takings = [Job(_taker(lock, box), name, box, lock, fd) for lock, fd in mine]
            jobs.adopt(takings or [Job(_first(box), name, box)])
        elif name is not None:
            _adopt_service(name, box, left, services, mine)
    return locks


def _adopt_service(name: str, box: CgroupBox, left: Left, services: Services, held: list[tuple[Lock, int]]) -> None:
    row = left.services.get(name)
    if row is None and not box.populated():
        box.discard()
        return
    if row is None:
        log(f"{name}: its start was under way when the last keeper was killed: killed")
        box.kill()
    services.adopt(name, box, row, held[0] if held else None)


def _taker(lock: Lock, box: CgroupBox) -> int:
    pid = (lock.holder or {}).get("pid")
    return pid if isinstance(pid, int) and box.holds(pid) else _first(box)


def _first(box: CgroupBox) -> int:
    return min((pid for pid, _ in box.members()), default=0)


def _lock(gpu: int, row: LeftLock, box: CgroupBox | None) -> Lock | None:
    """Of the inode it was: by its path, its second link, or an fd of who holds it. Never another inode."""
    for name in (row.path, flock.guard_path(row.path)):
        try:
            fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        if flock.inode_of(fd) == row.inode:
            return Lock(gpu, row.path, fd)
        os.close(fd)
    held = None if box is None else _duplicate(row.inode, box)
    if held is None:
        log(f"GPU {gpu}: {row.path} is no longer the lock file that it was")
        return None
    try:
        return Lock(gpu, row.path, os.open(f"/proc/self/fd/{held}", os.O_RDWR | os.O_CLOEXEC))
    finally:
        os.close(held)


def _duplicate(inode: tuple[int, int], box: CgroupBox) -> int | None:
    """The flocked fd of a process in the box, duplicated: the very open file description that has the lock."""
    for pid, ticks in box.members():
        number = flock.flocked_fd(pid, inode)
        pidfd = None if number is None else proc.open_pidfd(pid, ticks)
        if number is None or pidfd is None:
            continue
        try:
            fd = kernel.pidfd_getfd(pidfd, number)
        except OSError as error:
            log(f"pid {pid}: its lock cannot be duplicated: {error}")
            continue
        finally:
            os.close(pidfd)
        if flock.inode_of(fd) == inode:
            return fd
        os.close(fd)  # closed and reused in between
    return None
