"""A program that nobody can start yet: its file has a write lease, so execve(2) waits, and can be killed (fcntl(2))."""

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def leased(path: Path) -> Iterator[str]:
    """For less than /proc/sys/fs/lease-break-time, 45 s; then the kernel takes the lease away."""
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o755)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # somebody wants it: by default that ends us
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield str(path)
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)
