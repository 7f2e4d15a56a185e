"""A file system that is frozen for a while: a process that writes into it then stands in D state, and SIGKILL waits.

It is thawed at the end, however that comes: a watcher in a session of its own thaws and unmounts it once the pipe to it
closes, also when this process was killed.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType

from supervisor import proc

_WATCH = """trap '' INT TERM HUP
cat >/dev/null
fsfreeze -u "$1" 2>/dev/null
for i in 1 2 3 4 5 6 7 8 9 10; do
    umount "$1" 2>/dev/null && exit
    sleep 0.5
done
umount -l "$1" 2>/dev/null"""
SIZE = 16 << 20
"""Bytes."""


class FreezableDisk:
    """An ext4 on a loop device, mounted at `path` within a `with` block. Raises CalledProcessError."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "mounted"
        self._watcher: subprocess.Popen[bytes] | None = None

    @staticmethod
    def unavailable() -> str | None:
        """Why there can be none here."""
        missing = [name for name in ("mkfs.ext4", "losetup", "fsfreeze", "mount") if shutil.which(name) is None]
        if os.geteuid() != 0 or missing:
            return f"needs root and {', '.join(missing) or 'its tools'}"
        return None

    def __enter__(self) -> "FreezableDisk":
        self.path.mkdir()
        image = self.folder / "image"
        with image.open("wb") as file:
            file.truncate(SIZE)
        subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
        command = ["sh", "-c", _WATCH, "sh", str(self.path)]
        self._watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        try:
            subprocess.run(["mount", "-o", "loop", image, self.path], check=True, capture_output=True)
        except subprocess.CalledProcessError:
            self._dismiss()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thaw()
        self._dismiss()

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "-f", self.path], check=True)

    def thaw(self) -> None:
        """Thawed already is fine."""
        subprocess.run(["fsfreeze", "-u", self.path], check=False, capture_output=True)

    def _dismiss(self) -> None:
        assert self._watcher is not None
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.wait()


def in_d_state(pid: int, within: float = 5.0) -> bool:
    """Whether the process stands in uninterruptible sleep, now or soon."""
    end = time.monotonic() + within
    while (found := proc.stat(pid)) is not None and found.state != "D":
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return found is not None
