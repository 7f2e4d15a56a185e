"""Containment without cgroups: a session per service, and the keeper as subreaper of all that is below it.

What it promises is less (docs/services.md): everything that descends from the keeper is found, since orphans become the
keeper's children, and each process is killed by pidfd after proof, in bounded rounds until none is left. But a job
that entered from outside is held by its pidfd alone, its orphans escape; and a keeper that is SIGKILLed takes only
its direct children along (PDEATHSIG). Works without root.
"""

import os
from collections.abc import Callable

from supervisor import proc
from supervisor.keeper.protocol import MAIN

_ROUNDS = 8  # of one kill; the keeper's loop calls again while anything is left


class WeakBox:
    """A service (its processes are found through the term) or a job (a pidfd)."""

    def __init__(self, term: "WeakTerm", name: str | None, job: tuple[int, int, int] | None = None) -> None:
        self._term = term
        self._name = name
        self._job = job  # (pid, start ticks, pidfd)
        self.cgroup: str | None = None
        self.clone_fd: int | None = None
        self.direct = True
        self.events: int | None = None
        self._sessions: dict[str, int] = {}
        """unit → its latest session."""

    def unit(self, name: str) -> None:
        """A session of its own is all there is."""

    def started(self, pid: int, unit: str | None) -> None:
        """The session of this pid is the service's."""
        if self._name is not None:
            self._term.mains.pop(self._sessions.get(unit or MAIN, 0), None)
            self._sessions[unit or MAIN] = pid
            found = proc.stat(pid)
            self._term.mains[pid] = (self._name, 0 if found is None else found.start_ticks)

    def kill_unit(self, name: str) -> None:
        """SIGKILL in rounds to what stands in the unit's session."""
        _kill_rounds(lambda: [who for who in self.members() if self.unit_of(who[0]) == name])

    def unit_of(self, pid: int) -> str | None:
        """By its session."""
        found = proc.stat(pid)
        return next((unit for unit, session in self._sessions.items() if found and found.session == session), None)

    def kill(self) -> None:
        """SIGKILL in rounds, until nothing of it is left or nothing can be signalled."""
        _kill_rounds(self.members)

    def populated(self) -> bool:
        """True while a live process is in it."""
        return bool(self.members())

    def members(self) -> list[tuple[int, int]]:
        """(pid, start ticks) of its processes now."""
        return self._members(proc.snapshot())

    def _members(self, table: dict[int, proc.Stat]) -> list[tuple[int, int]]:
        if self._job is None:
            owners = self._term.owners(table)
            return [(pid, table[pid].start_ticks) for pid, name in owners.items() if name == self._name]
        pid, ticks, pidfd = self._job
        if proc.pidfd_exited(pidfd):
            return []
        return [(pid, ticks), *((below, table[below].start_ticks) for below in _descendants(table, pid))]

    def holds(self, pid: int) -> bool:
        """True when this process is in it now."""
        return any(pid == member for member, _ in self.members())

    def discard(self) -> bool:
        """Forget it; False while it is populated."""
        if self.populated():
            return False
        self.close()
        return True

    def close(self) -> None:
        """Forget it: its first pid may be reused from now on."""
        for pid in self._sessions.values():
            self._term.mains.pop(pid, None)
        if self in self._term.jobs and self._job is not None:
            os.close(self._job[2])
            self._term.jobs.remove(self)


