"""The end of a demo: every process, cgroup and folder of it is gone, however it ended.

The demo does this itself. Beside it waits a guardian, a small process in a session of its own, whose stdin is a pipe
from the demo: when the pipe closes, because the demo has finished or because it was killed, the guardian does the same.
So a killed demo leaves nothing either: its supervisors and etcd members die with it (PR_SET_PDEATHSIG, prctl(2)), and
the keepers with their services, which would outlive it until their deadline, are ended by the guardian.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from supervisor import proc
from supervisor.cgroup import Group
from supervisor.demo import mounts

LIMIT = 10.0
"""Seconds until what was killed must be gone."""
PAUSE = 0.02


def processes_of(folder: Path) -> list[tuple[int, int]]:
    """Pid and start ticks of each live process that names a path below `folder`, this one aside: in its environment,
    or, as a keeper does, whose environment is next to empty, in its arguments."""
    needle = bytes(folder) + b"/"
    found = []
    for pid in proc.all_pids():
        before = proc.stat(pid)
        if before is None or pid == os.getpid() or before.state in "ZX":
            continue
        with contextlib.suppress(OSError):
            if any(needle in Path(f"/proc/{pid}/{part}").read_bytes() for part in ("environ", "cmdline")):
                found.append((pid, before.start_ticks))
    return found


def kill_all(folder: Path) -> None:
    """SIGKILL to all processes of `folder` at once, and to what they forked meanwhile. Raises TimeoutError."""
    deadline = time.monotonic() + LIMIT
    while targets := processes_of(folder):
        fds = [fd for pid, ticks in targets if (fd := proc.open_pidfd(pid, ticks)) is not None]
        for fd in fds:
            proc.send(fd, signal.SIGKILL)
        for fd in fds:
            os.close(fd)
        if time.monotonic() > deadline:
            raise TimeoutError(f"still there {LIMIT:g} s after SIGKILL: {', '.join(str(pid) for pid, _ in targets)}")
        time.sleep(PAUSE)


def kill_group(path: str) -> None:
    """End everything in a cgroup and below it, and wait until it is empty. Raises TimeoutError."""
    group = Group.open(path)
    try:
        deadline = time.monotonic() + LIMIT
        group.kill()
        while group.populated():
            if time.monotonic() > deadline:
                raise TimeoutError(f"still in cgroup {path} {LIMIT:g} s after cgroup.kill: {group.procs_below()}")
            time.sleep(PAUSE)
    finally:
        group.close()


def remove_group(path: str) -> None:
    """Kill and remove a cgroup with all below it; one that is gone already is fine. Raises TimeoutError."""
    parent, _, name = path.strip("/").rpartition("/")
    above = Group.open(parent)
    try:
        deadline = time.monotonic() + LIMIT
        with contextlib.suppress(FileNotFoundError):
            kill_group(path)
        while not above.remove_child(name):
            if time.monotonic() > deadline:
                raise TimeoutError(f"cgroup {path} could not be removed within {LIMIT:g} s")
            time.sleep(PAUSE)
    finally:
        above.close()


def end_all(folder: Path, group: str | None) -> None:
    """Processes, cgroup, mounts, folder: all gone, or an OSError that names what is left. May be called again."""
    left: list[str] = []
    _attempt(lambda: mounts.unmount_below(folder), left)  # who waits there can be ended by nothing else
    if group:
        _attempt(lambda: remove_group(group), left)
    _attempt(lambda: kill_all(folder), left)
    _attempt(lambda: _remove_folder(folder), left)
    if left:
        raise OSError("; ".join(left))


def _attempt(step: Callable[[], None], left: list[str]) -> None:
    try:
        step()
    except OSError as error:  # TimeoutError is one
        left.append(str(error))


def _remove_folder(folder: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while folder.exists():  # what is just being killed may still write into it
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > deadline:
            raise TimeoutError(f"folder {folder} could not be removed")
        time.sleep(PAUSE)


def start_guardian(folder: Path, group: str | None, environ: dict[str, str]) -> "subprocess.Popen[bytes]":
    """The guardian; closing its stdin lets it work and end. `environ` must not name `folder`."""
    command = [sys.executable, "-m", "supervisor.demo.cleanup", str(folder), group or ""]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environ, start_new_session=True)


def dismiss(guardian: "subprocess.Popen[bytes]") -> None:
    """Let the guardian work and end."""
    if guardian.stdin:
        guardian.stdin.close()
    try:
        guardian.wait(timeout=3 * LIMIT + 5)
    except subprocess.TimeoutExpired:
        guardian.kill()
        guardian.wait()


def _guard(folder: Path, group: str | None) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    end_all(folder, group)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]), sys.argv[2] or None)
