"""What the election needs of a store: a linearizable key-value map with leases, in seven calls.

A store promises no more than etcd does: a call that ends without an answer may or may not have been applied, or
may be applied later; a lease may die at any moment; a watch is a hint that may stop or skip. Every call takes an
absolute deadline (boot-time seconds) and either returns or raises `StoreError` by then.
"""

import enum
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol


class ErrorClass(enum.Enum):
    """What a failure means to the holder (rule 9). Anything unknown is transient."""

    LOST = "lost"
    """Lease not found. (A failed compare is an answer, `Committed.succeeded`, not an error.)"""
    TRANSIENT = "transient"
    AUTH = "auth"
    NO_SPACE = "no space"
    UNSUPPORTED = "unsupported"
    """The store cannot be used like this at all, say because etcd's gateway is off. Transient to the rules, since it
    may change; the text says what to do."""


class StoreError(Exception):
    """A call that failed or got no answer: what was tried, on what, what came back, what to do."""

    def __init__(self, kind: ErrorClass, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.kind = kind
        self.sent = sent
        """False only where it is certain that the request never left, so it cannot be applied later."""


@dataclass(frozen=True)
class Entry:
    """One key as it stands."""

    key: str
    value: bytes
    mod_revision: int
    lease: int
    """0: attached to none."""


@dataclass(frozen=True)
class Snapshot:
    """One linearizable read."""

    entries: tuple[Entry, ...]
    revision: int
    """Of the store as a whole, at the read."""

    def get(self, key: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.key == key), None)


@dataclass(frozen=True)
class ModIs:
    """Guard: the key's mod_revision is this; 0 means that it is absent."""

    key: str
    mod_revision: int


@dataclass(frozen=True)
class LeaseIs:
    """Guard: the key is present and attached to this lease (etcd's compare target LEASE)."""

    key: str
    lease: int


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes
    lease: int = 0
    """0 detaches the key from any lease."""


@dataclass(frozen=True)
class Delete:
    key: str


@dataclass(frozen=True)
class Txn:
    """All guards hold → all operations are applied at one revision; else nothing is."""

    guards: tuple[ModIs | LeaseIs, ...]
    operations: tuple[Put | Delete, ...]


@dataclass(frozen=True)
class Committed:
    succeeded: bool
    revision: int
    """Of the store after it; if it succeeded, the mod_revision of every key that it wrote."""


@dataclass(frozen=True)
class Granted:
    lease: int
    ttl: int
    """Seconds that were really granted: etcd silently raises small ones."""


@dataclass(frozen=True)
class Change:
    """One event of a watch."""

    key: str
    mod_revision: int
    """Of the change itself, a deletion included."""
    value: bytes | None
    """None: deleted or expired."""
    lease: int
    """Of the new value; 0 for a deletion."""
    previous_mod_revision: int | None
    """Of the version that this one replaced, 0 where there was none; None where the store cannot tell."""


class LockStore(Protocol):
    """A backend. `docs/architecture.md` lists them; one conformance suite runs over all."""

    async def read(self, keys: Sequence[str], *, prefix: bool = False, deadline: float) -> Snapshot:
        """Linearizable, all keys at one revision. With `prefix`, each key stands for all that begin with it."""
        ...

    async def commit(self, txn: Txn, *, deadline: float) -> Committed: ...

    async def grant(self, ttl: int, *, deadline: float) -> Granted: ...

    async def keepalive(self, lease: int, *, deadline: float) -> int:
        """Seconds left after it, > 0. A lease that is gone raises `StoreError` of class LOST."""
        ...

    async def revoke(self, lease: int, *, deadline: float) -> None:
        """The lease and the keys attached to it are gone. A lease that is gone already is fine."""
        ...

    def watch(self, prefix: str) -> AsyncGenerator[Change | None, None]:
        """Changes below `prefix`, from now on, until it or the store is closed (`contextlib.aclosing`). Reconnects by
        itself for ever; yields None once at the start and after each gap (events may have been lost: read again)."""
        ...

    async def close(self) -> None: ...
