"""What can be seen of a demo from the outside: terms in the store, the status of each node, and the observer.

Nothing here decides anything. `Watcher` polls; `report.py` adds up what it saw.
"""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from election.clock import BootClock, boot_time
from election.record import Keys, View, parse_timestamp, view
from election.store import LockStore, StoreError
from election.stores.etcd_http import EtcdStore
from election.stores.local import LocalStore
from supervisor.demo import observer
from supervisor.demo.cluster import CLUSTER, SERVICES, DemoCluster, DemoNode

STORE_PERIOD = 0.1
STATUS_PERIOD = 0.25
"""Seconds between two polls."""
STATUS_LIMIT = 0.5
"""Seconds. A supervisor that was stopped accepts the connection and says nothing."""
STORE_LIMIT = 1.0
OBSERVER_LIMIT = 10.0

Status = dict[str, Any]


@dataclass
class Term:
    """One term as it stood in the store. Wall-clock seconds, to the millisecond."""

    token: int
    node: str
    instance: str
    since: float
    """The claim."""
    renewed_at: float
    """The last refresh that was seen."""


@dataclass(frozen=True)
class Event:
    """Something for the timeline; `at` is boot time."""

    at: float
    what: str


def open_store(cluster: DemoCluster) -> LockStore:
    """The demo's store, as anybody outside the nodes can open it."""
    if cluster.etcd is not None:
        return EtcdStore(cluster.etcd.endpoints, clock=BootClock())
    return LocalStore(cluster.store_file, clock=BootClock())


def is_active(status: Status | None) -> bool:
    """Holding and active: `/leader` of that node says 200."""
    return status is not None and status.get("term") is not None and status.get("state") == "active"


def running_services(status: Status | None) -> int:
    """How many services the node says are running."""
    return sum(service.get("state") == "running" for service in (status or {}).get("services", ()))


def is_complete(status: Status | None) -> bool:
    """Active with all services running."""
    return is_active(status) and running_services(status) == SERVICES


