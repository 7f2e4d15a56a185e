"""The folders of a node, and what lies in the run folder: one supervisor's lock, the run id, the time to stay out.

supervisor.lock   flocked by the living supervisor: a second one with this run folder refuses to start
run-id            made once per boot: by it a restarted supervisor knows its own member record (rule 17)
stay-out.json     {"until": boot-time seconds, "because"}  after a failed take-over (rule 13)
locks.json        which lock file belongs to which GPU, for `gpuward lock run --path`
"""

import contextlib
import errno
import fcntl
import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from supervisor import flock, mutex, proc
from supervisor.cgroup import Group, mount_point
from supervisor.config.schema import Config
from supervisor.files import parse_json, read_at_most, write_atomically
from supervisor.keeper.protocol import LOCKS_FILE

LARGEST = 4096
"""Bytes read of one of these files."""
MOST_GROUPS = 10_000
"""Groups looked at below our own: a bound, far above what is there without any term."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class FolderError(Exception):
    """This node cannot start in its folders: what was tried and what to do."""


class RunFolder:
    """Made by `open`; holds the flock until the process ends."""

    def __init__(self, config: Config, locks: list[int], cgroup: str | None) -> None:
        self._config, self._locks = config, locks
        self.troubles: list[str] = []
        """What could not be done at the start although the node runs: sentences for alarms."""
        self._run = config.paths.run
        self.cgroup = cgroup
        """The fenced parent, below the cgroup2 mount; None: weak containment."""
        self.boot_id = proc.boot_id()
        self.run_id = self._read_run_id()
        self.earlier_cgroup = self._read_parent()
        """Another fenced parent that an earlier run of this boot had; None: none, or the same."""
        self._stay_out_until, self._stay_out_because = self._read_stay_out()

    @classmethod
    def open(cls, config: Config) -> "RunFolder":
        """Make the folders, lock what is this node's alone, publish the lock files. Raises FolderError."""
        paths = config.paths
        locks: list[int] = []
        try:
            for path, mode in ((paths.run, 0o755), (paths.state, 0o700), (paths.log, 0o755)):
                path.mkdir(mode=mode, parents=True, exist_ok=True)
            locks.append(_lock(paths.run / "supervisor.lock", f"the run folder {paths.run}", "paths.run"))
            locks.append(_lock(paths.state / "supervisor.lock", f"the state folder {paths.state}", "paths.state"))
            unlocked = _lock_log(paths.log, locks)
            keeper = _keeper_of(paths.run)
            _refuse_nested(config.cgroup, keeper)  # before anything is made there
            cgroup = writable_cgroup(config.cgroup)
            if cgroup is not None:
                locks.append(_lock_cgroup(cgroup))
                _refuse_nested(cgroup, keeper)  # of two that start at once, the later looks when both have their lock
            folder = cls(config, locks, cgroup)
            folder.troubles += unlocked
            folder._publish_locks()
        except OSError as error:
            for lock in locks:
                os.close(lock)
            raise FolderError(f"{error}: make the folders writable, or name others in `paths`") from error
        except FolderError:
            for lock in locks:
                os.close(lock)
            raise
        return folder

    def close(self) -> None:
        """Let the next supervisor in."""
        for lock in self._locks:
            os.close(lock)

    @property
    def home(self) -> str:
        """Where terms of this node run: by it the journal's rows are known to be about these processes."""
        return f"{self._config.cluster} {self._config.node} {self._run} {self.cgroup}"

    def note_parent(self) -> None:
        """Everything of an earlier run has ended: from here on ours is the fenced parent."""
        with contextlib.suppress(OSError):  # then an edit of `cgroup` goes unnoticed, until the disk has room
            self._write("parent.json", {"boot_id": self.boot_id, "cgroup": self.cgroup})
        self.earlier_cgroup = None

    def stay_out(self, until: float, because: str) -> None:
        """No claim before `until` (boot-time seconds); kept over a restart of the supervisor."""
        self._stay_out_until, self._stay_out_because = until, because
        with contextlib.suppress(OSError):
            self._write("stay-out.json", {"boot_id": self.boot_id, "until": until, "because": because})

    def stay_out_left(self, now: float) -> tuple[float, str]:
        """Seconds left, and why."""
        return max(0.0, self._stay_out_until - now), self._stay_out_because

    def remove_stale_locks(self, note: Callable[[str], None]) -> None:
        """Nothing runs: lock files of an earlier run go, unless somebody foreign holds one."""
        for index in self._config.gpu_indexes:
            path = self._config.lock_file(index)
            try:
                if mutex.remove_stale(path):
                    note(f"removed the lock file {path} of an earlier run")
            except OSError as error:
                note(f"the lock file {path} of an earlier run stays: {error}")

    # --- the parts

    def _publish_locks(self) -> None:
        locks = {str(index): {"path": str(self._config.lock_file(index))} for index in self._config.gpu_indexes}
        path, data = self._run / LOCKS_FILE, json.dumps(locks).encode()
        with contextlib.suppress(OSError):
            if read_at_most(path, len(data) + 1) == data:
                return
        try:
            write_atomically(path, data, 0o644)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            self.troubles.append(
                f"{path} could not be written ({error.strerror}): `gpuward lock run --path` may not know which lock "
                "file belongs to which GPU; make room in `paths.run`, and start this node anew"
            )

    def _read_run_id(self) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = parse_json(read_at_most(self._run / "run-id", LARGEST))
            if found["boot_id"] == self.boot_id:
                return str(found["run_id"])
        run_id = uuid.uuid4().hex
        try:
            self._write("run-id", {"boot_id": self.boot_id, "run_id": run_id})
        except OSError as error:
            self.troubles.append(
                f"{self._run}/run-id could not be written ({error.strerror}): after a restart this node waits a TTL "
                "for its name (rule 17); make room in `paths.run`"
            )
        return run_id

    def _read_parent(self) -> str | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = parse_json(read_at_most(self._run / "parent.json", LARGEST))
            if found["boot_id"] == self.boot_id and found["cgroup"] not in (None, self.cgroup):
                return str(found["cgroup"])
        return None

    def _read_stay_out(self) -> tuple[float, str]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            found = parse_json(read_at_most(self._run / "stay-out.json", LARGEST))
            if found["boot_id"] == self.boot_id:
                return float(found["until"]), str(found["because"])
        return 0.0, ""

    def _write(self, name: str, value: object) -> None:
        write_atomically(self._run / name, json.dumps(value).encode())


