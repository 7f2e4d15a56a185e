"""What benchmarks/supervisors.py stands on leaves nothing behind: no frozen file system, no process, no cgroup."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.cost import cpu_seconds
from benchmarks.peers.disk import FreezableDisk, in_d_state
from supervisor.cgroup import mount_point
from tests.bed.keeper import wait_for
from tests.bed.nodes import gone

ROOT = Path(__file__).parents[2]
_FREEZE_AND_HANG = """
import subprocess, sys, time
from benchmarks.peers.bed import bed
from benchmarks.peers.disk import freezable_disk, in_d_state
from benchmarks.peers.runit import Runit

class Shell(Runit):
    name = "shell"
    def command(self): return ["sleep", "1000"]

with bed() as place, freezable_disk(place.folder) as disk:
    services = place.services(0, stuck=("write", str(disk.path / "file")))
    (disk.path / "file").touch()
    peer = Shell(services[0].folder.parent, services)
    peer.start()
    stuck = subprocess.Popen(services[0].command)
    while not services[0].stamps():
        time.sleep(0.01)
    disk.freeze()
    assert in_d_state(stuck.pid)
    print(place.folder, stuck.pid, peer.process.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.skipif(FreezableDisk.unavailable() is not None, reason="needs root and a disk that can be frozen")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_comparison_that_is_killed_thaws_its_disk_and_leaves_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", _FREEZE_AND_HANG], cwd=ROOT, stdout=subprocess.PIPE) as benchmark:
        try:
            assert benchmark.stdout is not None
            words = benchmark.stdout.readline().split()
            folder, stuck, peer = Path(os.fsdecode(words[0])), int(words[1]), int(words[2])
            assert in_d_state(stuck)
        finally:
            benchmark.kill()
    wait_for(lambda: gone(stuck) and gone(peer) and not folder.exists(), "everything to be gone")
    assert str(folder) not in Path("/proc/mounts").read_text()
    wait_for(lambda: not Path(f"{mount_point()}/{folder.name}").exists(), "its cgroup to be gone")


def test_cpu_time_is_that_of_the_process_and_counts_up() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy,
        subprocess.Popen(["sleep", "60"]) as idle,
    ):
        try:
            wait_for(lambda: cpu_seconds(busy.pid) > 0.1, "it to use CPU time")
            assert cpu_seconds(idle.pid) < 0.05
        finally:
            busy.send_signal(signal.SIGKILL)
            idle.kill()
    assert cpu_seconds(busy.pid) == 0.0
