"""flock(2) on a lock file named by a path, so that there are never two holders.

Imports next to nothing: it is on the way of every `gpuward lock run`.

A lock file has a second hard link beside it, `.NAME.gpuward`, and *that* is the truth about which inode is the lock. A
file that was deleted or replaced while it is held is linked back by the next one who looks; never is there a new inode
while the old one may be flocked. After flock the inode is compared with the links', so an unlink in between leads to a
new try.

Nothing here ever unlocks (LOCK_UN would take the lock from every process that inherited it): a lock is left by closing,
and it is free when the last process that inherited it has closed it too.

Not promised: somebody who may write to the folder and deletes both links; file systems without reliable flock are
refused.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Callable

TRIES = 32  # of a taking; each is a race lost against somebody who deletes or replaces the file at that moment
MODE = 0o640
_NO_FLOCK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "afs",
    "ceph",
    "lustre",
    "beegfs",
    "virtiofs",
    "ncpfs",
    "coda",
)
"""Types in /proc/self/mountinfo: flock there is emulated, local to one client, or up to mount options (flock(2))."""
_NO_LINK = (errno.EPERM, errno.EACCES, errno.EROFS, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


class MutexHolder:
    """A process that has the flock."""

    def __init__(self, pid: int, command: str) -> None:
        self.pid = pid
        self.command = command

    def __repr__(self) -> str:
        return f"{self.command} (pid {self.pid})"


class MutexBusy(OSError):  # noqa: N818 - the field's own word
    """Somebody has the flock. `holders` may be empty: they are not visible to us."""

    def __init__(self, path: str, holders: list[MutexHolder]) -> None:
        shown = ", ".join(map(repr, holders)) or "not visible from here"
        super().__init__(errno.EWOULDBLOCK, f"{path} is held by: {shown}")
        self.holders = holders


class MutexUnsafe(OSError):  # noqa: N818
    """The path cannot be a lock: file system, owner, kind of file, rights of the folder. The message has the advice."""


def take_path(path: str | os.PathLike[str]) -> int:
    """Take the lock named by a path; made if missing (0640). The fd is flocked and close-on-exec.

    Raises MutexBusy at once if it is held, MutexUnsafe, or OSError as open(2) does.
    """
    name = os.fspath(path)
    for _ in range(TRIES):
        fd = open_true(name)[0]
        try:
            if fd >= 0 and flock_now(fd, name) and settle(name, fd):
                return fd
        except BaseException:
            os.close(fd)
            raise
        if fd >= 0:
            os.close(fd)
    raise MutexUnsafe(errno.EAGAIN, f"{name}: somebody deletes or replaces it all the time")


def guard_path(path: str) -> str:
    """The second hard link of a lock file."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.gpuward")


def open_true(path: str) -> tuple[int, bool]:
    """Open the inode that is the lock: (fd, was it made now). fd -1: lost a race, try again."""
    guard = guard_path(path)
    try:
        return _open(guard, os.O_RDWR), False
    except FileNotFoundError:
        pass
    except OSError:
        if not clear_impostor(guard):
            raise
    fresh = True
    try:
        fd = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        fresh = False
        try:
            fd = _open(path, os.O_RDWR)
        except FileNotFoundError:
            return -1, False
    try:
        _link(fd, guard)
    except OSError as error:
        if error.errno not in _NO_LINK:
            os.close(fd)
            if error.errno in (errno.EEXIST, errno.ENOENT):
                return -1, False
            raise
    return fd, fresh