def _lock(path: Path, what: str, key: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Held until this process ends. Raises FolderError if another supervisor has it, OSError."""
    lock = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise FolderError(
            f"another supervisor runs with {what}: stop it, or give this node a `{key}` of its own"
        ) from error
    return lock


def _lock_cgroup(path: str) -> int:
    """cgroup.events carries the supervisor's lock; the folder itself carries the keeper's."""
    events = Path(f"{mount_point()}{path}/cgroup.events")
    return _lock(events, f"the cgroup {path}", "cgroup", os.O_RDONLY)


def _lock_log(path: Path, locks: list[int]) -> list[str]:
    """The folder itself: two supervisors would rotate each other's files. Returns why it has no lock, if so."""
    folder = Path(os.path.realpath(path))
    try:
        locks.append(_lock(folder, f"the log folder {path}", "paths.log", os.O_RDONLY | os.O_DIRECTORY))
    except OSError as error:  # some network file systems lock no folders
        return [f"the log folder {path} cannot be locked ({error.strerror}): see that no other node has it"]
    return []


def _keeper_of(run: Path) -> int | None:
    """Pid of the keeper that an earlier run of this node left."""
    try:
        found = os.stat(run / "keeper.pid", follow_symlinks=False)
    except OSError:
        return None
    return flock.flock_pid(found.st_dev, found.st_ino)


def _refuse_nested(cgroup: str, keeper: int | None) -> None:
    """A node's cgroup is closed to new groups between its terms, with all that lies in it. Raises FolderError."""
    found = _nested(cgroup, {os.getpid(), keeper})
    if found is not None:
        other, pid = found
        raise FolderError(
            f"the cgroup {cgroup} and {other}, which pid {pid} of another node has, lie one in the other: "
            "give each node a `cgroup` beside the others"
        )


def _nested(cgroup: str, ours: set[int | None], *, keepers: bool = True) -> tuple[str, int] | None:
    """Another group, above or below, with the lock of a supervisor or a keeper, and who has it. Nothing is taken."""
    mount = mount_point()
    if mount is None:
        return None
    own = Path(f"{mount}/{cgroup.strip('/')}")
    above = [folder for folder in own.parents if folder.is_relative_to(mount) and os.access(folder, os.W_OK)]
    pids = flock.flock_pids()
    for folder in (*above, *_groups_below(own)):
        for name in (folder / "cgroup.events", folder) if keepers else (folder / "cgroup.events",):
            with contextlib.suppress(OSError):
                found = os.stat(name)
                pid = pids.get((found.st_dev, found.st_ino))
                if pid is not None and pid not in ours:
                    return f"/{folder.relative_to(mount)}", pid
    return None


def _groups_below(own: Path) -> Iterator[Path]:
    """Nobody's own group lies in a term's."""
    waiting, seen = [own], 0
    while waiting and seen < MOST_GROUPS:
        folder = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
            below = [folder / name for name in names if not name.startswith("term-")]
            seen += len(below)
            waiting += below
            yield from below


@contextlib.contextmanager
def nobody_else_in(cgroup: str) -> Iterator[bool]:
    """True, while it lasts, if no other supervisor or keeper has this fenced parent."""
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(os.close, _lock_cgroup(cgroup))
        except (OSError, FolderError):
            yield False
            return
        if _nested(cgroup, {os.getpid()}, keepers=False) is not None:
            yield False
            return
        yield stack.enter_context(no_keeper_in(cgroup))


@contextlib.contextmanager
def no_keeper_in(cgroup: str) -> Iterator[bool]:
    """True, while it lasts, if no keeper has this fenced parent."""
    with contextlib.ExitStack() as stack:
        try:
            keeper = stack.enter_context(contextlib.closing(Group.open(cgroup)))
            fcntl.flock(keeper.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def writable_cgroup(path: str) -> str | None:
    """`path` as the fenced parent, if groups can be made there, entered from where we stand, and killed as a whole.

    Entering needs write access to cgroup.procs of the common ancestor too (cgroup-v2.rst, "Delegation Containment").
    Nothing is tried out: the parent of a node that has been fenced allows no new group until the next term.
    """
    own, mount = proc.cgroup_path(os.getpid()), mount_point()
    if own is None or mount is None:
        return None
    try:
        Group.open(path, make=True).close()
    except OSError:
        return None
    below = "/" + path.strip("/")
    ancestor = os.path.commonpath([own, below])
    needed = (f"{mount}{below}", f"{mount}{below}/cgroup.kill", f"{mount}{ancestor.rstrip('/')}/cgroup.procs")
    return below if all(os.access(file, os.W_OK) for file in needed) else None
