"""Control groups, version 2, through directory fds. Standard library only.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst. `cgroup.kill` needs Linux 5.14; it ends every
process of the group and of the groups below, forks in flight included. A group that was only killed can be
entered afterwards; a removed one cannot, not even through an fd that was opened before (ENODEV).
"""

import contextlib
import errno
import os

_MAX_GROUPS = 10_000  # groups visited in one walk: a bound, far above what a term has


def mount_point() -> str | None:
    """Where cgroup2 is mounted (unified: /sys/fs/cgroup, hybrid: often …/unified); None: nowhere."""
    with open("/proc/mounts", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.split(" ")
            if len(fields) > 2 and fields[2] == "cgroup2":
                return fields[1].replace("\\040", " ")
    return None


class Group:
    """One cgroup, held by an fd of its folder. Methods raise OSError as the kernel gives it."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        """Below the mount point, as /proc/PID/cgroup shows it: "/a/b"."""
        self.fd = fd

    @classmethod
    def open(cls, path: str, *, make: bool = False) -> "Group":
        """Open `path` ("/a/b", below the mount point), making it and its parents if asked to."""
        mount = mount_point()
        if mount is None:
            raise FileNotFoundError(errno.ENOENT, "no cgroup2 in /proc/mounts")
        clean = "/" + path.strip("/")
        if make:
            os.makedirs(mount + clean, exist_ok=True)
        return cls(clean, _open_folder(mount + clean, None))

    def make(self, name: str) -> "Group":
        """Make (or open) a child group."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=self.fd)
        return self.child(name)

    def child(self, name: str) -> "Group":
        """Open a child group that exists."""
        return Group(f"{self.path.rstrip('/')}/{name}", _open_folder(name, self.fd))

    def children(self) -> list[str]:
        """Names of the child groups."""
        with os.scandir(self.fd) as entries:  # works on a duplicate and rewinds it
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def procs(self) -> list[int]:
        """Pids that stand in this very group (0: a process of another pid namespace)."""
        return [int(pid) for pid in self._read("cgroup.procs").split()]

    def procs_below(self) -> list[int]:
        """Pids of this group and of every group below it, however deep."""
        pids: list[int] = []
        for path in [".", *self._below()]:
            try:
                raw = self._read(f"{path}/cgroup.procs")
            except OSError as error:
                if path == "." or error.errno not in (errno.ENODEV, errno.ENOENT):
                    raise
                continue  # removed meanwhile
            pids += [int(pid) for pid in raw.split()]
        return pids

    def _below(self) -> list[str]:
        """Paths of all groups below this one, parents first. Not recursive: the depth is not ours to choose."""
        found: list[str] = []
        waiting = ["."]
        while waiting and len(found) < _MAX_GROUPS:
            path = waiting.pop()
            try:
                folder = _open_folder(path, self.fd)
            except OSError as error:
                if path == "." or error.errno not in (errno.ENODEV, errno.ENOENT, errno.ENAMETOOLONG):
                    raise
                continue
            try:
                with os.scandir(folder) as entries:
                    names = [f"{path}/{entry.name}" for entry in entries if entry.is_dir(follow_symlinks=False)]
            except OSError as error:
                if error.errno not in (errno.ENODEV, errno.ENOENT):
                    raise
                names = []
            finally:
                os.close(folder)
            found += names
            waiting += names
        return found

    def enter(self, pid: int) -> None:
        """Move a process (0: the caller) with all its threads into this group."""
        self._write("cgroup.procs", str(pid))

    def kill(self) -> None:
        """SIGKILL to everything here and below."""
        self._write("cgroup.kill", "1")

    def freeze(self) -> None:
        """Ask the kernel to freeze everything here and below; it does not wait for it."""
        self._write("cgroup.freeze", "1")

    def set_max_descendants(self, value: int | None) -> None:
        """How many groups may exist below this one; None lifts the limit."""
        self._write("cgroup.max.descendants", "max" if value is None else str(value))

    def set_max_depth(self, value: int) -> None:
        """How many groups may exist below one another below this one."""
        self._write("cgroup.max.depth", str(value))

    def populated(self) -> bool:
        """True while a live process (no zombie) stands here or below. A removed group is empty."""
        try:
            return b"populated 1" in self._read("cgroup.events")
        except OSError as error:
            if error.errno in (errno.ENODEV, errno.ENOENT):
                return False
            raise

    def open_events(self) -> int:
        """An fd of cgroup.events: POLLPRI when `populated` changes. To be read at once, then after each event."""
        fd = os.open("cgroup.events", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)
        os.read(fd, 4096)
        return fd

    def remove_child(self, name: str) -> bool:
        """Remove a child group with all groups below it, children first. False: something is not empty yet."""
        try:
            child = self.child(name)
        except FileNotFoundError:
            return True
        try:
            left = [path for path in sorted(child._below(), key=len, reverse=True) if not _rmdir(path, child.fd)]
            gone = not left
        except OSError as error:
            if error.errno not in (errno.ENODEV, errno.ENOENT):
                raise
            gone = True
        finally:
            child.close()
        return gone and _rmdir(name, self.fd)

    def close(self) -> None:
        """Close the fd; the group stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _read(self, name: str) -> bytes:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            parts = []
            while part := os.read(fd, 65536):
                parts.append(part)
            return b"".join(parts)
        finally:
            os.close(fd)

    def _write(self, name: str, value: str) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            os.write(fd, value.encode("ascii"))
        finally:
            os.close(fd)


def _open_folder(name: str, dir_fd: int | None) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


def _rmdir(name: str, dir_fd: int) -> bool:
    """False: it is not empty."""
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
    return True