def _open(path: str, flags: int) -> int:
    safe = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        fd = os.open(path, flags | safe, MODE)
    except PermissionError:  # a reader may flock too
        if flags & os.O_CREAT:
            raise
        fd = os.open(path, (flags & ~os.O_ACCMODE) | os.O_RDONLY | safe)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise MutexUnsafe(errno.ELOOP, f"{path}: a symbolic link cannot be a lock file") from None
        raise
    try:
        _check(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(fd: int, path: str) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise MutexUnsafe(errno.EINVAL, f"{path}: not a regular file")
    folder = os.stat(os.path.dirname(path) or ".")
    if folder.st_mode & 0o002 and found.st_uid not in (0, os.geteuid()):
        raise MutexUnsafe(
            errno.EPERM, f"{path}: belongs to uid {found.st_uid}, in a folder that everybody may write to"
        )
    kind = file_system(fd)
    if kind in _NO_FLOCK or kind.startswith("fuse"):
        raise MutexUnsafe(errno.EOPNOTSUPP, f"{path}: flock is not reliable on {kind}; use a local folder such as /run")


def file_system(fd: int) -> str:
    """The type of the file system that an fd is on, by its mount (/proc/self/fdinfo, proc_pid_mountinfo(5))."""
    mount = next(line for line in _text(f"/proc/self/fdinfo/{fd}").splitlines() if line.startswith("mnt_id:"))
    number = mount.split()[1]
    for line in _text("/proc/self/mountinfo").splitlines():
        if line.split(" ", 1)[0] == number:
            return line.partition(" - ")[2].split(" ", 1)[0]
    return "an unknown file system"


def flock_now(fd: int, path: str) -> bool:
    """flock without waiting: True, or MutexBusy."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MutexBusy(path, quick_holders(fd)) from None
    return True


def settle(path: str, fd: int) -> bool:
    """With the flock in hand: is this inode the lock? Then the path is made to say so. False: try again."""
    guard = inode_at(guard_path(path))
    mine = inode_of(fd)
    if guard is None:
        return inode_at(path) == mine
    return guard == mine and link_back(path, fd, respect_holder=True)


def link_back(path: str, fd: int, *, respect_holder: bool) -> bool:
    """Make `path` name the inode of `fd`. False: lost a race. Raises MutexBusy when what stands there is held."""
    there = inode_at(path)
    if there == inode_of(fd):
        return True
    try:
        if there is None:
            _link(fd, path)
            return True
        return _replace(path, fd, respect_holder)
    except OSError as error:
        if error.errno in _NO_LINK:
            return True  # we may not write to this folder; everybody else goes by the guard too
        if error.errno in (errno.EEXIST, errno.ENOENT):
            return False
        raise


def _replace(path: str, fd: int, respect_holder: bool) -> bool:
    other = _flock_other(path) if respect_holder else -1
    temporary = f"{guard_path(path)}.{os.getpid()}"
    try:
        _unlink_if_there(temporary)
        _link(fd, temporary)
        move_folder_aside(path)
        os.rename(temporary, path)
    finally:
        _unlink_if_there(temporary)  # also when rename had nothing to do: both were the same inode already
        if other >= 0:
            os.close(other)
    return True


def _flock_other(path: str) -> int:
    """An fd with the flock of what stands in the lock's place; -1: it is no regular file, so it is nobody's lock."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):  # a symbolic link, a socket, a device
            return -1
        raise
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            flock_now(fd, path)
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return -1


def move_folder_aside(path: str) -> str | None:
    """A folder cannot be replaced by rename(2): it gets another name, which is returned. None: it is no folder."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return None
        aside = f"{path}.replaced-{os.urandom(4).hex()}"
        os.rename(path, aside)
    except FileNotFoundError:
        return None
    return aside


def clear_impostor(guard: str) -> bool:
    """What stands in the place of a second link and is no regular file goes: it cannot be the lock. A folder is moved
    aside. False: nothing of that kind was there, or it is not ours to move."""
    aside = f"{guard}.replaced-{os.urandom(4).hex()}"
    try:
        if stat.S_ISREG(os.lstat(guard).st_mode):
            return False
        os.rename(guard, aside)
        found = os.lstat(aside).st_mode
        if stat.S_ISREG(found):  # the true link had just come back
            os.rename(aside, guard)
        elif not stat.S_ISDIR(found):
            os.unlink(aside)
    except OSError:
        return False
    return True


def _unlink_if_there(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def _link(fd: int, path: str) -> None:
    """A hard link to an open file (linkat(2), AT_SYMLINK_FOLLOW on /proc/self/fd)."""
    os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)  # a src_dir_fd makes Python use linkat


def inode_at(path: str) -> tuple[int, int] | None:
    """(device, inode) of what stands at this path, links not followed."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def inode_of(fd: int) -> tuple[int, int]:
    """(device, inode) of an open file."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


# --- who holds it


def holders(fd: int) -> list[MutexHolder]:
    """Processes that have the flock of this file, as /proc/PID/fdinfo shows it (an open file alone is a reader).

    Other users' processes show only to root; the keeper's and supervisor's duplicates show too.
    """
    from supervisor import proc

    node = inode_of(fd)
    return [_holder(pid) for pid in proc.all_pids() if pid != os.getpid() and _has_open(pid, node, _is_flocked)]


def writers(fd: int) -> list[MutexHolder]:
    """Processes that have this file open for writing and have not its flock, ourselves aside."""
    from supervisor import proc

    node = inode_of(fd)
    return [_holder(pid) for pid in proc.all_pids() if pid != os.getpid() and _has_open(pid, node, _only_writes)]


def quick_holders(fd: int) -> list[MutexHolder]:
    """As `holders`, but by /proc/locks: who called flock, if it still lives. Needs no rights, and no further import."""
    pid = flock_pid(*inode_of(fd))
    if pid is not None and pid > 0 and os.path.exists(f"/proc/{pid}"):
        return [_holder(pid)]
    return holders(fd)


def flock_pid(device: int, inode: int) -> int | None:
    """Who called flock(2) on this file, by /proc/locks: readable without rights, but the caller may have ended while
    a process that inherited the lock lives on. None: nobody, or not visible here."""
    return flock_pids().get((device, inode))


def flock_pids() -> dict[tuple[int, int], int]:
    """Of every flock that is visible here: (device, inode) and who called, as `flock_pid` has it."""
    found: dict[tuple[int, int], int] = {}
    for line in _text("/proc/locks").splitlines():
        fields = line.split()  # 1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF; waiters have "->" in field 1
        if len(fields) >= 6 and fields[1] == "FLOCK":
            major, minor, number = fields[5].split(":")
            found.setdefault((os.makedev(int(major, 16), int(minor, 16)), int(number)), int(fields[4]))
    return found


def flocked_fd(pid: int, node: tuple[int, int]) -> int | None:
    """The number of an fd by which this process has the flock of this inode."""
    return _open_fd(pid, node, _is_flocked)


def _has_open(pid: int, node: tuple[int, int], how: Callable[[str], bool]) -> bool:
    return _open_fd(pid, node, how) is not None


def _open_fd(pid: int, node: tuple[int, int], how: Callable[[str], bool]) -> int | None:
    """An fd of the process on this inode whose fdinfo is as asked for."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return None
    for name in names:
        try:
            found = os.stat(f"/proc/{pid}/fd/{name}")
            if (found.st_dev, found.st_ino) == node and how(_text(f"/proc/{pid}/fdinfo/{name}")):
                return int(name)
        except OSError:  # closed meanwhile, or what it names has gone
            continue
    return None


def _is_flocked(fdinfo: str) -> bool:
    return "FLOCK" in fdinfo


def _only_writes(fdinfo: str) -> bool:
    flags = next((line.split()[1] for line in fdinfo.splitlines() if line.startswith("flags:")), "0")
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY and not _is_flocked(fdinfo)


def _holder(pid: int) -> MutexHolder:
    try:
        return MutexHolder(pid, _text(f"/proc/{pid}/comm").strip())
    except OSError:
        return MutexHolder(pid, "?")
