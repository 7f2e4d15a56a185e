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

from supervisor import proc
from supervisor.keeper.client import KeeperClient, KeeperGone, KeeperRefused, spawn

GONE_WITHIN = 5.0
"""Seconds from SIGKILL to the keeper's exit; it holds no file that could block it."""
POLL = 0.01


class KeeperLink:
    """`cgroup` None: weak containment. `on_event` gets each event of the keeper, `on_gone` is called once per loss."""

    def __init__(
        self,
        run: Path,
        cgroup: str | None,
        group: str | None,
        *,
        on_event: Callable[[dict[str, Any]], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._run, self._cgroup, self._group = run, cgroup, group
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
    def connected(self) -> bool:
        return self._client is not None and not self._client.closed.is_set()

    async def ensure(self, *, deadline: float) -> None:
        """A keeper answers when this returns. Raises KeeperGone, which says why there is none."""
        async with self._one:
            if not self.connected:
                await self._find_or_start(deadline)

    async def _find_or_start(self, deadline: float) -> None:
        await self._end_old(deadline)
        try:
            client = await KeeperClient.connect(self._run)
            self.found = True
        except KeeperGone:
            self.found = False
            client = await spawn(self._run, self._cgroup, self._group, deadline=deadline)
        try:
            self.hello = await client.call("hello", deadline=deadline)
        except BaseException:
            await client.close()
            raise
        self._pidfd = os.pidfd_open(int(self.hello["pid"]))
        client.on_event = self._on_event
        self._client = client
        self._there.set()
        self._watcher = asyncio.create_task(self._watch(client))

    async def call(self, op: str, *, deadline: float, fds: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """As `KeeperClient.call`. Raises KeeperGone too while there is no keeper, and none is about to be."""
        if self.replacing and not self.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._there.wait()
        if self._client is None:
            raise KeeperGone(f"{op}: there is no keeper")
        return await self._client.call(op, deadline=deadline, fds=fds, **fields)

    async def look(self, *, deadline: float) -> None:
        """Bring `hello` up to date. A keeper that is silent until `deadline` counts as gone: it could not end anything
        at its deadline either (rule 16)."""
        client = self._client
        if client is None:
            return
        try:
            self.hello = await client.call("hello", deadline=deadline)
        except KeeperRefused:
            return
        except KeeperGone:
            await client.close()

    async def leave(self, *, deadline: float) -> None:
        """Tell the keeper to go, and let go of it. One that has a term stays, and ends it at its deadline."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._client is not None:
            with contextlib.suppress(Exception):
                await self._client.call("quit", deadline=deadline)
            await self._client.close()
            self._client = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    async def _watch(self, client: KeeperClient) -> None:
        await client.closed.wait()
        self._there.clear()
        self._on_gone()

    async def _end_old(self, deadline: float) -> None:
        """The keeper whose connection broke must not come to life beside a new one."""
        if self._pidfd < 0:
            return
        proc.send(self._pidfd, signal.SIGKILL)
        loop = asyncio.get_running_loop()
        until = min(deadline, loop.time() + GONE_WITHIN)
        while not proc.pidfd_exited(self._pidfd):
            if loop.time() >= until:
                raise KeeperGone("the old keeper survives SIGKILL; no new one is started beside it")
            await asyncio.sleep(POLL)
        os.close(self._pidfd)
        self._pidfd = -1
        self._client = None
