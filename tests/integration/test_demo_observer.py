"""The observer on real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from supervisor.demo import observer
from supervisor.demo.observer import Reader
from tests.bed.keeper import PATIENCE


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def until(wanted: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not wanted():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Starts `sleep` (or another command) as a service process of the demo in `tmp_path`."""
    with ExitStack() as ends:

        def run(node: str, token: int, *command: str) -> "subprocess.Popen[bytes]":
            environ = {"GPUWARD_NODE": node, "GPUWARD_FENCING_TOKEN": str(token), "GPUWARD_RUN_DIR": f"{tmp_path}/run"}
            process = ends.enter_context(subprocess.Popen(command or ("sleep", "60"), env=os.environ | environ))
            ends.callback(process.kill)
            return process

        yield run


def test_a_service_process_is_seen_with_node_and_token_and_a_zombie_is_not(
    tmp_path: Path, start: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    reader = Reader(str(tmp_path))
    process = start("node2", 7)
    until(lambda: bool(reader.sample(now()).processes))
    (seen,) = reader.sample(now()).processes
    assert (seen.pid, seen.node, seen.token) == (process.pid, "node2", 7)
    assert now() - PATIENCE < seen.started < now()
    process.kill()
    until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1].split()[0] == "Z")
    assert not reader.sample(now()).processes


def test_a_process_that_becomes_a_service_by_exec_is_seen(
    tmp_path: Path, start: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    reader = Reader(str(tmp_path))
    shell = f"read x; GPUWARD_NODE=node1 GPUWARD_RUN_DIR={tmp_path}/run exec sleep 60"
    with subprocess.Popen(["sh", "-c", shell], stdin=subprocess.PIPE) as process:
        try:
            assert not reader.sample(now()).processes
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
            until(lambda: [p.pid for p in reader.sample(now()).processes] == [process.pid])
        finally:
            process.kill()


def test_a_process_whose_first_thread_has_ended_still_counts(
    tmp_path: Path, start: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    ends = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=lambda: time.sleep(60)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    process = start("node1", 1, sys.executable, "-c", ends)
    until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1].split()[0] == "Z")
    reader = Reader(str(tmp_path))
    assert [p.pid for p in reader.sample(now()).processes] == [process.pid]


def test_the_observer_reports_the_overlap_of_two_nodes_when_its_stdin_ends(
    tmp_path: Path, start: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    command = [sys.executable, "-I", "-S", observer.__file__, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        first, second = start("node1", 3), start("node2", 4)
        shown: dict[str, list[int]] = {}
        while len(shown) < 2:
            shown = json.loads(watching.stdout.readline())["present"]
        assert shown == {"node1": [3], "node2": [4]}
        first.send_signal(signal.SIGKILL)
        first.wait()
        second.kill()
        second.wait()
        output, _ = watching.communicate()
    result = json.loads(output.splitlines()[-1])["result"]
    assert result["overlap_s"] > 0
    assert {(i["node"], i["token"]) for i in result["intervals"]} == {("node1", 3), ("node2", 4)}
    assert result["samples"] > 0
