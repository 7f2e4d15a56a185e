"""The processes of one started service: its cgroup, or, in weak containment, its session and what descends from it."""

import contextlib
import errno
import os
from collections.abc import Mapping
from typing import Any

from supervisor import proc
from supervisor.cgroup import Group

REMOVED = (errno.ENOENT, errno.ENODEV)
"""What a removed cgroup answers. Any other error says nothing about the processes, and is raised."""


class Footprint:
    """What a start has put on the machine. Reads /proc and cgroupfs only: bounded, and nothing that can hang."""

    def __init__(self, pid: int, start_ticks: int, cgroup: str | None) -> None:
        """`cgroup` as the keeper names it (below the mount point); None: weak containment."""
        self.pid = pid
        self.start_ticks = start_ticks
        self.cgroup = cgroup
        self._group: Group | None = None
        if cgroup is not None:
            with contextlib.suppress(FileNotFoundError):  # it may be over already
                self._group = Group.open(cgroup)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "Footprint":
        """Of what the keeper's `hello` says of a service."""
        return cls(found["pid"], found["start_ticks"], found["cgroup"])

    def pids(self) -> list[int]:
        """All of its processes, zombies included, of its jobs too."""
        if self.cgroup is None:
            return self._kin()
        if self._group is None:
            return []
        try:
            return [pid for pid in self._group.procs_below() if pid > 0]
        except OSError as error:
            if error.errno in REMOVED:
                return []
            raise

    def main_lives(self) -> bool:
        """The main process has not ended."""
        found = proc.stat(self.pid)
        return found is not None and found.start_ticks == self.start_ticks and found.state not in "ZX"

    def empty(self) -> bool:
        """True when no live process is left. A removed cgroup is empty for ever."""
        if self.cgroup is None:
            return not any(found.state not in "ZX" for found in map(proc.stat, self._kin()) if found is not None)
        return self._group is None or not self._group.populated()

    def frozen(self) -> bool:
        """True when someone has frozen the cgroup: nothing that its processes fail to do means anything."""
        if self._group is None:
            return False
        try:
            fd = os.open("cgroup.events", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._group.fd)
            try:
                return b"frozen 1" in os.read(fd, 4096)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in REMOVED:
                return False
            raise

    def kill(self) -> None:
        """SIGKILL to all of it, without the keeper's help: for the day when the keeper does not answer."""
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._group.kill()
            return
        if self.cgroup is None:
            for pid in self._kin():
                found = proc.stat(pid)
                if found is not None:
                    proc.kill(pid, found.start_ticks)

    def close(self) -> None:
        """Close the cgroup's fd. Afterwards it counts as empty: only for one that is."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _kin(self) -> list[int]:
        """The main process, its session, and all descendants of either. Nobody, where the main process is not known:
        session 0 is the kernel's.

        Once the main process is gone its pid could be another's: then only the session counts, which stays reserved
        as long as a member lives (a pid is not reused while it names a session, pid_namespaces(7) and kernel/pid.c).
        """
        if self.pid == 0:
            return []
        processes = proc.snapshot()
        main = processes.get(self.pid)
        kin = {pid for pid, found in processes.items() if found.session == self.pid and self._is_later(found)}
        if main is not None and main.start_ticks == self.start_ticks:
            kin.add(self.pid)
        grown = True
        while grown:
            more = {pid for pid, found in processes.items() if found.ppid in kin} - kin
            kin |= more
            grown = bool(more)
        return sorted(kin)

    def _is_later(self, found: proc.Stat) -> bool:
        return found.start_ticks >= self.start_ticks
