"""What a transaction does, as the stores that we keep ourselves (local, in memory) apply it. Pure.

The same as etcd's: guards against the state before, then all puts and deletions, or nothing. A put under a lease that
is gone fails the whole; a deletion of an absent key does nothing (etcd `server/etcdserver/txn`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from election.store import Change, Entry, ErrorClass, LeaseIs, ModIs, Put, StoreError, Txn


@dataclass(frozen=True)
class Effect:
    """One key as it will be."""

    key: str
    value: bytes | None
    """None: deleted."""
    lease: int
    previous: int
    """mod_revision of the version replaced; 0 where there was none."""

    def change(self, revision: int) -> Change:
        return Change(self.key, revision, self.value, self.lease, self.previous)


def effects(txn: Txn, lookup: Callable[[str], Entry | None], alive: Callable[[int], bool]) -> tuple[Effect, ...] | None:
    """What `txn` changes, to be applied at one new revision, or at none if it is empty; None where a guard fails.

    Raises `StoreError` of class LOST where a put names a lease that is not `alive`.
    """
    if not all(_holds(guard, lookup(guard.key)) for guard in txn.guards):
        return None
    found = []
    for operation in txn.operations:
        before = lookup(operation.key)
        if isinstance(operation, Put):
            if operation.lease and not alive(operation.lease):
                text = f"put of {operation.key}: lease {operation.lease:x} expired or was revoked: take a new one"
                raise StoreError(ErrorClass.LOST, text)
            value, lease = operation.value, operation.lease
            found.append(Effect(operation.key, value, lease, before.mod_revision if before else 0))
        elif before is not None:
            found.append(Effect(operation.key, None, 0, before.mod_revision))
    return tuple(found)


def _holds(guard: ModIs | LeaseIs, entry: Entry | None) -> bool:
    if isinstance(guard, ModIs):
        return guard.mod_revision == (entry.mod_revision if entry else 0)
    return entry is not None and entry.lease == guard.lease
