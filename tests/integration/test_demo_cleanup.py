"""What is left of a demo: nothing, however it ended."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisor.cgroup import Group, mount_point
from supervisor.demo import cleanup, cluster
from tests.bed.keeper import PATIENCE

LIMIT = PATIENCE
with_cgroups = pytest.mark.skipif(os.geteuid() != 0 or mount_point() is None, reason="needs root and cgroup v2")


def until(wanted: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not wanted():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def folder_below(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    (folder / "node1/run").mkdir(parents=True)
    return folder


@contextmanager
def escaping(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A shell that leaves a child in a session of its own behind and lives on; what is left is killed."""
    script = "setsid sleep 61 & exec sleep 62"
    environ = os.environ | {cluster.MARK: f"{folder}/node1/"}
    with subprocess.Popen(["sh", "-c", script], env=environ) as process:
        try:
            until(lambda: len(cleanup.processes_of(folder)) == 2)
            yield process
        finally:
            cleanup.kill_all(folder)


def test_processes_are_found_by_their_environment_also_in_other_sessions(tmp_path: Path) -> None:
    folder = folder_below(tmp_path)
    with escaping(folder) as process:
        cleanup.end_all(folder, None)
        assert process.wait() == -9
        assert cleanup.processes_of(folder) == []
        assert not folder.exists()
        cleanup.end_all(folder, None)


@with_cgroups
def test_a_cgroup_goes_with_all_below_it_and_all_processes_in_it(tmp_path: Path) -> None:
    folder = folder_below(tmp_path)
    name = f"gpuward-demo-{secrets.token_hex(4)}"
    with escaping(folder) as process:
        group = Group.open(f"/{name}/node1/agents", make=True)
        group.enter(process.pid)
        group.close()
        cleanup.end_all(folder, f"/{name}")
        process.wait()
    assert not Path(f"{mount_point()}/{name}").exists()
    assert not folder.exists()


def test_the_guardian_ends_everything_when_its_demo_is_killed(tmp_path: Path) -> None:
    folder = folder_below(tmp_path)
    demo = (
        "import os, sys; from pathlib import Path; from supervisor.demo import cleanup\n"
        "cleanup.start_guardian(Path(sys.argv[1]), None, dict(os.environ)); print('guarded', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    with escaping(folder) as process:
        killed = subprocess.run([sys.executable, "-c", demo, str(folder)], capture_output=True, check=False)
        assert (killed.returncode, killed.stdout) == (-9, b"guarded\n")
        assert process.wait(timeout=LIMIT) == -9
        until(lambda: not folder.exists())
        assert cleanup.processes_of(folder) == []
