"""Real keepers for tests: one per test, in a run folder and a cgroup of its own, ended with everything below it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from election.clock import boot_time
from supervisor import proc
from supervisor.keeper import client
from supervisor.keeper.client import KeeperClient

NOBODY = 65534
PATIENCE = 30.0
"""Seconds after which a test gives up on an event or an answer. Nothing takes as long, also on a machine that is slow
and busy: a test that passes does not depend on it."""
T = TypeVar("T")
_PROGRAM = Path(client.__file__).with_name("__main__.py")
_SYSTEM_PYTHON = "/usr/bin/python3"


def soon(seconds: float = PATIENCE) -> float:
    """A deadline for a call."""
    return boot_time() + seconds


class Bed:
    """A keeper and a connected supervisor. `events` has everything that the keeper told, in order."""

    def __init__(self, run: Path, cgroup: str | None, keeper: KeeperClient) -> None:
        self.run = run
        self.cgroup = cgroup
        self.client = keeper
        self.events: list[dict[str, Any]] = []
        self.pid = 0
        self.lock_fds: list[int] = []
        keeper.on_event = self.events.append

    async def call(self, op: str, fds: tuple[int, ...] = (), **fields: Any) -> dict[str, Any]:
        """A request whose answer comes."""
        return await self.client.call(op, deadline=soon(), fds=fds, **fields)

    async def arm(self, token: int, seconds: float = 600.0) -> float:
        """Arm a term; its deadline in boot-time seconds."""
        deadline = boot_time() + seconds
        await self.call("arm", token=token, deadline_ns=int(deadline * 1e9))
        return deadline

    async def start(self, token: int, service: str, *argv: str, **fields: Any) -> dict[str, Any]:
        """Start a service as the keeper's user."""
        request: dict[str, Any] = {
            "env": {"PATH": os.environ["PATH"], "GPUWARD_SERVICE": service},
            "cwd": "/",
            "uid": None,
            "gid": None,
            "groups": [],
            "log": str(self.run / f"{service}.log"),
            "lock": None,
            **fields,
        }
        return await self.call("start", token=token, service=service, argv=list(argv), **request)

    async def give_lock(self, token: int, gpu: int = 0) -> Path:
        """A lock file for a GPU, handed to the keeper."""
        path = self.run / f"gpu-{gpu}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
        self.lock_fds.append(fd)
        os.fchown(fd, os.stat(self.run).st_uid, -1)
        await self.call("locks", fds=(fd,), token=token, locks=[{"gpu": gpu, "path": str(path)}])
        return path

    async def event(self, name: str, **fields: Any) -> dict[str, Any]:
        """Wait for an event with these fields."""
        wanted = {"event": name, **fields}
        return await until(lambda: next((e for e in self.events if wanted.items() <= e.items()), None), str(wanted))

    async def reconnect(self) -> None:
        """A new connection, as after a restart of the supervisor."""
        self.client = await KeeperClient.connect(self.run)
        self.client.on_event = self.events.append

    def log(self) -> str:
        """What the keeper wrote to stderr."""
        return (self.run / "keeper.log").read_text()


async def until(look: Callable[[], T | None], what: str, seconds: float = PATIENCE) -> T:
    """What `look` gives as soon as it is not None or False; the test fails after `seconds`."""
    end = boot_time() + seconds
    while True:
        found = look()
        if found is not None and found is not False:
            return found
        assert boot_time() < end, f"waited {seconds} s for {what}"
        await asyncio.sleep(0.002)


async def ended(pid: int, start_ticks: int, seconds: float = PATIENCE) -> float:
    """Boot time at which exactly this process had ended (by its pidfd, or by its zombie)."""
    fd = proc.open_pidfd(pid, start_ticks)
    if fd is None:
        return boot_time()
    loop = asyncio.get_running_loop()
    gone = loop.create_future()

    def ready() -> None:
        if not gone.done():
            gone.set_result(boot_time())

    loop.add_reader(fd, ready)
    try:
        async with asyncio.timeout(seconds):
            when: float = await gone
            return when
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def pid_from(path: Path) -> tuple[int, int]:
    """(pid, start ticks) of the process that wrote its pid to a file."""

    def look() -> tuple[int, int] | None:
        text = path.read_text().strip() if path.exists() else ""
        found = proc.stat(int(text)) if text else None
        return None if found is None else (found.pid, found.start_ticks)

    return await until(look, f"a pid in {path}")


