"""The file behind the local store: plain synchronous SQLite, one connection, called from one thread at a time.

Anything may fail with `sqlite3.Error` or `OSError`, and with `StoreError` where the cause is understood.
"""

import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from election.clock import Clock
from election.store import Change, Committed, Entry, ErrorClass, Granted, Snapshot, StoreError, Txn
from election.stores.transaction import Effect, effects

APPLICATION = 0x67707764
"""`PRAGMA application_id` of our files: "gpwd"."""
SCHEMA_VERSION = 1
KEPT_EVENTS = 10_000
"""Events that a watcher which was away for long still finds; older ones are deleted."""

_SCHEMA = (
    "CREATE TABLE state (revision INTEGER NOT NULL, trimmed INTEGER NOT NULL, boot_id TEXT NOT NULL)",
    "CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, mod_revision INTEGER NOT NULL,"
    " lease INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE leases (id INTEGER PRIMARY KEY, ttl INTEGER NOT NULL, expires REAL NOT NULL)",
    "CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, mod_revision INTEGER NOT NULL,"
    " value BLOB, lease INTEGER NOT NULL, previous INTEGER NOT NULL)",
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
"""`expires`: boot-time seconds. `trimmed`: the last event that is gone."""


@dataclass(frozen=True)
class Place:
    """How far a watcher has come, and what it needs to see cheaply that nothing happened."""

    file: tuple[int, int]
    event: int
    data_version: int
    own_writes: int
    next_expiry: float


@dataclass(frozen=True)
class News:
    """What a poll found."""

    place: Place
    changes: tuple[Change, ...] = ()
    gap: bool = False
    """A first poll, or events may have been lost."""


def boot_id() -> str:
    """Of this boot of the machine (proc(5), random/boot_id)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class LocalFile:
    """The operations of the store, each one SQLite transaction. Opened when first needed, and again when the path no
    longer leads to the file that is open: a removed file must not go on serving its old users."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._identity = (0, 0)
        self._own_writes = 0

    def read(self, keys: Sequence[str], prefix: bool, deadline: float) -> Snapshot:
        condition = "substr(key, 1, length(?1)) = ?1" if prefix else "key = ?1"
        with self._transaction(deadline, write=self._anything_expired(deadline)) as db:
            query = f"SELECT key, value, mod_revision, lease FROM entries WHERE {condition} ORDER BY key"
            found = tuple(Entry(*row) for key in keys for row in db.execute(query, (key,)))
            return Snapshot(found, _revision(db))

    def commit(self, txn: Txn, deadline: float) -> Committed:
        with self._transaction(deadline, write=True) as db:
            changed = effects(txn, lambda key: _entry(db, key), lambda lease: _ttl(db, lease) is not None)
            return Committed(changed is not None, _apply(db, changed or ()))

    def grant(self, ttl: int, deadline: float) -> Granted:
        with self._transaction(deadline, write=True) as db:
            # Random, so that no lease of a file that was replaced lives on in the new one.
            lease = secrets.randbits(62) + 1
            db.execute("INSERT INTO leases VALUES (?, ?, ?)", (lease, ttl, self._clock.now() + ttl))
            return Granted(lease, ttl)

    def keepalive(self, lease: int, deadline: float) -> int:
        with self._transaction(deadline, write=True) as db:
            ttl = _ttl(db, lease)
            if ttl is None:
                text = f"keepalive of lease {lease:x} in {self._path}: it expired or was revoked: take a new one"
                raise StoreError(ErrorClass.LOST, text)
            db.execute("UPDATE leases SET expires = ? WHERE id = ?", (self._clock.now() + ttl, lease))
            return ttl

    def revoke(self, lease: int, deadline: float) -> None:
        with self._transaction(deadline, write=True) as db:
            _end_lease(db, lease)

    def poll(self, since: Place | None, deadline: float) -> News:
        """What happened since; one page is read where nothing did."""
        db = self._opened(deadline)
        now = (self._identity, _one(db, "PRAGMA data_version"), self._own_writes)
        if (
            since
            and (since.file, since.data_version, since.own_writes) == now
            and self._clock.now() < since.next_expiry
        ):
            return News(since)
        with self._transaction(deadline, write=self._anything_expired(deadline)) as db:
            gap = since is None or since.file != self._identity or since.event < _one(db, "SELECT trimmed FROM state")
            last = _one(db, "SELECT coalesce(max(id), (SELECT trimmed FROM state)) FROM events")
            start = last if gap or since is None else since.event
            query = "SELECT key, mod_revision, value, lease, previous FROM events WHERE id > ? ORDER BY id"
            found = tuple(Change(*row) for row in db.execute(query, (start,)))
            expiry = db.execute("SELECT min(expires) FROM leases").fetchone()[0]
        # The version is taken from before the transaction: what came between is found by the next poll.
        never = float("inf")
        return News(Place(now[0], last, now[1], now[2], never if expiry is None else expiry), found, gap)

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    def _anything_expired(self, deadline: float) -> bool:
        query = "SELECT EXISTS (SELECT 1 FROM leases WHERE expires <= ?)"
        return bool(self._opened(deadline).execute(query, (self._clock.now(),)).fetchone()[0])

    @contextmanager
    def _transaction(self, deadline: float, *, write: bool) -> Iterator[sqlite3.Connection]:
        """All or nothing; one that writes begins with the end of what has expired."""
        db = self._opened(deadline)
        db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        try:
            if write:
                self._own_writes += 1
                self._expire(db)
                if self._clock.now() >= deadline:
                    text = f"{self._path}: the deadline passed before it was written"
                    raise StoreError(ErrorClass.TRANSIENT, text, sent=False)
            yield db
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    def _expire(self, db: sqlite3.Connection) -> None:
        """Committed by itself, so that it stays even where the caller's own work fails."""
        query = "SELECT id FROM leases WHERE expires <= ? ORDER BY expires, id"
        expired = db.execute(query, (self._clock.now(),)).fetchall()
        for (lease,) in expired:
            _end_lease(db, lease)
        if expired:
            db.execute("COMMIT")
            db.execute("BEGIN IMMEDIATE")

    def _opened(self, deadline: float) -> sqlite3.Connection:
        if self._connection is not None and _identity(self._path) != self._identity:
            self.close()
        left = int(1000 * (deadline - self._clock.now()))
        if left <= 0:
            raise StoreError(ErrorClass.TRANSIENT, f"{self._path}: the deadline passed before it was tried", sent=False)
        if self._connection is None:
            self._connection = self._open(left)
        self._connection.execute(f"PRAGMA busy_timeout = {left}")
        return self._connection

    def _open(self, milliseconds: int) -> sqlite3.Connection:
        if not os.path.lexists(self._path):
            _make(self._path)
        before = _checked(self._path)
        db = sqlite3.connect(self._path, timeout=milliseconds / 1000, isolation_level=None, check_same_thread=False)
        try:
            self._check_ours(db)
            db.execute("PRAGMA synchronous = FULL")
            self._notice_reboot(db)
            if _identity(self._path) != before:
                raise StoreError(ErrorClass.TRANSIENT, f"{self._path}: replaced while it was opened", sent=False)
        except BaseException:
            db.close()
            raise
        self._identity = before
        return db

    def _check_ours(self, db: sqlite3.Connection) -> None:
        """Reads only: a file of another program is left as it is."""
        application, version = _one(db, "PRAGMA application_id"), _one(db, "PRAGMA user_version")
        if application != APPLICATION:
            problem = "not a store of gpuward: name another file"
        elif version != SCHEMA_VERSION:
            problem = f"found schema version {version}, expected {SCHEMA_VERSION}: use the gpuward that made it"
        else:
            return
        raise StoreError(ErrorClass.UNSUPPORTED, f"{self._path}: {problem}", sent=False)

    def _notice_reboot(self, db: sqlite3.Connection) -> None:
        """Boot time began anew, so no expiry in the file means anything: every lease has ended."""
        current = boot_id()
        if db.execute("SELECT boot_id FROM state").fetchone()[0] == current:
            return
        db.execute("BEGIN IMMEDIATE")
        if db.execute("UPDATE state SET boot_id = ?1 WHERE boot_id != ?1", (current,)).rowcount:
            db.execute("UPDATE leases SET expires = -1")
        db.execute("COMMIT")


def _identity(path: Path) -> tuple[int, int]:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return (0, 0)
    return (found.st_dev, found.st_ino)


def _make(path: Path) -> None:
    """A new store with mode 0600, if there is still none. It is finished under another name and then linked, so that
    nobody ever opens half a store; and no descriptor of `path` itself is closed, which would drop the locks that
    this process holds on it (fcntl(2), POSIX locks)."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    try:
        with closing(sqlite3.connect(draft, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            for statement in _SCHEMA:
                db.execute(statement)
            db.execute("INSERT INTO state VALUES (1, 0, ?)", (boot_id(),))
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _checked(path: Path) -> tuple[int, int]:
    """The identity of a file that may be used."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        problem = "a symbolic link: name the file itself"
    elif not stat.S_ISREG(found.st_mode):
        problem = "not a regular file: name another one"
    elif found.st_uid not in (os.geteuid(), 0):
        problem = f"owned by uid {found.st_uid}, expected {os.geteuid()}: change the owner or name another file"
    elif found.st_mode & 0o077:
        problem = f"open to others (mode {found.st_mode & 0o777:04o}), expected 0600: chmod it or name another file"
    else:
        return (found.st_dev, found.st_ino)
    raise StoreError(ErrorClass.UNSUPPORTED, f"{path}: {problem}", sent=False)


def _one(db: sqlite3.Connection, query: str) -> int:
    return int(db.execute(query).fetchone()[0])


def _revision(db: sqlite3.Connection) -> int:
    return _one(db, "SELECT revision FROM state")


def _entry(db: sqlite3.Connection, key: str) -> Entry | None:
    query = "SELECT key, value, mod_revision, lease FROM entries WHERE key = ?"
    row = db.execute(query, (key,)).fetchone()
    return Entry(*row) if row else None


def _ttl(db: sqlite3.Connection, lease: int) -> int | None:
    row = db.execute("SELECT ttl FROM leases WHERE id = ?", (lease,)).fetchone()
    return None if row is None else int(row[0])


def _end_lease(db: sqlite3.Connection, lease: int) -> None:
    attached = db.execute("SELECT key, mod_revision FROM entries WHERE lease = ? ORDER BY key", (lease,)).fetchall()
    if db.execute("DELETE FROM leases WHERE id = ?", (lease,)).rowcount:
        _apply(db, [Effect(key, None, 0, mod_revision) for key, mod_revision in attached])


def _apply(db: sqlite3.Connection, changed: Sequence[Effect]) -> int:
    """All at one new revision, which it returns; the old one where nothing changes."""
    revision = _revision(db)
    if not changed:
        return revision
    revision += 1
    db.execute("UPDATE state SET revision = ?", (revision,))
    for effect in changed:
        row = (effect.key, effect.value, revision, effect.lease)
        if effect.value is None:
            db.execute("DELETE FROM entries WHERE key = ?", (effect.key,))
        else:
            db.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", row)
        event = (effect.key, revision, effect.value, effect.lease, effect.previous)
        db.execute("INSERT INTO events (key, mod_revision, value, lease, previous) VALUES (?, ?, ?, ?, ?)", event)
    trimmed = _one(db, "SELECT max(id) FROM events") - KEPT_EVENTS
    if trimmed > 0:
        db.execute("DELETE FROM events WHERE id <= ?", (trimmed,))
        db.execute("UPDATE state SET trimmed = ?", (trimmed,))
    return revision
