"""Without a free file descriptor nothing is known, and nothing is taken for gone: one descriptor more at each step."""

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from election.clock import boot_time
from supervisor import proc
from supervisor.cgroup import Group
from supervisor.service.footprint import Footprint
from supervisor.watchdog.snapshot import ServiceSeen, Target, live, look

FREE = range(9)
"""More than any of these reads has open at once."""


@contextlib.contextmanager
def descriptors(free: int) -> Iterator[None]:
    """Exactly so many may be opened, whatever the other threads of the tests have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 1, before[1]))
    with contextlib.suppress(OSError):
        while True:
            fillers.append(os.open("/dev/null", os.O_RDONLY))
    for fd in fillers[:free]:
        os.close(fd)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in fillers[free:]:
            os.close(fd)


@pytest.fixture
def service(own_cgroup: str, tmp_path: Path) -> Iterator[tuple[Target, "subprocess.Popen[bytes]"]]:
    """One that holds its device and, by the kernel, the mutex too; in a cgroup of a cgroup, as services stand."""
    device, lock = tmp_path / "device", tmp_path / "lock"
    device.touch()
    script = f"exec 8<{device} 9>{lock}; flock 9; echo; exec sleep 1000"
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    Group.open(f"{own_cgroup}/main", make=True).enter(process.pid)
    found = proc.stat(process.pid)
    assert found is not None
    footprint = Footprint(process.pid, found.start_ticks, own_cgroup)
    yield Target("one", footprint, boot_time(), 0, device, lock, True, 0.0, has_mutex=False), process
    footprint.close()
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("free", FREE)
def test_a_look_shows_all_of_a_service_or_nothing(service: tuple[Target, "subprocess.Popen[bytes]"], free: int) -> None:
    target, process = service
    with descriptors(free):
        seen: list[ServiceSeen] = look([target])
    assert free < max(FREE) or len(seen) == 1
    for one in seen:
        (shown,) = live(one.processes)
        assert shown.who[0] == process.pid
        assert one.main_there
        assert shown.unit == "/main"
        assert not (shown.device == "held" and not shown.flock)


@pytest.mark.parametrize("free", FREE)
def test_a_living_process_is_never_taken_for_one_that_has_ended(
    service: tuple[Target, "subprocess.Popen[bytes]"], free: int
) -> None:
    target, process = service
    asks: list[Callable[[], bool]] = [
        lambda: target.footprint.pids() == [process.pid],
        lambda: not target.footprint.empty(),
        target.footprint.main_lives,
        lambda: not proc.is_over(process.pid),
        lambda: not proc.kill_pending(process.pid),
        lambda: proc.cgroup_path(process.pid) is not None,
        lambda: proc.environ_value(process.pid, "PATH") is not None,
        lambda: proc.kill(process.pid, target.footprint.start_ticks, signal.SIGCONT),
    ]
    with descriptors(free):
        for ask in asks:
            with contextlib.suppress(OSError):
                assert ask()
