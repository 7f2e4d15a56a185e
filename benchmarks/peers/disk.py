"""A file system that is frozen for a while: a process that writes into it then stands in D state, and SIGKILL waits.

It is thawed at the end of the `with` block. The guardian of the bed thaws it too, also when this process was killed.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from supervisor import proc

SIZE = 16 << 20
"""Bytes."""


class FreezableDisk:
    """Mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def unavailable() -> str | None:
        """Why there can be none here."""
        missing = [name for name in ("mkfs.ext4", "losetup", "fsfreeze", "mount") if shutil.which(name) is None]
        if os.geteuid() != 0 or missing:
            return f"needs root and {', '.join(missing) or 'its tools'}"
        return None

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "-f", self.path], check=True)

    def thaw(self) -> None:
        """Thawed already is fine."""
        subprocess.run(["fsfreeze", "-u", self.path], check=False, capture_output=True)


@contextmanager
def freezable_disk(folder: Path) -> Iterator[FreezableDisk]:
    """An ext4 on a loop device, below `folder`. Raises CalledProcessError where none can be mounted, or unmounted."""
    place = Path(tempfile.mkdtemp(dir=folder, prefix="disk-"))
    image, disk = place / "image", FreezableDisk(place / "mounted")
    disk.path.mkdir()
    with image.open("wb") as file:
        file.truncate(SIZE)
    subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
    subprocess.run(["mount", "-o", "loop", image, disk.path], check=True, capture_output=True)
    try:
        yield disk
    finally:
        disk.thaw()
        subprocess.run(["umount", disk.path], check=True, capture_output=True)


def in_d_state(pid: int, within: float = 5.0) -> bool:
    """Whether the process stands in uninterruptible sleep, now or soon."""
    end = time.monotonic() + within
    while (found := proc.stat(pid)) is not None and found.state != "D":
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return found is not None
