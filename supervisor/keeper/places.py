"""Where processes live: the cgroups of a term, `PARENT/term-<token>/…`. The weak counterpart is weak.py.

    term-<token>/<service>/main      the service's processes
    term-<token>/<service>/side-…    a sidecar of it
    term-<token>/<service>/look-…    a look at it from inside
    term-<token>/<service>/gate      empty; removed by a kill: no container starts without it
    term-<token>/<service>/job-N     jobs of `gpuward lock run` that it started
    term-<token>/<service>/<id>      a Docker container of it
    term-<token>/jobs/job-N          jobs from elsewhere

A container is started by an engine that is not ours, perhaps long after it was asked to. So its mounts contain `gate`
(supervisor.service.container): a runtime first puts the container's process into its cgroup and then makes the mounts,
so what began before the gate was removed is in the cgroup when the kill comes, and what begins later fails. On a hybrid
machine nothing else would do: runc goes on there where it cannot make or join a cgroup v2 group (1.1.5, measured).

Processes stand in leaves only. Nothing here waits: killing, looking and removing are separate calls, and the keeper's
loop makes them when the kernel says that something changed.
"""

import contextlib
import errno
import os
from collections.abc import Callable
from typing import Protocol

from supervisor import proc
from supervisor.cgroup import Group
from supervisor.keeper.protocol import LOOK, MAIN, SIDECAR
from supervisor.keeper.spawn import birth_works

_PREFIX = "term-"
_MAX_DEPTH = 32
"""Groups below one another in a term: more than any container runtime needs, and quick to remove."""
_PROBE = "probe"
GATE = "gate"
JOBS = "jobs"
"""The folder of jobs from elsewhere: no service can have this name."""


class Box(Protocol):
    """A set of processes that is killed and empties as one: a service or a job."""

    cgroup: str | None
    clone_fd: int | None
    direct: bool
    """Children can be born in it (spawn.birth_works)."""
    events: int | None

    def unit(self, name: str) -> Group | None:
        """Where a further process of it is to be born, to be closed by the caller; None: as the first one."""

    def started(self, pid: int, unit: str | None) -> None:
        """A process of the box was started by us."""

    def kill(self) -> None:
        """SIGKILL to everything in it."""

    def kill_unit(self, name: str) -> None:
        """SIGKILL to everything of one unit."""

    def unit_of(self, pid: int) -> str | None:
        """In which unit this process of it is now; None: in none of its own, as a job is."""

    def populated(self) -> bool:
        """True while a live process is in it."""

    def members(self) -> list[tuple[int, int]]:
        """(pid, start ticks) of its processes; each is to be proven again before a signal."""

    def holds(self, pid: int) -> bool:
        """True when this process is in it now."""

    def discard(self) -> bool:
        """Remove it and close its fds; False when it is not empty."""

    def close(self) -> None:
        """Close its fds without a word about its processes."""


class TermPlace(Protocol):
    """Everything of one term."""

    token: int
    events: int | None

    def service(self, name: str) -> Box:
        """A fresh box for a service. Raises OSError."""

    def job(self, pid: int, pidfd: int) -> tuple[Box, str | None] | None:
        """Move a job into a box of its own: (box, the service that it belongs to). None: it is gone."""

    def pids(self) -> list[int]:
        """Its processes now."""

    def kill(self) -> None:
        """SIGKILL to everything of the term."""

    def populated(self) -> bool:
        """True while anything of the term lives."""

    def freeze(self) -> list[int]:
        """Freeze what is left and name it."""

    def discard(self) -> bool:
        """Remove it, children first, and close its fds; False when it is not empty."""


class Places(Protocol):
    """The node's containment."""

    kind: str
    parent: str | None
    """The fenced parent, below the cgroup2 mount."""

    def open_term(self, token: int) -> TermPlace:
        """Let processes in again, and make the term's place. Raises OSError."""

    def shut(self) -> None:
        """Nothing below may be made from now on."""

    def sweep(self, keep: list[int]) -> list[int]:
        """Kill and remove what belongs to any other term; the tokens of what was found."""


