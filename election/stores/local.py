"""The lock store of one machine, in one SQLite file that several processes share.

The same promises as etcd's: one revision for all, guarded transactions, leases, watches. Time is the boot-time clock,
which all processes of a machine share; a file from before a reboot has lost its leases, as etcd would have expired
them. Nobody serves the file: whoever touches it deletes what has expired, and watchers poll it while somebody writes.

Write-ahead logging, because readers and polls then never hold up a commit, and a commit is one fsync; `synchronous`
is FULL, because a commit that a power cut takes back would let a fencing token be given twice (sqlite.org/wal.html,
sqlite.org/pragma.html#pragma_synchronous). The file must be on a local disk, as SQLite's locks demand.
"""

import asyncio
import errno
import sqlite3
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Self, TypeVar

from asyncinotify import Event, Inotify, Mask

from election.clock import Clock
from election.store import Change, Committed, ErrorClass, Granted, Snapshot, StoreError, Txn
from election.stores.local_file import LocalFile

T = TypeVar("T")

POLL = 0.05
"""Seconds between polls of a watch while somebody writes, or where inotify is not to be had."""
LIVELY = 1.0
"""Seconds for which that goes on after a write: inotify tells of it before it is on disk and can be seen."""
QUIET = 1.0
"""Seconds between polls otherwise: a slow disk may have made a commit visible later than that."""
MANY = 100
"""Events that are read at once."""
POLL_LIMIT = 2.0
"""Seconds that one poll may take."""
LONGEST_PAUSE = 1.0
"""Seconds between polls while they fail."""

_Job = tuple[Future[object], Callable[[], object]]


