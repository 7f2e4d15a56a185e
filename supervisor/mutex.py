"""The GPU mutex of a node: its lock files for a term, and `gpu_lock` for Python programs. flock.py has the lock itself.

flock is the truth about who has the GPU; the JSON in the file is for people, never a source of identity.
"""

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from supervisor import proc
from supervisor.flock import (
    MODE,
    TRIES,
    MutexBusy,
    MutexHolder,
    MutexUnsafe,
    clear_impostor,
    flock_now,
    flock_pid,
    guard_path,
    holders,
    inode_at,
    inode_of,
    link_back,
    move_folder_aside,
    open_true,
    settle,
    take_path,
)

__all__ = [
    "GpuBusy",
    "LockFile",
    "MutexBusy",
    "MutexHolder",
    "MutexLost",
    "MutexUnsafe",
    "NoAuthority",
    "adopt",
    "create",
    "gpu_lock",
    "holders",
    "remove_stale",
    "run_folder",
    "take_path",
]


class MutexLost(OSError):  # noqa: N818
    """Both links of a lock file were deleted: its inode cannot be linked back. `--gpu` still goes by the inode."""


class LockFile:
    """A lock file that this node keeps for its term. `fd` is open and not flocked: it is for the keeper."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    def repair(self) -> str | None:
        """Link back what was deleted or replaced; says what it was, None if all is well. Raises MutexLost, OSError."""
        path = os.fspath(self.path)
        if os.fstat(self.fd).st_nlink == 0:
            raise MutexLost(errno.ENOENT, f"{path} and its second link were deleted; this inode cannot be linked back")
        mine = inode_of(self.fd)
        found = []
        for name in (path, guard_path(path)):
            there = inode_at(name)
            if there != mine:
                found.append(f"{name} was {'deleted' if there is None else _replaced(name)}")
                aside = move_folder_aside(name)
                if aside is not None:
                    found[-1] += f" and is now {aside}"
                link_back(name, self.fd, respect_holder=False)
        return "; ".join(found) or None

    def remove(self) -> None:
        """Unlink both names under the flock, and close. Raises MutexBusy when it is held: then the file stays."""
        path = os.fspath(self.path)
        fd = self._reopen()
        try:
            flock_now(fd, path)
            link_back(path, fd, respect_holder=True)
            clear_impostor(guard_path(path))
            for name in (path, guard_path(path)):  # in this order: who finds no guard finds no lock file either
                if inode_at(name) == inode_of(fd):
                    os.unlink(name)
        finally:
            os.close(fd)
            self.close()

    def close(self) -> None:
        """Close our fd; the file stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _reopen(self) -> int:
        """An open file description of its own."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)


def create(
    path: str | os.PathLike[str],
    *,
    token: int,
    node: str,
    gid: int | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> LockFile:
    """Make the lock file of a GPU at take-over, 0640, with the token in it; a stale one is rewritten in place.

    Raises MutexBusy (somebody has the flock: `holders` says who), MutexUnsafe (folder, owner, file system; or a living
    supervisor keeps this very file), OSError. `note` is told of a stale file that was reclaimed.
    """
    name = os.fspath(path)
    _check_folder(os.path.dirname(name) or ".")
    for _ in range(TRIES):
        fd, fresh = open_true(name)
        if fd < 0:
            continue
        lock = LockFile(Path(name), fd)
        try:
            if _claim(lock, fresh, token, node, gid, note):
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()
    raise MutexUnsafe(errno.EAGAIN, f"{name}: somebody deletes or replaces it all the time")


def adopt(path: str | os.PathLike[str]) -> LockFile:
    """The lock file of this node's term, made by an earlier run of this supervisor: it is now kept by this one.

    Whoever holds it goes on. Raises MutexUnsafe (not there any more, folder, owner), OSError.
    """
    import json

    from supervisor.files import parse_json

    name = os.fspath(path)
    _check_folder(os.path.dirname(name) or ".")
    if inode_at(name) is None and inode_at(guard_path(name)) is None:
        raise MutexUnsafe(errno.ENOENT, f"{name}: the lock file of this term is gone")
    fd, _ = open_true(name)
    if fd < 0:
        raise MutexUnsafe(errno.EAGAIN, f"{name}: somebody else removes or replaces it just now")
    lock = LockFile(Path(name), fd)
    try:
        lock.repair()
        me = proc.identity(os.getpid())
        found = parse_json(os.pread(fd, 4096, 0))
        text = json.dumps({**found, "owner": None if me is None else me._asdict()}).encode() + b"\n"
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))
    except (ValueError, TypeError, RecursionError):
        pass  # a description that cannot be read is for nobody; the keeper writes it anew with the next holder
    except BaseException:
        lock.close()
        raise
    return lock


def remove_stale(path: str | os.PathLike[str]) -> bool:
    """Remove a lock file that an earlier run left, both links. False: there is none. Raises MutexBusy if it is held,
    MutexUnsafe if another living supervisor keeps it."""
    name = os.fspath(path)
    if inode_at(name) is None and inode_at(guard_path(name)) is None:
        return False
    fd, _ = open_true(name)
    if fd < 0:
        raise MutexUnsafe(errno.EAGAIN, f"{name}: somebody else removes or replaces it just now")
    lock = LockFile(Path(name), fd)
    try:
        _stale(name, os.pread(fd, 4096, 0))
    except BaseException:
        lock.close()
        raise
    lock.remove()
    return True


_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFSOCK: "socket",
    stat.S_IFIFO: "FIFO",
}


def _replaced(name: str) -> str:
    """By what, for people: whose file it is, and who holds it."""
    try:
        found = os.lstat(name)
    except OSError:
        return "replaced"
    pid = flock_pid(found.st_dev, found.st_ino)
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), "device")
    return f"replaced by a {kind} of uid {found.st_uid}" + (f", which pid {pid} has locked" if pid else "")


def _claim(lock: LockFile, fresh: bool, token: int, node: str, gid: int | None, note: Callable[[str], None]) -> bool:
    import json

    path = os.fspath(lock.path)
    owner = os.fstat(lock.fd).st_uid
    if owner not in (0, os.geteuid()):
        raise MutexUnsafe(errno.EPERM, f"{path}: belongs to uid {owner}, expected root or uid {os.geteuid()}")
    fd = lock._reopen()
    try:
        try:
            flock_now(fd, path)
        except MutexBusy:
            raise MutexBusy(path, holders(fd)) from None
        aside = move_folder_aside(path)
        if aside is not None:
            note(f"{path} was a folder beside the lock's second link; it is now {aside}")
        if not settle(path, fd):
            return False
        if not fresh:
            note(_stale(path, os.pread(fd, 4096, 0)))
        os.fchmod(fd, MODE)
        if gid is not None:
            os.fchown(fd, -1, gid)
        text = json.dumps(_description(token, node)).encode() + b"\n"
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))
        return True
    finally:
        os.close(fd)


def _description(token: int, node: str) -> dict[str, Any]:
    import time

    me = proc.identity(os.getpid())
    owner = None if me is None else me._asdict()
    return {"version": 1, "token": token, "node": node, "owner": owner, "created": time.time(), "holder": None}


def _stale(path: str, content: bytes) -> str:
    """What to say of a file that was there before. Raises MutexUnsafe when its owner lives and is not us."""
    from supervisor.files import parse_json

    try:
        found = parse_json(content)
        owner = proc.Identity(**found["owner"])
        alive = owner.pid != os.getpid() and proc.is_alive(owner)
    except (ValueError, KeyError, TypeError):
        return f"{path}: a stale lock file without a readable description, reclaimed"
    if alive:
        raise MutexUnsafe(
            errno.EEXIST, f"{path}: kept by a living supervisor, pid {owner.pid}, node {found.get('node')}"
        )
    return f"{path}: a stale lock file of token {found.get('token')}, node {found.get('node')}, reclaimed"


def _check_folder(folder: str) -> None:
    from supervisor.files import UnsafeFileError, check_folder

    try:
        check_folder(folder)
    except UnsafeFileError as error:
        raise MutexUnsafe(errno.EPERM, str(error)) from None


# --- for Python programs


class GpuBusy(Exception):  # noqa: N818
    """Somebody else has the GPU. `holder`: {service, pid, since, token} as far as known."""

    def __init__(self, message: str, holder: dict[str, Any] | None) -> None:
        super().__init__(message)
        self.holder = holder


class NoAuthority(Exception):  # noqa: N818
    """This node may not use its GPU now, or no keeper answers here."""


@contextlib.contextmanager
def gpu_lock(gpu: int = 0, *, path: str | os.PathLike[str] | None = None, run: str | None = None) -> Iterator[None]:
    """`with gpu_lock(0): ...` holds the mutex of that GPU inside the block. No waiting: GpuBusy or NoAuthority at once.

    With a GPU index the keeper moves this *process*, all its threads, into a fenced cgroup: it ends with this node's
    authority, also after the block (its memory may still be on the GPU). Leaving the block frees the lock although the
    process lives on; a child that was forked inside the block and has the fd keeps it. A CUDA context stays open after
    the block: let a child do the GPU work, by `gpuward lock run`, or end the process. `path` names a lock file
    directly: not fenced. `run` is the run folder, by default $GPUWARD_RUN_DIR or /run/gpuward.
    """
    if path is not None:
        try:
            fd = take_path(path)
        except MutexBusy as busy:
            who = busy.holders[0].pid if busy.holders else None
            raise GpuBusy(str(busy), {"service": None, "pid": who, "since": None, "token": None}) from None
        try:
            yield
        finally:
            os.close(fd)
        return
    from supervisor.keeper.job import Denied, enter

    try:
        entry = enter(run or run_folder(), gpu, "scope", os.path.basename(sys.argv[0] or "python"))
    except Denied as denied:
        if denied.reason == "busy":
            raise GpuBusy(f"GPU {gpu} is busy", denied.holder) from None
        raise NoAuthority(f"GPU {gpu}: {denied.reason}: {denied}") from None
    try:
        yield
    finally:
        entry.leave()


def run_folder() -> str:
    """$GPUWARD_RUN_DIR, else /run/gpuward."""
    return os.environ.get("GPUWARD_RUN_DIR") or "/run/gpuward"
