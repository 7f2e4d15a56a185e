"""What a demo mounts below its folder, as root: a small file system, and a file whose readers no signal ends.

Everything mounted below a folder is unmounted with it (`unmount_below`), whoever mounted it and however that ended.
Flags and structures are those of mount(2), umount2(2) and linux/fuse.h.
"""

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import Self

from supervisor.demo.sample import STUCK_NAME

MS_NOSUID = 2
MNT_FORCE, MNT_DETACH = 1, 2
FUSE_INIT = 26
_REQUEST = struct.Struct("=IIQQIIII")
"""struct fuse_in_header: length, opcode, unique, node, uid, gid, pid, padding."""
_ANSWER = struct.Struct("=IiQ")
"""struct fuse_out_header: length, error, unique."""
_INIT_ANSWER = struct.Struct("=IIIIHHII36x")
"""struct fuse_init_out: major, minor, max_readahead, flags, max_background, congestion_threshold, max_write, …"""
LARGEST_REQUEST = 8192
"""Bytes: FUSE_MIN_READ_BUFFER; a smaller buffer is refused."""

_libc = ctypes.CDLL(None, use_errno=True)


def small_disk(folder: Path, size: int) -> None:
    """A file system in memory, of so many bytes, in the place of an empty folder. Raises OSError."""
    _mount("tmpfs", folder, "tmpfs", f"size={size},mode=755")


class UnansweredFile:
    """A file of FUSE whose requests are read and never answered: who opens it waits, and SIGKILL leaves it in D state
    (request_wait_answer in fs/fuse/dev.c). All are let go when it is closed, or when this process ends."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError where it cannot be mounted."""
        self._path = folder / STUCK_NAME
        self._path.touch()
        self._fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        try:
            options = f"fd={self._fuse},rootmode=100444,user_id=0,group_id=0,allow_other"
            _mount("gpuward-demo", self._path, "fuse", options)
            self._begin()
        except BaseException:
            os.close(self._fuse)
            raise
        os.set_blocking(self._fuse, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        """The kernel's first request is the only one that is answered."""
        request = os.read(self._fuse, LARGEST_REQUEST)
        _, opcode, unique, *_ = _REQUEST.unpack_from(request)
        if opcode != FUSE_INIT:
            raise OSError(f"/dev/fuse: found a first request {opcode}, expected {FUSE_INIT}")
        body = _INIT_ANSWER.pack(7, 31, 0, 0, 1, 1, 4096, 0)
        os.write(self._fuse, _ANSWER.pack(_ANSWER.size + len(body), 0, unique) + body)

    def waiting(self) -> int | None:
        """Pid of one who waits and was not told before; None: there is none. Whose request was not read by this can
        still be killed."""
        while True:
            try:
                request = os.read(self._fuse, LARGEST_REQUEST)
            except BlockingIOError:
                return None
            *_, pid, _ = _REQUEST.unpack_from(request)
            if pid:  # 0: a signal for one who waits
                return int(pid)

    def close(self) -> None:
        """Fine to repeat."""
        if self._fuse >= 0:
            os.close(self._fuse)
            self._fuse = -1
            unmount_below(self._path)
            self._path.unlink(missing_ok=True)


def unmount_below(path: Path) -> None:
    """Whatever is mounted at `path` or below it, the deepest first; who waits there is let go. Raises OSError."""
    below = bytes(path) + b"/"
    with open("/proc/self/mountinfo", "rb") as file:
        points = [line.split()[4].replace(rb"\040", b" ") for line in file]
    for point in reversed(points):
        if (point + b"/").startswith(below) and _libc.umount2(point, MNT_FORCE | MNT_DETACH):
            number = ctypes.get_errno()
            raise OSError(f"cannot unmount {os.fsdecode(point)}: {os.strerror(number)}")


def _mount(source: str, target: Path, kind: str, options: str) -> None:
    if _libc.mount(source.encode(), bytes(target), kind.encode(), MS_NOSUID, options.encode()):
        number = ctypes.get_errno()
        root = "; this needs root" if number == errno.EPERM else ""
        raise OSError(f"cannot mount {kind} at {target}: {os.strerror(number)}{root}")