class Watcher:
    """`async with Watcher(cluster, notice) as watcher:` - polls store and nodes until left. `notice` is called for
    each event, as it happens."""

    def __init__(self, cluster: DemoCluster, notice: Callable[[Event], None]) -> None:
        self.cluster = cluster
        self.keys = Keys(CLUSTER)
        self.store = open_store(cluster)
        self.statuses: dict[str, Status | None] = dict.fromkeys(cluster.nodes)
        self.view: View | None = None
        self.terms: list[Term] = []
        self.works: dict[int, dict[str, Any]] = {}
        """By token: `work_s` and `steps` of a take-over, as the node that took over tells them."""
        self.observed: dict[str, list[int]] = {}
        self._notice = notice
        self._news = asyncio.Event()
        self._tasks = contextlib.AsyncExitStack()
        self._observer: asyncio.subprocess.Process | None = None
        self._result: asyncio.Future[dict[str, Any]] | None = None

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.store.close)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=STATUS_LIMIT))
            )
            await self._start_observer(stack)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            tasks = [group.create_task(self._poll_store())]
            tasks += [group.create_task(self._poll_status(session, node)) for node in self.cluster.nodes.values()]
            stack.callback(lambda: [task.cancel() for task in tasks])
            self._tasks = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.aclose()

    def active(self) -> str | None:
        """The node that says it is active, if exactly one does."""
        names = [name for name, status in self.statuses.items() if is_active(status)]
        return names[0] if len(names) == 1 else None

    def complete(self) -> str | None:
        """The node that is active with all services running, if exactly one node is active, by its own word and by
        the store's."""
        name = self.active()
        if name is None or not is_complete(self.statuses[name]) or not self.terms:
            return None
        return name if self.terms[-1].node == name else None

    async def until(self, wanted: Callable[[], bool], deadline: float) -> bool:
        """Wait until `wanted` holds, asked again after each poll. False: not by `deadline` (boot time)."""
        while not wanted():
            try:
                async with asyncio.timeout_at(deadline):
                    await self._news.wait()
            except TimeoutError:
                return wanted()
        return True

    async def finish_observer(self) -> dict[str, Any]:
        """End the observer and return its result. Raises RuntimeError where it gave none."""
        if self._observer is None or self._observer.stdin is None or self._result is None:
            raise RuntimeError("the observer was never started")
        self._observer.stdin.close()
        try:
            async with asyncio.timeout(OBSERVER_LIMIT):
                return await self._result
        except TimeoutError:
            raise RuntimeError(f"the observer gave no result within {OBSERVER_LIMIT:g} s") from None

    async def _poll_store(self) -> None:
        while True:
            with contextlib.suppress(StoreError):
                deadline = boot_time() + STORE_LIMIT
                found = await self.store.read([self.keys.leader, self.keys.term], deadline=deadline)
                self.view = view(found, self.keys)
                note_terms(self.terms, self.view, self._new_term)
            self._tell()
            await asyncio.sleep(STORE_PERIOD)

    def _tell(self) -> None:
        """Wake those who wait in `until`."""
        self._news.set()
        self._news = asyncio.Event()

    def _new_term(self, term: Term) -> None:
        claimed = boot_time() - max(0.0, time.time() - term.since)
        self._notice(Event(claimed, f"{term.node} holds the lock, token {term.token}"))

    async def _poll_status(self, session: aiohttp.ClientSession, node: DemoNode) -> None:
        while True:
            status: Status | None = None
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                async with session.get(node.url + "/status") as reply:
                    status = await reply.json()
            self._note_status(node.name, status)
            self._tell()
            await asyncio.sleep(STATUS_PERIOD)

    def _note_status(self, name: str, status: Status | None) -> None:
        before, self.statuses[name] = self.statuses[name], status
        for takeover in (status or {}).get("takeovers", ()):
            self.works[takeover["token"]] = {key: takeover.get(key) for key in ("work_s", "steps")}
        if is_complete(status) and not is_complete(before):
            self._notice(Event(boot_time(), f"{name} has all {SERVICES} services running"))
        if before is not None and status is None:
            self._notice(Event(boot_time(), f"{name} does not answer"))

    async def _start_observer(self, stack: contextlib.AsyncExitStack) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", observer.__file__, str(self.cluster.folder)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._observer = process
        self._result = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(self._read_observer(process))
        stack.push_async_callback(_end, process, reading)

    async def _read_observer(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        assert self._result is not None
        while line := await process.stdout.readline():
            said = json.loads(line)
            if "result" in said:
                self._result.set_result(said["result"])
            else:
                self._note_observed(said["at"], said["present"])
        if not self._result.done():
            self._result.set_exception(RuntimeError(f"the observer ended early, exit {await process.wait()}"))

    def _note_observed(self, at: float, present: dict[str, list[int]]) -> None:
        for name in sorted(self.observed.keys() - present.keys()):
            self._notice(Event(at, f"{name} has no service process any more"))
        for name in sorted(present.keys() - self.observed.keys()):
            self._notice(Event(at, f"first service process on {name}"))
        self.observed = present


def note_terms(terms: list[Term], seen: View, new: Callable[[Term], None] = lambda _term: None) -> None:
    """Bring `terms` up to date with one read of the store."""
    term, leader = seen.term, seen.leader
    if term is not None and term.ended is None and all(term.instance != old.instance for old in terms):
        began = parse_timestamp(term.began)
        terms.append(Term(seen.term_mod, term.node, term.instance, began, began))
        new(terms[-1])
    if leader is not None and terms and terms[-1].instance == leader.instance:
        terms[-1].since = parse_timestamp(leader.since)
        terms[-1].renewed_at = max(terms[-1].renewed_at, parse_timestamp(leader.renewed_at))


async def _end(process: asyncio.subprocess.Process, reading: "asyncio.Task[None]") -> None:
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    await process.wait()