class _Worker:
    """One daemon thread for all SQLite work of a store: a dead disk blocks it, and neither the loop nor the exit."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        self._jobs.put((future, job))  # type: ignore[arg-type]
        return future

    def end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            future, job = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the result
                future.set_exception(error)


class _Writes:
    """Whether somebody writes to the file, as inotify tells it; where that is not to be had, always."""

    def __init__(self, path: Path) -> None:
        self._names = (path.name, f"{path.name}-wal")
        self._inotify: Inotify | None = None
        try:
            self._inotify = Inotify(cache_size=MANY)
            self._inotify.add_watch(path.parent, Mask.MODIFY | Mask.CREATE | Mask.MOVED_TO | Mask.DELETE)
        except OSError:
            self.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    async def within(self, seconds: float) -> bool:
        """Waits for so long at most. True: somebody writes, or it cannot be told."""
        if self._inotify is None:
            await asyncio.sleep(min(seconds, POLL))
            return True
        try:
            async with asyncio.timeout(seconds):
                while not self._matters(await self._inotify.get()):
                    pass
        except TimeoutError:
            return False
        except OSError:
            self.__exit__()
        return True

    def _matters(self, event: Event) -> bool:
        """A file of ours, a folder that went away, or a full queue."""
        return event.name is None or str(event.name) in self._names


class LocalStore:
    """`LockStore` in the file `path`, made with mode 0600 where it is missing; its folder must exist.

    Two stores on one file may be in one process or in several. Nothing is opened before the first call.
    """

    def __init__(self, path: Path | str, *, clock: Clock) -> None:
        self._path = Path(path)
        self._clock = clock
        self._file = LocalFile(self._path, clock)
        self._worker = _Worker(f"store {self._path.name}")
        self._closed = False

    async def read(self, keys: Sequence[str], *, prefix: bool = False, deadline: float) -> Snapshot:
        """See `LockStore`."""
        return await self._call("read", lambda: self._file.read(keys, prefix, deadline), deadline)

    async def commit(self, txn: Txn, *, deadline: float) -> Committed:
        """See `LockStore`. Applied means: on disk."""
        return await self._call("transaction", lambda: self._file.commit(txn, deadline), deadline)

    async def grant(self, ttl: int, *, deadline: float) -> Granted:
        """See `LockStore`. The TTL is granted as asked, 1 s or more."""
        return await self._call("grant", lambda: self._file.grant(max(1, ttl), deadline), deadline)

    async def keepalive(self, lease: int, *, deadline: float) -> int:
        """See `LockStore`."""
        return await self._call("keepalive", lambda: self._file.keepalive(lease, deadline), deadline)

    async def revoke(self, lease: int, *, deadline: float) -> None:
        """See `LockStore`."""
        await self._call("revocation", lambda: self._file.revoke(lease, deadline), deadline)

    async def watch(self, prefix: str) -> AsyncGenerator[Change | None, None]:
        """See `LockStore`. A change is told within `POLL` (`QUIET`, where its commit takes longer than `LIVELY`), an
        expiry within twice that."""
        place, pause, lively_until = None, POLL, 0.0
        with _Writes(self._path) as writes:
            while not self._closed:
                deadline, since = self._clock.now() + POLL_LIMIT, place
                try:
                    news = await self._call("poll", lambda: self._file.poll(since, deadline), deadline)  # noqa: B023
                except StoreError:
                    pause = min(2 * pause, LONGEST_PAUSE)
                    await self._clock.sleep_until(self._clock.now() + pause)
                    continue
                pause, place, now = POLL, news.place, self._clock.now()
                if news.gap:
                    yield None
                for change in news.changes:
                    if change.key.startswith(prefix):
                        yield change
                quiet = min(QUIET, max(POLL, place.next_expiry - now))
                if now < lively_until:
                    await self._clock.sleep_until(now + POLL)
                elif await writes.within(quiet):
                    lively_until = self._clock.now() + LIVELY

    async def close(self) -> None:
        """The file is closed and watches end. Fine to repeat."""
        if not self._closed:
            self._closed = True
            closing = self._worker.submit(self._file.close)
            self._worker.end()
            await asyncio.wait([asyncio.wrap_future(closing)], timeout=POLL_LIMIT)

    async def _call(self, what: str, job: Callable[[], T], deadline: float) -> T:
        if self._closed or self._clock.now() >= deadline:
            why = "this store was closed" if self._closed else "its deadline had passed before it was tried"
            raise StoreError(ErrorClass.TRANSIENT, f"{what} on {self._path}: {why}", sent=False)
        future = self._worker.submit(job)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline - self._clock.now()):
                    return await asyncio.wrap_future(future)
            never_ran = future.cancel()
            if never_ran or not future.done():
                text = f"{what} on {self._path}: no answer by the deadline: a slow or dead disk, or a locked file"
                raise StoreError(ErrorClass.TRANSIENT, text, sent=not never_ran)
            return future.result()
        except sqlite3.Error as error:
            raise _explained(error, f"{what} on {self._path}") from error
        except OSError as error:
            raise _unopened(error, f"{what} on {self._path}") from error


_MEANING = {
    sqlite3.SQLITE_BUSY: (ErrorClass.TRANSIENT, "another process holds the lock of the file", False),
    sqlite3.SQLITE_LOCKED: (ErrorClass.TRANSIENT, "another process holds the lock of the file", False),
    sqlite3.SQLITE_FULL: (ErrorClass.NO_SPACE, "free some space on its disk", True),
    sqlite3.SQLITE_CORRUPT: (ErrorClass.UNSUPPORTED, "the file is damaged: stop all nodes and move it away", True),
    sqlite3.SQLITE_NOTADB: (ErrorClass.UNSUPPORTED, "not a store of gpuward: name another file", False),
    sqlite3.SQLITE_READONLY: (ErrorClass.UNSUPPORTED, "the file or its disk is read-only", False),
    sqlite3.SQLITE_CANTOPEN: (ErrorClass.UNSUPPORTED, "check the folder and its permissions", False),
}
"""SQLite's primary result codes (sqlite.org/rescode.html): class, what to do, and whether it may have been applied."""


def _explained(error: sqlite3.Error, what: str) -> StoreError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    kind, advice, sent = _MEANING.get(code, (ErrorClass.TRANSIENT, "check its disk (dmesg)", True))
    return StoreError(kind, f"{what}: {error}: {advice}", sent=sent)


def _unopened(error: OSError, what: str) -> StoreError:
    """Only opening the file raises this, so nothing was applied."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(ErrorClass.NO_SPACE, f"{what}: {error}: free some space on its disk", sent=False)
    kind = ErrorClass.TRANSIENT if error.errno == errno.EIO else ErrorClass.UNSUPPORTED
    return StoreError(kind, f"{what}: {error}: check its folder, the permissions and the disk", sent=False)
