"""A wall clock that can be set from outside: a file has the seconds that it is wrong by, as a double.

The boot-time clock is the real one.
"""

import os
import struct
import time
from pathlib import Path

from election.clock import BootClock

_SECONDS = struct.Struct("=d")


class SkewedClock(BootClock):
    """Reads the file each time."""

    def __init__(self, offset: Path) -> None:
        """Raises OSError."""
        self._file = os.open(offset, os.O_RDONLY | os.O_CLOEXEC)

    def wall(self) -> float:
        (wrong_by,) = _SECONDS.unpack(os.pread(self._file, _SECONDS.size, 0))
        return time.time() + float(wrong_by)


def set_offset(offset: Path, seconds: float) -> None:
    """Make the file, or change it in place: its readers have it open."""
    fd = os.open(offset, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, _SECONDS.pack(seconds), 0)
    finally:
        os.close(fd)