@contextlib.asynccontextmanager
async def bed_around(run: Path, cgroup: str | None, start: Callable[[], Awaitable[KeeperClient]]) -> AsyncIterator[Bed]:
    """Connect, give the bed, and end the keeper with all that is below it."""
    bed = Bed(run, cgroup, await start())
    hello = await bed.call("hello")
    bed.pid = hello["pid"]
    who = proc.identity(bed.pid)
    assert who is not None
    try:
        yield bed
    finally:
        try:
            if proc.is_alive(who):
                os.kill(who.pid, signal.SIGCONT)
                await _end_term(bed)
        finally:
            await bed.client.close()
            for fd in bed.lock_fds:
                os.close(fd)
            proc.kill(who.pid, who.start_ticks)
            await ended(who.pid, who.start_ticks)
        assert "Traceback" not in bed.log(), bed.log()


async def _end_term(bed: Bed) -> None:
    if bed.client.closed.is_set():
        await bed.reconnect()
    armed = (await bed.call("hello"))["armed"]
    if armed is not None:
        await bed.call("end", token=armed["token"], by_ns=int(soon() * 1e9))


@pytest_asyncio.fixture
async def keeper(tmp_path: Path, own_cgroup: str) -> AsyncIterator[Bed]:
    """A keeper with cgroups."""
    async with bed_around(
        tmp_path, own_cgroup, lambda: client.spawn(tmp_path, own_cgroup, None, deadline=soon())
    ) as bed:
        yield bed


@pytest_asyncio.fixture
async def weak_keeper(tmp_path: Path) -> AsyncIterator[Bed]:
    """A keeper without cgroups, with our rights."""
    async with bed_around(tmp_path, None, lambda: client.spawn(tmp_path, None, None, deadline=soon())) as bed:
        yield bed


@pytest.fixture
def folder_of_nobody() -> Iterator[Path]:
    """A run folder of another user. Not below pytest's own folders, which are closed to others."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    old = "import sys; sys.exit(sys.version_info < (3, 11))"
    if not Path(_SYSTEM_PYTHON).exists() or subprocess.run([_SYSTEM_PYTHON, "-c", old], check=False).returncode:
        pytest.skip(f"needs {_SYSTEM_PYTHON} ≥ 3.11, which any user may execute")
    with tempfile.TemporaryDirectory(prefix="gpuward-test-") as name:
        os.chown(name, NOBODY, NOBODY)
        yield Path(name)


@pytest_asyncio.fixture
async def unprivileged_keeper(folder_of_nobody: Path) -> AsyncIterator[Bed]:
    """A keeper without cgroups that runs as nobody, on the system's Python."""
    async with bed_around(folder_of_nobody, None, lambda: _start_as_nobody(folder_of_nobody)) as bed:
        yield bed


async def _start_as_nobody(run: Path) -> KeeperClient:
    with (run / "keeper.log").open("wb") as log:
        starter = await asyncio.create_subprocess_exec(
            _SYSTEM_PYTHON, "-I", "-S", str(_PROGRAM), "--run", str(run), "--weak", "--detach",
            user=NOBODY, group=NOBODY, extra_groups=[], stderr=log, start_new_session=True,
        )  # fmt: skip
        assert await starter.wait() == 0, (run / "keeper.log").read_text()
    return await KeeperClient.connect(run)


@pytest_asyncio.fixture(params=["cgroup", "weak"])
async def any_keeper(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bed]:
    """A keeper of either kind."""
    cgroup = request.getfixturevalue("own_cgroup") if request.param == "cgroup" else None
    async with bed_around(tmp_path, cgroup, lambda: client.spawn(tmp_path, cgroup, None, deadline=soon())) as bed:
        yield bed


def wait_for(look: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """As `until`, for tests without a loop."""
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.002)
