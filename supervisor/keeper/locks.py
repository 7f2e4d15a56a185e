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
from supervisor.files import parse_json
from supervisor.keeper.kernel import boot_ns

MAX_DESCRIPTION = 4096
"""Bytes of a lock file that are read."""
SHOWN = 80
"""Bytes of a foreign description that are told."""

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
        self.taken_ns = 0
        """Boot time of the present holder's taking."""
        self._last: Holder | None = None
        self.reread()

    @property
    def inode(self) -> tuple[int, int]:
        """(device, inode) of the lock file."""
        found = os.fstat(self._base)
        return found.st_dev, found.st_ino

    def reread(self) -> None:
        """What stands in the file now is the description: the supervisor has just written it."""
        self._written: bytes | None = None
        with contextlib.suppress(OSError):
            self._written = os.pread(self._base, MAX_DESCRIPTION, 0)
        self._description = _parse(self._written or b"")

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
        self.taken_ns = boot_ns()
        self.holder = self._last = holder
        self.describe()
        return fd

    def retake(self, holder: Holder, taken_ns: int, fd: int | None) -> int | None:
        """For one who had it under an earlier keeper: by a duplicate of its own fd, or, where none is open any more,
        anew. None: somebody else has it."""
        if fd is None:
            try:
                fd = self.take(holder)
            except (Busy, OSError):
                return None
        self.holder = self._last = holder
        self.taken_ns = taken_ns
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
        self._written = None
        with contextlib.suppress(OSError, RecursionError):
            text = json.dumps({**self._description, "holder": self.holder}).encode() + b"\n"
            whole = os.pwrite(self._base, text, 0) == len(text)
            os.ftruncate(self._base, len(text))
            self._written = text if whole else None

    def restore(self) -> str | None:
        """What somebody else wrote into the file, in short; then our description is written again. None: nobody did,
        or our own last write failed, so that nobody can tell."""
        known = self._written
        if known is None:
            self.describe()
            return None
        found = os.pread(self._base, len(known) + 1, 0)
        if found == known:
            return None
        self.describe()
        return found[:SHOWN].decode("utf-8", "replace")

    def close(self) -> None:
        """Forget the file."""
        os.close(self._base)


def holder_of(service: str, pid: int, token: int) -> Holder:
    """The description of a holder, from now on."""
    return {"service": service, "pid": pid, "since": round(time.time(), 3), "token": token}


def _parse(text: bytes) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
