"""The end of a comparison: thawed, unmounted, every process, cgroup and folder of it gone, however it ended.

    python -m benchmarks.peers.guardian FOLDER CGROUP

It stands in a session of its own, its stdin a pipe from the benchmark: when that closes, because the benchmark has
finished or was killed, it works and ends. supervisor.demo.cleanup has a like one for demos, whose supervisors end with
the demo; those here are killed first, or they would start anew what is being ended.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from supervisor.demo import cleanup

LIMIT = 60.0
"""Seconds for all of its work."""
PAUSE = 0.5
"""Seconds after which what was in the midst of its execve(2) has a command line by which it is found."""


def start(folder: Path, group: str | None) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "benchmarks.peers.guardian", str(folder), group or ""]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, stdin=subprocess.PIPE, cwd=root, start_new_session=True)


def dismiss(guardian: "subprocess.Popen[bytes]") -> None:
    """Let it work and end. Raises TimeoutExpired."""
    assert guardian.stdin is not None
    guardian.stdin.close()
    guardian.wait(timeout=LIMIT)


def mounts(folder: Path) -> list[str]:
    """What is mounted below the folder."""
    lines = Path("/proc/mounts").read_text().splitlines()
    return [path for line in lines if (path := line.split(" ")[1]).startswith(f"{folder}/")]


def clean(folder: Path, group: str | None) -> None:
    """Raises OSError where something is left."""
    for path in mounts(folder):
        subprocess.run(["fsfreeze", "-u", path], check=False, capture_output=True)
    cleanup.kill_all(folder)
    time.sleep(PAUSE)
    cleanup.kill_all(folder)
    for path in mounts(folder):
        subprocess.run(["umount", path], check=True)
    cleanup.end_all(folder, group)


def _guard(folder: Path, group: str | None) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    clean(folder, group)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]), sys.argv[2] or None)