class CgroupBox:
    """A service or a job in a cgroup of its own."""

    def __init__(self, folder: Group, name: str, leaf: str | None, direct: bool = False) -> None:
        """Made anew, except what still stands there: with all that is in it."""
        self._folder = folder
        self._name = name
        self.direct = direct and folder.remove_child(name)  # never into one that was killed before
        self._group = folder.make(name)
        self._leaf = self._group if leaf is None else self._group.make(leaf)
        self.cgroup: str | None = self._group.path
        self.clone_fd: int | None = self._leaf.fd
        self.events: int | None = self._group.open_events()
        self.closed = False

    def unit(self, name: str) -> Group:
        """A fresh cgroup: one that was killed takes nobody (spawn.birth_works). Raises OSError while somebody of the
        last one is still on the way out."""
        if not self._group.remove_child(name):
            raise OSError(errno.EBUSY, f"{name} is not empty yet")
        return self._group.make(name)

    def started(self, pid: int, unit: str | None) -> None:
        """The kernel knows."""

    def kill_unit(self, name: str) -> None:
        """SIGKILL to everything of one unit."""
        with contextlib.suppress(FileNotFoundError):
            unit = self._group.child(name)
            try:
                _unless_gone(unit.kill)
            finally:
                unit.close()

    def unit_of(self, pid: int) -> str | None:
        """By its cgroup."""
        path, own = proc.cgroup_path(pid), f"{self._group.path}/"
        name = path[len(own) :].partition("/")[0] if path is not None and path.startswith(own) else ""
        return name if name == MAIN or name.startswith((SIDECAR, LOOK)) else None

    def open_gate(self) -> None:
        """A container may be started in it, until the first kill."""
        self._group.make(GATE).close()

    def shut_gate(self) -> None:
        """No container starts in it from now on: what does not stand in it yet fails."""
        if not self.closed:
            with contextlib.suppress(OSError):
                self._group.remove_child(GATE)

    def kill(self) -> None:
        """SIGKILL to everything in it, with its gate shut before."""
        self.shut_gate()
        _unless_gone(self._group.kill)

    def populated(self) -> bool:
        """True while a live process is in it."""
        return self._group.populated()

    def members(self) -> list[tuple[int, int]]:
        """(pid, start ticks) of every process in it."""
        return _with_ticks(self._group.procs_below())

    def holds(self, pid: int) -> bool:
        """True when /proc says that the process stands here or below."""
        return _is_below(proc.cgroup_path(pid), self._group.path)

    def enter(self, pid: int) -> None:
        """Move a process in."""
        self._leaf.enter(pid)

    def job_folder(self) -> Group:
        """Where jobs of this service get their groups."""
        return self._group

    def discard(self) -> bool:
        """Remove it and close its fds; False when it is not empty."""
        if not self._folder.remove_child(self._name):
            return False
        self.close()
        return True

    def close(self) -> None:
        """Close the fds; the cgroup stays."""
        self.closed = True
        if self.events is not None:
            os.close(self.events)
            self.events = None
        if self._leaf is not self._group:
            self._leaf.close()
        self._group.close()


