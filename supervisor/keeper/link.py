"""The supervisor's hold on the one keeper of its run folder: finds it, starts it, and never leaves two.

A keeper whose connection broke is killed by pidfd and seen gone before a new one is started (rule 16).
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from supervisor import flock, proc
from supervisor.keeper import left
from supervisor.keeper.client import KeeperClient, KeeperGone, KeeperRefused, KeeperSilent, spawn

GONE_WITHIN = 5.0
"""Seconds from SIGKILL to the keeper's exit; it holds no file that could block it."""
POLL = 0.01
SILENCE = 2.0
"""Seconds without an answer, after which a keeper counts as gone (rule 16)."""
LEAST_SILENCE = 0.2
"""Seconds that a keeper has for its first answer even if its deadline is close, or has passed."""
BEFORE_SWITCH = 0.7
"""Seconds from which on a silent keeper is no longer waited for: its successor starts within 0.1 to 0.5 s."""


class KeeperLink:
    """`cgroup` None: weak containment. `on_event` gets each event of the keeper, `on_gone` is called once per loss."""

    def __init__(
        self,
        run: Path,
        cgroup: str | None,
        group: str | None,
        hardware: str | None = None,
        *,
        on_event: Callable[[dict[str, Any]], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._run, self._cgroup, self._group, self._hardware = run, cgroup, group, hardware
        self._on_event, self._on_gone = on_event, on_gone
        self._client: KeeperClient | None = None
        self._pidfd = -1
        self._watcher: asyncio.Task[None] | None = None
        self.hello: dict[str, Any] = {}
        """The keeper's latest answer about itself."""
        self.replacing = False
        """A new keeper is about to take the place of a lost one: calls wait for it."""
        self._there = asyncio.Event()
        self._one = asyncio.Lock()
        self.found = False
        """The present keeper was there before us: it knows what an earlier supervisor started."""

    @property
    def weak(self) -> bool:
        """Weak containment: what it starts dies with it."""
        return self._cgroup is None

    @property
    def connected(self) -> bool:
        return self._client is not None and not self._client.closed.is_set()

    async def ensure(self, *, deadline: float) -> None:
        """A keeper answers when this returns. Raises KeeperGone, which says why there is none."""
        async with self._one:
            if not self.connected:
                await self._find_or_start(deadline)

    async def _find_or_start(self, deadline: float) -> None:
        """The one that is there, if it answers; one that does not is killed, and a new one started."""
        lost, self._pidfd, self._client = self._pidfd, -1, None
        await self._end(lost, deadline)
        try:
            client = await self._connect(min(deadline, self._patience()))
            self.found = True
        except KeeperGone:
            await self._end(_pidfd_of_keeper(self._run), deadline)
            client = await spawn(self._run, self._cgroup, self._group, deadline=deadline, hardware=self._hardware)
            await self._ask_hello(client, deadline)
            self.found = False
        self._pidfd = os.pidfd_open(int(self.hello["pid"]))
        client.on_event = self._on_event
        self._client = client
        self._there.set()
        self._watcher = asyncio.create_task(self._watch(client))

    async def _connect(self, deadline: float) -> KeeperClient:
        client = await KeeperClient.connect(self._run)
        await self._ask_hello(client, deadline)
        return client

    async def _ask_hello(self, client: KeeperClient, deadline: float) -> None:
        try:
            self.hello = await client.call("hello", deadline=deadline)
        except BaseException:
            await client.close()
            raise

    def _patience(self) -> float:
        """Until when a keeper of an earlier run may be silent. The switch of its term must not pass meanwhile: a keeper
        that hangs does not carry it out, so a new one has to be there before."""
        now, was = asyncio.get_running_loop().time(), left.read(f"{self._run}/keeper.json")
        return min(now + SILENCE, max(now + LEAST_SILENCE, was.deadline_ns / 1e9 - BEFORE_SWITCH))

    async def call(self, op: str, *, deadline: float, fds: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """As `KeeperClient.call`. Raises KeeperGone too while there is no keeper, and none is about to be."""
        if self.replacing and not self.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._there.wait()
        if self._client is None:
            raise KeeperGone(f"{op}: there is no keeper")
        return await self._client.call(op, deadline=deadline, fds=fds, **fields)

    async def look(self, *, deadline: float) -> bool:
        """Bring `hello` up to date; False: no answer. A keeper that is silent until `deadline` counts as gone: it could
        not end anything at its deadline either (rule 16)."""
        client = self._client
        if client is None:
            return False
        try:
            self.hello = await client.call("hello", deadline=deadline)
        except KeeperRefused:
            return False
        except KeeperGone:
            await client.close()
            return False
        return True

    async def leave(self, *, deadline: float) -> None:
        """Tell the keeper to go, and let go of it. One that has a term stays, and ends it at its deadline; one that
        hangs would not, and is killed."""
        if self._watcher is not None:
            self._watcher.cancel()
        silent = False
        if self._client is not None:
            try:
                await self._client.call("quit", deadline=deadline)
            except KeeperSilent:
                silent = True
            except (KeeperGone, KeeperRefused):
                pass
            await self._client.close()
            self._client = None
        pidfd, self._pidfd = self._pidfd, -1
        if silent:
            with contextlib.suppress(KeeperGone):
                await self._end(pidfd, deadline + GONE_WITHIN)
        elif pidfd >= 0:
            os.close(pidfd)

    async def _watch(self, client: KeeperClient) -> None:
        await client.closed.wait()
        self._there.clear()
        self._on_gone()

    async def _end(self, pidfd: int | None, deadline: float) -> None:
        """A lost or silent keeper must not come to life beside a new one. Closes the pidfd. Raises KeeperGone where it
        survives."""
        if pidfd is None or pidfd < 0:
            return
        try:
            proc.send(pidfd, signal.SIGKILL)
            loop = asyncio.get_running_loop()
            until = min(deadline, loop.time() + GONE_WITHIN)
            while not proc.pidfd_exited(pidfd):
                if loop.time() >= until:
                    raise KeeperGone("the old keeper survives SIGKILL; no new one is started beside it")
                await asyncio.sleep(POLL)
        finally:
            os.close(pidfd)


def _pidfd_of_keeper(run: Path) -> int | None:
    """Of the living keeper of this run folder: whoever has the flock of keeper.pid. None: nobody."""
    try:
        found = os.stat(run / "keeper.pid", follow_symlinks=False)
        pid = flock.flock_pid(found.st_dev, found.st_ino)
        if not pid:
            return None
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    if flock.flock_pid(found.st_dev, found.st_ino) == pid:  # it had it after the pidfd was opened: it is the one
        return pidfd
    os.close(pidfd)
    return None
