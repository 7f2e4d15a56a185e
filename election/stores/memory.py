"""The lock store in memory: for tests and simulation, with faults on demand.

No I/O and no thread, so that it runs in virtual time, and the same way every time. `handle` gives further clients of
the same data, each of which can be cut off, or be made to fail, by itself.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

from election.clock import Clock
from election.store import Change, Committed, Entry, ErrorClass, Granted, Snapshot, StoreError, Txn
from election.stores.transaction import Effect, effects

T = TypeVar("T")
Call = Literal["read", "commit", "grant", "keepalive", "revoke"]


@dataclass(frozen=True)
class LoseReply:
    """The call is applied at once, but its caller hears nothing."""


@dataclass(frozen=True)
class ApplyLate:
    """The caller hears nothing; the call is applied `after` seconds from when it was made, so after it gave up, say."""

    after: float


@dataclass(frozen=True)
class Fail:
    """The call is not applied and raises `error`."""

    error: StoreError


Fault = LoseReply | ApplyLate | Fail


@dataclass
class _Lease:
    ttl: int
    expires: float
    """On the clock of the data."""


class _Watcher:
    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.queue: deque[Change | None] = deque([None])
        self.wake = asyncio.Event()

    def tell(self, item: Change | None) -> None:
        self.queue.append(item)
        self.wake.set()


class _Data:
    """What all handles share: the server, so to speak."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.revision = 1
        self.entries: dict[str, Entry] = {}
        self.leases: dict[int, _Lease] = {}
        self.listeners: list[Callable[[Change], None]] = []
        self._ids = itertools.count(0x7001)

    def alive(self, lease: int) -> bool:
        return lease in self.leases

    def grant(self, ttl: int) -> Granted:
        lease = next(self._ids)
        self.leases[lease] = _Lease(ttl, self.clock.now() + ttl)
        self._await_end(lease)
        return Granted(lease, ttl)

    def apply(self, changed: Sequence[Effect]) -> None:
        if not changed:
            return
        self.revision += 1
        for effect in changed:
            if effect.value is None:
                del self.entries[effect.key]
            else:
                self.entries[effect.key] = Entry(effect.key, effect.value, self.revision, effect.lease)
        for effect in changed:
            for listener in list(self.listeners):
                listener(effect.change(self.revision))

    def end_lease(self, lease: int) -> None:
        if self.leases.pop(lease, None) is not None:
            attached = [entry for entry in self.entries.values() if entry.lease == lease]
            self.apply([Effect(entry.key, None, 0, entry.mod_revision) for entry in attached])

    def expire(self) -> None:
        now = self.clock.now()
        for lease in [lease for lease, held in self.leases.items() if held.expires <= now]:
            self.end_lease(lease)

    def _await_end(self, lease: int) -> None:
        """A timer, so that watchers hear of an expiry when it happens."""
        self.expire()
        if held := self.leases.get(lease):
            left = max(0.0, held.expires - self.clock.now())
            asyncio.get_running_loop().call_later(left, self._await_end, lease)