class CgroupTerm:
    """`PARENT/term-<token>`."""

    def __init__(self, parent: Group, token: int) -> None:
        self.token = token
        self._parent = parent
        self._direct = _birth_works(parent)
        self._name = f"{_PREFIX}{token}"
        self._group = parent.make(self._name)
        self._group.set_max_depth(_MAX_DEPTH)
        self._jobs = self._group.make(JOBS)
        self._boxes: dict[str, CgroupBox] = {}
        self._job_count = 0
        self.events: int | None = self._group.open_events()

    def found(self) -> list[tuple[str | None, CgroupBox, bool]]:
        """What an earlier keeper made: (service, box, is it a job's), a service before its jobs."""
        boxes: list[tuple[str | None, CgroupBox, bool]] = []
        for name in self._group.children():
            if name == JOBS:
                boxes += [(None, box, True) for box in self._jobs_in(self._jobs)]
                continue
            self._boxes[name] = service = CgroupBox(self._group, name, MAIN)
            boxes.append((name, service, False))
            boxes += [(name, box, True) for box in self._jobs_in(service.job_folder())]
        return boxes

    def _jobs_in(self, folder: Group) -> list[CgroupBox]:
        numbers = [int(name[4:]) for name in folder.children() if name.startswith("job-") and name[4:].isdigit()]
        self._job_count = max([self._job_count, *numbers])
        return [CgroupBox(folder, f"job-{number}", None) for number in numbers]

    def service(self, name: str) -> CgroupBox:
        """A fresh cgroup for a service."""
        self._boxes[name] = box = CgroupBox(self._group, name, MAIN, self._direct)
        box.open_gate()
        return box

    def job(self, pid: int, pidfd: int) -> tuple[CgroupBox, str | None] | None:
        """Move the caller below its service, else below `jobs`; then prove that it is the caller and stands there.

        A pid that was reused in between would have put a stranger in: it is put back where it was.
        """
        before = proc.cgroup_path(pid)
        service, folder = self._home_of(before)
        self._job_count += 1
        box = CgroupBox(folder, f"job-{self._job_count}", None)
        try:
            box.enter(pid)
        except OSError:
            box.discard()
            return None
        if box.holds(pid) and not proc.pidfd_exited(pidfd):
            return box, service
        self._put_back(box, before)
        return None

    def _home_of(self, path: str | None) -> tuple[str | None, Group]:
        for name, box in self._boxes.items():
            if not box.closed and box.cgroup is not None and _is_below(path, box.cgroup):
                return name, box.job_folder()
        return None, self._jobs

    def _put_back(self, box: CgroupBox, before: str | None) -> None:
        strangers = box.members()
        if strangers and before is not None:
            home = Group.open(before)
            try:
                for pid, _ in strangers:
                    home.enter(pid)
            finally:
                home.close()
        box.discard()

    def pids(self) -> list[int]:
        """Its processes now."""
        return sorted(set(self._group.procs_below()))

    def kill(self) -> None:
        """SIGKILL to everything of the term, then the gates. To be repeated until it is empty and removed: a container
        may have passed its gate just before, and is in the term then."""
        _unless_gone(self._group.kill)
        for box in self._boxes.values():
            box.shut_gate()

    def populated(self) -> bool:
        """True while anything of the term lives."""
        return self._group.populated()

    def freeze(self) -> list[int]:
        """cgroup.freeze = 1: a process that comes back from the kernel does nothing more."""
        _unless_gone(self._group.freeze)
        return self.pids()

    def discard(self) -> bool:
        """Remove the term's cgroup, children first; False when it is not empty."""
        if not self._parent.remove_child(self._name):
            return False
        for box in self._boxes.values():
            box.close()
        if self.events is not None:
            os.close(self.events)
            self.events = None
        self._jobs.close()
        self._group.close()
        return True


class CgroupPlaces:
    """The fenced parent of this node's services."""

    kind = "cgroup"

    def __init__(self, parent: Group) -> None:
        self._parent = parent
        self.parent: str | None = parent.path

    def open_term(self, token: int) -> CgroupTerm:
        """Lift the 0 of cgroup.max.descendants and make the term's cgroup."""
        self._parent.set_max_descendants(None)
        return CgroupTerm(self._parent, token)

    def reopen(self, token: int) -> CgroupTerm | None:
        """The term of an earlier keeper; None: its cgroup is gone."""
        return self.open_term(token) if f"{_PREFIX}{token}" in self._parent.children() else None

    def shut(self) -> None:
        """cgroup.max.descendants = 0: a container runtime would make missing parents anew."""
        self._parent.set_max_descendants(0)

    def sweep(self, keep: list[int]) -> list[int]:
        """Kill and remove every `term-<token>` that is not to be kept; the tokens of those found."""
        found = []
        for name in self._parent.children():
            digits = name.removeprefix(_PREFIX)
            if name == digits or not digits.isdigit() or int(digits) in keep:
                continue
            found.append(int(digits))
            group = self._parent.child(name)
            try:
                _unless_gone(group.kill)
            finally:
                group.close()
            self._parent.remove_child(name)
        return found


def _birth_works(parent: Group) -> bool:
    parent.remove_child(_PROBE)
    group = parent.make(_PROBE)
    try:
        return birth_works(group.fd)
    finally:
        group.close()
        parent.remove_child(_PROBE)


def _is_below(path: str | None, folder: str) -> bool:
    return path is not None and (path == folder or path.startswith(folder + "/"))


def _with_ticks(pids: list[int]) -> list[tuple[int, int]]:
    found = [proc.stat(pid) for pid in pids]
    return [(entry.pid, entry.start_ticks) for entry in found if entry is not None]


def _unless_gone(action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        if error.errno not in (errno.ENODEV, errno.ENOENT):
            raise
