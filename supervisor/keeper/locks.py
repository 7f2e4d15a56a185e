"""The keeper's side of the GPU mutex: one open file description per taking, flock, and a duplicate kept.

The inode comes from the supervisor as an fd; each taking opens it anew through /proc/self/fd, so paths play no part.
Never LOCK_UN: a lock is left by closing, and it is free when the last process that inherited it has closed it too
(flock(2)). What is written into the file is a description for people only.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from typing import Any

from supervisor import flock

Holder = dict[str, Any]
"""{service, pid, since (wall clock, seconds), token}"""


class Busy(Exception):  # noqa: N818 - the field's own word
    """Somebody has the flock. `holder.service` is null when it is none of ours."""

    def __init__(self, holder: Holder | None) -> None:
        super().__init__("the lock is held")
        self.holder = holder


class Lock:
    """The lock of one GPU."""

    def __init__(self, gpu: int, path: str, base_fd: int) -> None:
        self.gpu = gpu
        self.path = path
        self._base = base_fd
        self.holder: Holder | None = None
        self._last: Holder | None = None
        self._description = _read_description(base_fd)

    @property
    def inode(self) -> tuple[int, int]:
        """(device, inode) of the lock file."""
        found = os.fstat(self._base)
        return found.st_dev, found.st_ino

    def take(self, holder: Holder) -> int:
        """A new open file description with the flock. Raises Busy, or OSError."""
        try:
            fd = os.open(f"/proc/self/fd/{self._base}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EACCES:
                raise
            fd = os.open(f"/proc/self/fd/{self._base}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno == errno.EWOULDBLOCK:
                raise Busy(self._who()) from None
            raise
        self.holder = self._last = holder
        self.describe()
        return fd

    def _who(self) -> Holder | None:
        """Ours, or one of ours whose duplicate we have closed, or whoever called flock elsewhere."""
        if self.holder is not None:
            return self.holder
        pid = flock.flock_pid(*self.inode)
        if pid == os.getpid():
            return self._last
        return None if pid is None else {"service": None, "pid": pid, "since": None, "token": None}

    def left(self, fd: int) -> None:
        """Close our duplicate."""
        self.holder = None
        self.describe()
        os.close(fd)

    def describe(self) -> None:
        """Write who has it into the file, in place; a failure changes nothing about the lock."""
        text = json.dumps({**self._description, "holder": self.holder}).encode() + b"\n"
        with contextlib.suppress(OSError):
            os.pwrite(self._base, text, 0)
            os.ftruncate(self._base, len(text))

    def close(self) -> None:
        """Forget the file."""
        os.close(self._base)


def holder_of(service: str, pid: int, token: int) -> Holder:
    """The description of a holder, from now on."""
    return {"service": service, "pid": pid, "since": round(time.time(), 3), "token": token}


def _read_description(fd: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(fd, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