class MemoryStore:
    """`LockStore` in memory. Leases run on `clock`; needs a running loop whose time keeps pace with it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._data = _Data(clock)
        self._start()

    def _start(self) -> None:
        self._watchers: list[_Watcher] = []
        self._faults: deque[tuple[Fault, Call | None]] = deque()
        self._connected = True
        self._closed = False
        self._data.listeners.append(self._hear)

    def handle(self, clock: Clock | None = None) -> Self:
        """Another client of the same data, with deadlines on a clock of its own if one is given."""
        other = type(self).__new__(type(self))
        other._clock = clock or self._clock
        other._data = self._data
        other._start()
        return other

    # Faults of this client.

    def inject(self, fault: Fault, *, on: Call | None = None) -> None:
        """The next call, or the next one of that name, meets `fault`. Several queue up."""
        self._faults.append((fault, on))

    def cut_off(self) -> None:
        """From now on nothing reaches the store: calls end at their deadline, watches are silent."""
        self._connected = False

    def reconnect(self) -> None:
        """Undo `cut_off`. What watches missed is lost, as their None says."""
        self._connected = True
        for watcher in self._watchers:
            watcher.tell(None)

    # Faults of the store.

    def kill_lease(self, lease: int) -> None:
        """As `etcdctl lease revoke` by hand."""
        self._data.end_lease(lease)

    def delete(self, key: str) -> None:
        """As `etcdctl del` by hand."""
        if entry := self._data.entries.get(key):
            self._data.apply([Effect(key, None, 0, entry.mod_revision)])

    def restart_leases(self) -> None:
        """Every lease starts anew at its full TTL, as after an election of etcd."""
        for lease in self._data.leases.values():
            lease.expires = self._data.clock.now() + lease.ttl

    # The contract.

    async def read(self, keys: Sequence[str], *, prefix: bool = False, deadline: float) -> Snapshot:
        def found() -> Snapshot:
            stored = sorted(self._data.entries.values(), key=lambda entry: entry.key.encode())
            return Snapshot(tuple(_selected(stored, keys, prefix)), self._data.revision)

        return await self._call("read", found, deadline)

    async def commit(self, txn: Txn, *, deadline: float) -> Committed:
        def applied() -> Committed:
            changed = effects(txn, self._data.entries.get, self._data.alive)
            self._data.apply(changed or ())
            return Committed(changed is not None, self._data.revision)

        return await self._call("commit", applied, deadline)

    async def grant(self, ttl: int, *, deadline: float) -> Granted:
        return await self._call("grant", lambda: self._data.grant(ttl), deadline)

    async def keepalive(self, lease: int, *, deadline: float) -> int:
        def kept() -> int:
            held = self._data.leases.get(lease)
            if held is None:
                raise StoreError(ErrorClass.LOST, f"keepalive of lease {lease:x}: it expired or was revoked")
            held.expires = self._data.clock.now() + held.ttl
            return held.ttl

        return await self._call("keepalive", kept, deadline)

    async def revoke(self, lease: int, *, deadline: float) -> None:
        await self._call("revoke", lambda: self._data.end_lease(lease), deadline)

    async def watch(self, prefix: str) -> AsyncGenerator[Change | None, None]:
        watcher = _Watcher(prefix)
        self._watchers.append(watcher)
        try:
            while not self._closed:
                while watcher.queue and self._connected:
                    yield watcher.queue.popleft()
                watcher.wake.clear()
                await watcher.wake.wait()
        finally:
            self._watchers.remove(watcher)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._data.listeners.remove(self._hear)
            for watcher in self._watchers:
                watcher.wake.set()

    def _hear(self, change: Change) -> None:
        for watcher in self._watchers:
            if self._connected and change.key.startswith(watcher.prefix):
                watcher.tell(change)

    async def _call(self, name: Call, action: Callable[[], T], deadline: float) -> T:
        if self._closed or self._clock.now() >= deadline:
            why = "this store was closed" if self._closed else "its deadline had passed"
            raise StoreError(ErrorClass.TRANSIENT, f"{name} in memory: {why}", sent=False)
        fault = self._take(name)
        await asyncio.sleep(0)
        if not self._connected:
            await self._silence(name, deadline)
        match fault:
            case Fail(error):
                raise error
            case LoseReply():
                self._run(action)
                await self._silence(name, deadline)
            case ApplyLate(after):
                asyncio.get_running_loop().call_later(after, self._run, action)
                await self._silence(name, deadline)
        self._data.expire()
        return action()

    def _take(self, name: Call) -> Fault | None:
        for item in self._faults:
            if item[1] in (None, name):
                self._faults.remove(item)
                return item[0]
        return None

    def _run(self, action: Callable[[], object]) -> None:
        """Apply a call whose caller hears nothing, its error included."""
        self._data.expire()
        try:
            action()
        except StoreError:
            return

    async def _silence(self, name: Call, deadline: float) -> None:
        await self._clock.sleep_until(deadline)
        raise StoreError(ErrorClass.TRANSIENT, f"{name} in memory: no answer by the deadline")


def _selected(stored: Sequence[Entry], keys: Sequence[str], prefix: bool) -> list[Entry]:
    if prefix:
        return [entry for key in keys for entry in stored if entry.key.startswith(key)]
    return [entry for key in keys for entry in stored if entry.key == key]
