"""Ends what is left of a term without the keeper: when the keeper is dead, or died together with the supervisor.

The supervisor fences on the same schedule as the keeper, by itself (rule 16). With cgroups that needs nobody's memory:
the term's processes stand below `PARENT/term-<token>`. In weak containment the keeper's death has killed its children
(PDEATHSIG); what forked away is found by the run folder and token in its environment, as far as that was kept.
"""

import contextlib
import errno
import os
from pathlib import Path

import structlog

from election.clock import Clock
from supervisor import proc
from supervisor.cgroup import Group

log = structlog.get_logger()

PREFIX = "term-"
LOOK_EVERY = 0.02
"""Seconds between looks while a cgroup empties; a kill takes about 15 ms."""


class Remains:
    """`parent`: the fenced parent cgroup, below the cgroup2 mount; None in weak containment."""

    def __init__(self, parent: str | None, run: Path, clock: Clock) -> None:
        self._parent, self._run, self._clock = parent, run, clock

    def below(self, parent: str) -> "Remains":
        """The same for another fenced parent."""
        return Remains(parent, self._run, self._clock)

    @property
    def weak(self) -> bool:
        """What got away cannot be found for certain."""
        return self._parent is None

    def tokens(self) -> list[int]:
        """Terms of which a cgroup stands. Empty in weak containment: nothing marks a term there but its processes."""
        group = self._open()
        if group is None:
            return []
        try:
            names = (name.removeprefix(PREFIX) for name in group.children() if name.startswith(PREFIX))
            return sorted(int(name) for name in names if name.isdigit())
        finally:
            group.close()

    def strike(self, token: int) -> None:
        """SIGKILL to all of the term, now, whoever else has been asked to. Does not wait, and repeats harmlessly."""
        try:
            self._kill(token)
        except OSError as error:
            log.error("the term could not be killed", error=str(error))

    async def end(self, token: int | None, *, by: float) -> tuple[int, ...]:
        """Kill until nothing is left, bar the term and remove its cgroup. What has SIGKILL pending at `by` is frozen
        and named; what has not could still act, and is waited for as long as that takes. `token` None: every term."""
        while True:
            left = self._kill(token)
            if left is None:
                return ()
            if self._clock.now() >= by and left and all(proc.kill_pending(pid) for pid in left):
                self._freeze(token)
                return tuple(left)
            await self._clock.sleep_until(self._clock.now() + LOOK_EVERY)

    # --- the parts

    def _open(self) -> Group | None:
        if self._parent is None:
            return None
        try:
            return Group.open(self._parent)
        except FileNotFoundError:
            return None

    def _kill(self, token: int | None) -> list[int] | None:
        """The processes that are still there; None when nothing is, the cgroup of the term included."""
        if self._parent is None:
            return self._kill_by_environment(token) or None
        parent = self._open()
        if parent is None:
            return None
        try:
            left = [_end_group(parent, name) for name in _terms(parent, token)]
        finally:
            parent.close()
        if all(pids is None for pids in left):
            return None
        return [pid for pids in left if pids is not None for pid in pids]

    def _kill_by_environment(self, token: int | None) -> list[int]:
        """By run folder and token, which only the keeper gives to what it starts; never ourselves."""
        left = []
        for pid, stat in proc.snapshot().items():
            if stat.state in "ZX" or proc.environ_value(pid, "GPUWARD_RUN_DIR") != str(self._run):
                continue
            its = proc.environ_value(pid, "GPUWARD_FENCING_TOKEN")
            if its is None or pid == os.getpid() or (token is not None and its != str(token)):
                continue
            if proc.kill(pid, stat.start_ticks):
                left.append(pid)
        return left

    def _freeze(self, token: int | None) -> None:
        parent = self._open()
        if parent is None:
            return
        try:
            for name in _terms(parent, token):
                with contextlib.suppress(OSError), contextlib.closing(parent.child(name)) as term:
                    term.freeze()
            parent.set_max_descendants(0)
        finally:
            parent.close()


def _terms(parent: Group, token: int | None) -> list[str]:
    names = [name for name in parent.children() if name.startswith(PREFIX)]
    return names if token is None else [name for name in names if name == f"{PREFIX}{token}"]


def _end_group(parent: Group, name: str) -> list[int] | None:
    """Kill a term's cgroup, and remove it when it is empty. None: it is gone."""
    try:
        with contextlib.closing(parent.child(name)) as term:
            term.kill()
            if term.populated():
                return [pid for pid in term.procs_below() if not _is_zombie(pid)]
        parent.set_max_descendants(0)  # a container runtime makes missing parents anew
        return None if parent.remove_child(name) else []
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return None
        raise


def _is_zombie(pid: int) -> bool:
    found = proc.stat(pid)
    return found is None or found.state in "ZX"
