"""What operators ask of a cluster: switch over, pause, exclude (rule 12). Decided on one read, written guarded by it.

None of it makes anything unsafe: a node claims by the same rules, only later or not at all.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from election.clock import Clock
from election.membership import MemberRecord, unfit
from election.record import Keys, Mark, SettingsRecord, SwitchoverRecord, View, timestamp, view
from election.store import Entry, LockStore, ModIs, Put, StoreError, Txn

HOLD_BACK = 10.0
"""Seconds for which the others leave the claim to the target, from when they see the end."""
TRIES = 3
"""Of a change that another one has overtaken."""

Change = Callable[[SettingsRecord], SettingsRecord]
Kind = Literal["unknown", "conflict", "precondition"]


class RefusedError(Exception):
    """It cannot be done now; the text says why, and what could be done. `kind`: no such node, another state of the
    cluster stands against it, or the target is not able to."""

    def __init__(self, kind: Kind, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(frozen=True)
class Cluster:
    """As one moment showed it."""

    view: View
    members: dict[str, MemberRecord]


def switchover(cluster: Cluster, target: str, mark: Mark, hold_back: float = HOLD_BACK) -> SwitchoverRecord:
    """The request to be written. Raises RefusedError."""
    now, leader, member = cluster.view, cluster.view.leader, cluster.members.get(target)
    if leader is None or now.term is None or now.term.ended is not None:
        raise RefusedError("precondition", "nobody leads: a fit node takes over by itself")
    if leader.node == target:
        raise RefusedError("conflict", f"{target} leads already")
    if leader.state != "active":
        raise RefusedError("conflict", f"{leader.node} is {leader.state}: ask again once it is active, or has ended")
    if now.pending is not None:
        raise RefusedError("conflict", f"a switchover to {now.pending.target} is under way since {now.pending.asked}")
    if now.settings.paused is not None:
        raise RefusedError("conflict", "the cluster is paused, so nobody could take over: `gpuward resume` first")
    if target in now.settings.excluded:
        raise RefusedError("precondition", f"{target} is excluded: `gpuward include {target}` first")
    if member is None:
        known = ", ".join(cluster.members) or "none"
        raise RefusedError("unknown", f"no member {target}; members are: {known}")
    if why := unfit(member):
        raise RefusedError("precondition", f"{target} cannot lead: {why}")
    return SwitchoverRecord(
        target=target, instance=now.term.instance, hold_back_s=hold_back, asked=mark.since, on=mark.on
    )


def paused(settings: SettingsRecord, mark: Mark) -> SettingsRecord:
    """A pause that stands already keeps its mark."""
    return settings.model_copy(update={"paused": settings.paused or mark})


def resumed(settings: SettingsRecord) -> SettingsRecord:
    return settings.model_copy(update={"paused": None})


def excluded(settings: SettingsRecord, node: str, mark: Mark) -> SettingsRecord:
    """An exclusion that stands already keeps its mark."""
    return settings.model_copy(update={"excluded": {node: mark} | settings.excluded})


def included(settings: SettingsRecord, node: str) -> SettingsRecord:
    left = {name: mark for name, mark in settings.excluded.items() if name != node}
    return settings.model_copy(update={"excluded": left})


class Requests:
    """Carries them out on the store. Calls raise `StoreError`: nothing was changed where its `sent` is false, else that
    is not known."""

    def __init__(self, keys: Keys, store: LockStore, clock: Clock, node: str) -> None:
        self._keys, self._store, self._clock, self._node = keys, store, clock, node

    def mark(self, because: str = "") -> Mark:
        return Mark(since=timestamp(self._clock.wall()), on=self._node, because=because)

    async def cluster(self, *, deadline: float) -> Cluster:
        with _changes_nothing():
            now = view(await self._store.read(self._keys.read, deadline=deadline), self._keys)
            found = await self._store.read([self._keys.members], prefix=True, deadline=deadline)
        return Cluster(now, _members(found.entries, self._keys.members))

    async def switch_over(self, target: str, *, deadline: float) -> SwitchoverRecord:
        """Asks the holder to pass the lock on. Raises RefusedError."""
        for _ in range(TRIES):
            cluster = await self.cluster(deadline=deadline)
            asked, seen = switchover(cluster, target, self.mark()), cluster.view
            guards = (ModIs(self._keys.switchover, seen.switchover_mod), ModIs(self._keys.term, seen.term_mod))
            txn = Txn(guards, (Put(self._keys.switchover, asked.to_json()),))
            if (await self._store.commit(txn, deadline=deadline)).succeeded:
                return asked
        raise _overtaken()

    async def change(self, change: Change, *, deadline: float) -> tuple[bool, SettingsRecord]:
        """Changes the settings: whether they were other ones before, and what they are now. Raises RefusedError."""
        for _ in range(TRIES):
            with _changes_nothing():
                now = view(await self._store.read(self._keys.read, deadline=deadline), self._keys)
            wanted = change(now.settings)
            if wanted == now.settings:
                return False, wanted
            guard, put = ModIs(self._keys.settings, now.settings_mod), Put(self._keys.settings, wanted.to_json())
            if (await self._store.commit(Txn((guard,), (put,)), deadline=deadline)).succeeded:
                return True, wanted
        raise _overtaken()


@contextmanager
def _changes_nothing() -> Iterator[None]:
    """Of a read."""
    try:
        yield
    except StoreError as error:
        raise StoreError(error.kind, str(error), sent=False) from error


def _overtaken() -> RefusedError:
    return RefusedError("conflict", "the cluster changes all the time: ask again")


def _members(entries: Sequence[Entry], prefix: str) -> dict[str, MemberRecord]:
    """What cannot be read is left out: it says nothing that could be relied on."""
    found = {}
    for entry in entries:
        try:
            found[entry.key.removeprefix(prefix)] = MemberRecord.model_validate_json(entry.value)
        except ValidationError:
            continue
    return found
