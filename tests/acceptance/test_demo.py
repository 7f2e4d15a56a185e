"""`gpuward demo`, as a user runs it: each fault on each store, and nothing left behind."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from supervisor.cgroup import mount_point
from supervisor.demo import cleanup, faults

ROOT = Path(__file__).parents[2]
TTL = 6
PLACES = (Path(__file__), Path(__file__).parent)
"""As many demos run at the same time, each under the flock of one of these: each has up to 30 processes."""
NOBODY = 65534
LIMIT = 15.0
"""Seconds for the clean-up."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def slot() -> Iterator[None]:
    """Waits for one of `PLACES`, however many workers there are."""
    with contextlib.ExitStack() as stack:
        fds = [os.open(place, os.O_RDONLY | os.O_CLOEXEC) for place in PLACES]
        for fd in fds:
            stack.callback(os.close, fd)
        while not any(_taken(fd) for fd in fds):
            time.sleep(0.2)
        yield


def _taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class Outcome:
    """A demo that has ended."""

    status: int
    result: dict[str, Any]
    folder: Path
    stderr: str


class Demo:
    """A running demo."""

    def __init__(
        self, *arguments: str, command: tuple[str, ...] = (sys.executable,), cwd: Path = ROOT, **environ: str
    ) -> None:
        self.process = subprocess.Popen(
            [*command, "-m", "supervisor.entry", "demo", "--ttl", str(TTL), "--format", "json", *arguments],
            cwd=cwd,
            env=os.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._said: list[str] = []

    def folder(self) -> Path:
        """Where it lives; waits until it says so."""
        line = self.until("three nodes started in ")
        found = re.search(r"started in (\S+),", line)
        assert found
        return Path(found[1])

    def until(self, text: str) -> str:
        """The first line on stderr that holds `text`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._said.append(line)
            if text in line:
                return line
        pytest.fail(f"ended without saying {text!r}:\n{''.join(self._said)}")

    def outcome(self) -> Outcome:
        """Wait for its end."""
        folder = self.folder()
        stdout, stderr = self.process.communicate()
        text = "".join(self._said) + stderr
        result = json.loads(stdout.splitlines()[-1]) if stdout else {}
        return Outcome(self.process.returncode, result, folder, text)

    def end(self) -> None:
        """For a test that failed half-way: a killed demo cleans up, too."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def demo() -> Iterator[Callable[..., Demo]]:
    started: list[Demo] = []

    def start(*arguments: str, **options: Any) -> Demo:
        started.append(Demo(*arguments, **options))
        return started[-1]

    yield start
    for each in started:
        each.end()


def remains(folder: Path) -> list[str]:
    """Whatever is left of the demo in `folder`."""
    number = folder.name.split("-")[2]
    found = [f"process {pid}" for pid, _ in cleanup.processes_of(folder)]
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if bytes(folder) in command.read_bytes():
                found.append(f"process {command.parent.name}")
        except OSError:
            continue
    mount = mount_point()
    if mount is not None:
        found += [f"cgroup {name}" for name in os.listdir(mount) if number in name]
    if str(folder) in Path("/proc/self/mountinfo").read_text():
        found.append("a mount")
    return found + [f"folder {folder}"] * folder.exists()


def nothing_remains(folder: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while left := remains(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


UNHURRIED = 15
"""TTL where the time left beside a silence of 2 s is about to be shown, and not how busy this machine is."""
TTLS = {"stop-keeper": UNHURRIED}


def seconds_for(fault: str) -> str:
    return f"{faults.make(fault).needs(TTLS.get(fault, TTL)):g}s"


ON_LOCAL = ("stop-supervisor", "kill-node")
"""The others are shown on etcd alone, to save time: one suite runs over both stores (test_store_conformance.py)."""
CASES = [("local", name) for name in ON_LOCAL] + [("etcd", name) for name in faults.NAMES]


@pytest.mark.parametrize(("store", "fault"), CASES)
def test_each_fault_leads_to_its_takeovers_without_overlap_and_leaves_nothing(
    demo: Callable[..., Demo], store: str, fault: str
) -> None:
    ttl = str(TTLS.get(fault, TTL))
    outcome = demo("--store", store, "--fault", fault, "--for", seconds_for(fault), "--ttl", ttl).outcome()
    result = outcome.result
    assert remains(outcome.folder) == []
    assert outcome.status == 0, (result, outcome.stderr)
    assert result["ok"]
    assert (result["fault"], result["store"], result["ttl_s"]) == (fault, store, int(ttl))
    assert result["overlap_s"] == 0
    assert len(result["takeovers"]) == faults.make(fault).takeovers
    assert result["services"] == {"expected": 8, "running": 8}


def test_a_takeover_after_a_node_died_waits_for_the_ttl_and_tells_its_steps(demo: Callable[..., Demo]) -> None:
    outcome = demo("--store", "local", "--fault", "kill-node", "--for", seconds_for("kill-node")).outcome()
    (takeover,) = outcome.result["takeovers"]
    assert takeover["from"] != takeover["to"]
    assert takeover["detected_s"] >= TTL
    assert takeover["work_s"] > 0
    assert takeover["steps"]


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nothing(demo: Callable[..., Demo], signum: int, status: int) -> None:
    running = demo("--store", "local", "--fault", "none", "--for", "60s")
    folder = running.folder()
    running.until("services running")
    running.process.send_signal(signum)
    assert running.process.wait(timeout=60) == status
    assert remains(folder) == []


@pytest.mark.parametrize("store", ["local", "etcd"])
def test_a_killed_demo_leaves_nothing(demo: Callable[..., Demo], store: str) -> None:
    running = demo("--store", store, "--fault", "none", "--for", "60s")
    folder = running.folder()
    running.until("services running")
    running.process.kill()
    nothing_remains(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_without_root_it_runs_in_weak_containment_and_says_so(demo: Callable[..., Demo], readable: Path) -> None:
    nobody = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", str(readable / "bin/python"))
    paths = f"{readable / 'source'}:{readable / 'packages'}"
    places = {
        "cwd": readable,
        "PYTHONPATH": paths,
        "HOME": "/",
        "TMPDIR": "/tmp",
        "LD_LIBRARY_PATH": str(readable / "lib"),
    }
    outcome = demo("--for", seconds_for("kill-node"), command=nobody, **places).outcome()
    assert outcome.result["containment"] == "process-group"
    assert outcome.result["ok"], outcome.stderr
    assert (outcome.result["fault"], outcome.result["store"]) == ("kill-node", "local")
    assert remains(outcome.folder) == []


@pytest.fixture
def readable() -> Iterator[Path]:
    """Interpreter, packages and source where anybody may read them: here they may lie in root's home."""
    folder = Path(tempfile.mkdtemp(prefix="gpuward-readable-"))
    folder.chmod(0o755)
    try:
        library = Path(sysconfig.get_path("stdlib"))
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        _copy(library, folder / "lib" / version, "site-packages", "test", "idlelib", "config-*")
        for shared in (Path(sys.base_prefix) / "lib").glob("libpython*.so*"):
            shutil.copy2(shared, folder / "lib")
        (folder / "bin").mkdir()
        shutil.copy2(Path(sys.executable).resolve(), folder / "bin/python")
        _copy(Path(sysconfig.get_path("purelib")), folder / "packages", "mypy*", "*.pth")
        for package in ("election", "supervisor"):
            _copy(ROOT / package, folder / "source" / package)
        yield folder
    finally:
        shutil.rmtree(folder)


def _copy(source: Path, target: Path, *without: str) -> None:
    shutil.copytree(source, target, copy_function=_link_or_copy, ignore=shutil.ignore_patterns(*without), symlinks=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
