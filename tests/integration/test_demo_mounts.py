"""What a demo mounts: a file whose readers SIGKILL does not end, and small disks; nothing of it stays."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from election.clock import boot_time
from supervisor.demo import cleanup
from supervisor.demo.mounts import UnansweredFile, small_disk, unmount_below
from supervisor.demo.observer import Reader
from supervisor.demo.sample import STUCK_NAME
from tests.bed.keeper import PATIENCE

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
)


def until(wanted: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not wanted():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "demo"
    made.mkdir()
    yield made
    unmount_below(made)


def reader_of(folder: Path) -> "subprocess.Popen[bytes]":
    environ = {"GPUWARD_NODE": "node1", "GPUWARD_FENCING_TOKEN": "7", "GPUWARD_RUN_DIR": f"{folder}/run"}
    return subprocess.Popen(["cat", folder / STUCK_NAME], env=os.environ | environ, stderr=subprocess.DEVNULL)


def mounts(folder: Path) -> int:
    return Path("/proc/self/mountinfo").read_text().count(str(folder))


def state(process: "subprocess.Popen[bytes]") -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1].split()[0]


def test_a_reader_of_the_unanswered_file_survives_sigkill_and_counts_as_ended_for_good(folder: Path) -> None:
    seen = Reader(str(folder))
    with UnansweredFile(folder) as file, reader_of(folder) as process:
        until(lambda: file.waiting() == process.pid)
        assert len(seen.sample(boot_time()).processes) == 1
        process.kill()
        until(lambda: state(process) == "D")
        assert process.poll() is None
        assert not seen.sample(boot_time()).processes
        file.close()
        while process.poll() is None:
            assert not seen.sample(boot_time()).processes
        assert process.returncode == -9
    assert (list(folder.iterdir()), mounts(folder)) == ([], 0)


def test_the_end_of_a_demo_lets_its_unkillable_process_go_and_unmounts_everything(folder: Path) -> None:
    small_disk(folder, 1 << 20)
    (folder / "node1").mkdir()
    small_disk(folder / "node1", 1 << 20)
    file = UnansweredFile(folder / "node1")
    with reader_of(folder / "node1") as process:
        until(lambda: file.waiting() == process.pid)
        process.kill()
        until(lambda: state(process) == "D")
        cleanup.end_all(folder, None)
        assert process.wait() == -9
    assert (folder.exists(), mounts(folder)) == (False, 0)
    file.close()


def test_a_small_disk_is_full_where_it_should_be(folder: Path) -> None:
    small_disk(folder, 1 << 20)
    with (folder / "filling").open("wb") as filling, pytest.raises(OSError, match="No space"):
        filling.write(bytes(2 << 20))
