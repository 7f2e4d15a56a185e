"""Who holds a GPU device: real processes, real open files and mappings."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisor.gpu.holders import DeviceId, Hold, any_holder, holders, holds
from supervisor.gpu.simulated import SimulatedDriver, device_file

ROOT = os.geteuid() == 0


@pytest.fixture(params=["node", "file"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A simulated GPU: as a device node where that is possible, and as a regular file."""
    path = device_file(tmp_path, 0)
    if request.param == "file":
        path.touch(mode=0o666)
    SimulatedDriver(tmp_path)
    if request.param == "node" and not path.is_char_device():
        pytest.skip("no device node can be made and opened here (needs root and a file system without nodev)")
    assert path.is_char_device() == (request.param == "node")
    return path


@contextmanager
def python(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A child that runs `code` and then says so; it ends when its stdin closes."""
    code = f"import os, sys, mmap, threading, time\n{code}\nprint('ready', flush=True)\nsys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    try:
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def test_an_open_device_is_held(device: Path) -> None:
    with python("fd = os.open(sys.argv[1], os.O_RDWR)", device) as child:
        assert holds(child.pid, [DeviceId.of(device)]) == [Hold.HELD]
        assert any_holder(holders(DeviceId.of(device))) == {child.pid}


def test_a_process_without_it_does_not_hold_it(device: Path) -> None:
    with python("fd = os.open('/dev/zero', os.O_RDWR)") as child:
        assert holds(child.pid, [DeviceId.of(device)]) == [Hold.NOT_HELD]


def test_a_mapping_holds_the_device_after_its_fd_was_closed(device: Path) -> None:
    """gpu-facts, Identity: read /proc/PID/maps too."""
    if not device.is_char_device():
        device.write_bytes(bytes(mmap.PAGESIZE))
    by_libc = (  # Python's own mmap keeps a duplicate of the fd
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        f"p = libc.mmap(None, ctypes.c_size_t({mmap.PAGESIZE}), 1, 2, fd, ctypes.c_long(0))\nos.close(fd)"
    )
    with python(by_libc, device) as child:
        assert holds(child.pid, [DeviceId.of(device)]) == [Hold.HELD]


def test_a_deleted_and_remade_device_is_another(device: Path, tmp_path: Path) -> None:
    with python("fd = os.open(sys.argv[1], os.O_RDWR)", device) as child:
        device.rename(tmp_path / "old")
        SimulatedDriver(tmp_path)
        assert holds(child.pid, [DeviceId.of(device), DeviceId.of(tmp_path / "old")]) == [Hold.NOT_HELD, Hold.HELD]


def test_a_process_whose_first_thread_has_ended_still_holds_it(device: Path) -> None:
    """mxnet 4242: its state is Z and its fd folder is empty, but it lives and has the GPU."""
    code = (
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "def rest():\n"
        "    while True:\n"
        "        with open('/proc/self/stat') as f: state = f.read().rpartition(')')[2].split()[0]\n"
        "        if state == 'Z': break\n"
        "        time.sleep(0.001)\n"
        "    os.write(1, b'ready\\n')\n"
        "    time.sleep(600)\n"
        "threading.Thread(target=rest).start()\n"
        "import ctypes\nexit_thread = 60 if os.uname().machine == 'x86_64' else 93\n"
        "ctypes.CDLL(None).syscall(exit_thread, 0)"
    )
    with python(code, device) as child:
        assert holds(child.pid, [DeviceId.of(device)]) == [Hold.HELD]


def test_a_real_zombie_holds_nothing(device: Path) -> None:
    with python("fd = os.open(sys.argv[1], os.O_RDWR)", device) as child:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert holds(child.pid, [DeviceId.of(device)]) == [Hold.NOT_HELD]


def test_a_process_that_has_gone_holds_nothing(device: Path) -> None:
    with python("") as child:
        pid = child.pid
    assert holds(pid, [DeviceId.of(device)]) == [Hold.NOT_HELD]


def test_what_cannot_be_read_is_unknown_and_never_free(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpu-facts: an unreadable /proc/PID/fd is unknown, never lost. (Root may read all: so denied.)"""
    with python("fd = os.open(sys.argv[1], os.O_RDWR)", device) as child:
        real = os.listdir

        def denied(path: str) -> list[str]:
            if str(path).endswith("/fd"):
                raise PermissionError(13, "Permission denied", path)
            return real(path)

        monkeypatch.setattr(os, "listdir", denied)
        assert holds(child.pid, [DeviceId.of(device)]) == [Hold.UNKNOWN]


@pytest.mark.skipif(not ROOT, reason="needs root to become somebody else")
def test_another_users_process_is_unknown_to_an_unprivileged_reader(device: Path) -> None:
    with python("fd = os.open(sys.argv[1], os.O_RDWR)", device) as child:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            os.write(writer, holds(child.pid, [DeviceId("nvidia0", None, 0, 0)])[0].encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            assert answer.read() == b"unknown"