class WeakTerm:
    """All descendants of the keeper, and the jobs that entered."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.events: int | None = None
        self.mains: dict[int, tuple[str, int]] = {}
        """pid of a first process → its service, and its start ticks: the pid may come again."""
        self.jobs: list[WeakBox] = []
        self._known: dict[tuple[int, int], str] = {}

    def service(self, name: str) -> WeakBox:
        """A box for a service; its first process tells its session."""
        return WeakBox(self, name)

    def job(self, pid: int, pidfd: int) -> tuple[WeakBox, str | None] | None:
        """Hold a job by its pidfd; nothing is moved."""
        found = proc.stat(pid)
        if found is None or proc.pidfd_exited(pidfd):
            return None
        box = WeakBox(self, None, (pid, found.start_ticks, os.dup(pidfd)))
        self.jobs.append(box)
        return box, self.owners(proc.snapshot()).get(pid)

    def owners(self, table: dict[int, proc.Stat]) -> dict[int, str | None]:
        """Each live descendant of the keeper with its service (None: not known).

        By its ancestors, by what was known of it before, by its session, by GPUWARD_SERVICE in its environment.
        """
        found: dict[int, str | None] = {}
        for pid in _descendants(table, os.getpid()):
            entry = table[pid]
            name = (
                self._by_ancestors(table, pid)
                or self._known.get((pid, entry.start_ticks))
                or self._by_session(table, entry)
                or proc.environ_value(pid, "GPUWARD_SERVICE")
            )
            if name is not None:
                self._known[pid, entry.start_ticks] = name
            found[pid] = name
        self._known = {key: name for key, name in self._known.items() if key[0] in found}
        return found

    def _by_ancestors(self, table: dict[int, proc.Stat], pid: int) -> str | None:
        for _ in range(len(table)):
            entry = table.get(pid)
            name, ticks = self.mains.get(pid, ("", 0))
            if name and entry is not None and entry.start_ticks == ticks:
                return name
            if entry is None or entry.ppid == os.getpid():
                return None
            pid = entry.ppid
        return None

    def _by_session(self, table: dict[int, proc.Stat], entry: proc.Stat) -> str | None:
        """A pid does not come again while it names a session."""
        name, ticks = self.mains.get(entry.session, ("", 0))
        leader = table.get(entry.session)
        known = leader is None or leader.start_ticks == ticks
        return name if name and known and entry.start_ticks >= ticks else None

    def members(self) -> list[tuple[int, int]]:
        """(pid, start ticks) of all that lives."""
        table = proc.snapshot()
        found = {(pid, table[pid].start_ticks) for pid in _descendants(table, os.getpid())}
        for job in self.jobs:
            found.update(job._members(table))
        return sorted(found)

    def pids(self) -> list[int]:
        """Its processes now."""
        return [pid for pid, _ in self.members()]

    def kill(self) -> None:
        """SIGKILL to everything of the term, in rounds."""
        _kill_rounds(self.members)

    def populated(self) -> bool:
        """True while anything of the term lives."""
        return bool(self.members())

    def freeze(self) -> list[int]:
        """There is nothing to freeze with: what is left is named."""
        return self.pids()

    def discard(self) -> bool:
        """Forget it; False while it is populated."""
        if self.populated():
            return False
        for job in list(self.jobs):
            job.close()
        return True


class WeakPlaces:
    """The keeper's own process tree."""

    kind = "process-group"
    parent: str | None = None

    def open_term(self, token: int) -> WeakTerm:
        """A term; nothing has to be made."""
        return WeakTerm(token)

    def shut(self) -> None:
        """There is no door to shut."""

    def sweep(self, keep: list[int]) -> list[int]:
        """With no term to be kept, nothing may be below the keeper."""
        if not keep:
            WeakTerm(0).kill()
        return []


def _descendants(table: dict[int, proc.Stat], root: int) -> list[int]:
    """Live processes below `root`; a zombie has ended, but what is below it counts."""
    children: dict[int, list[int]] = {}
    for entry in table.values():
        children.setdefault(entry.ppid, []).append(entry.pid)
    found, queue, seen = [], [root], {root}
    while queue:
        for pid in children.get(queue.pop(), []):
            if pid not in seen:
                seen.add(pid)
                queue.append(pid)
                if table[pid].state not in "ZX":
                    found.append(pid)
    return found


def _kill_rounds(members: Callable[[], list[tuple[int, int]]]) -> None:
    done: set[tuple[int, int]] = set()
    for _ in range(_ROUNDS):
        fresh = [who for who in members() if who not in done]
        if not fresh:
            return
        for pid, ticks in fresh:
            proc.kill(pid, ticks)
            done.add((pid, ticks))
