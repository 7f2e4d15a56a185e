"""The member record: one supervisor per node name, and what it says of itself (rule 17).

Registering is a create guarded by absence, under a lease of its own. A record that stands already is ours if boot id
and run id are the same (the run id lies in the run folder, whose flock this process holds: it is a restart); else it
must stay unrefreshed for a full TTL before it is replaced. One that is refreshed meanwhile belongs to a living
supervisor.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from election.clock import Clock
from election.events import Target
from election.record import LONGEST_TTL, Keys
from election.store import Entry, ErrorClass, LeaseIs, LockStore, ModIs, Put, StoreError, Txn
from election.timing import Timing

Role = Literal["leader", "standby", "unfit", "excluded"]


class MemberRecord(BaseModel):
    """Under the member's own lease."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Role
    boot_id: str
    run_id: str
    ttl_s: Annotated[int, Field(ge=1, le=LONGEST_TTL)]
    unfit_because: tuple[str, ...]
    gpus: tuple[dict[str, Any], ...]
    services: dict[str, str]
    url: str
    version: str
    renewed_at: str
    ready_for: int = 0
    """mod_revision of a request to switch over to this node, which it has seen and could follow."""


def target(entry: Entry | None, switchover_mod: int) -> Target:
    """What a member record says of a request to switch over to it."""
    if entry is None:
        return Target(False, "it has no member record: its supervisor does not run, or cannot reach the store")
    try:
        member = MemberRecord.model_validate_json(entry.value)
    except ValidationError:
        return Target(False, "its member record cannot be read")
    return Target(member.ready_for == switchover_mod, unfit(member))


def unfit(member: MemberRecord) -> str:
    """Why the member could not lead, for people; empty: it could."""
    return "; ".join(member.unfit_because) or ("" if member.role in ("standby", "leader") else f"it is {member.role}")


class NameTakenError(Exception):
    """Another living supervisor has this node name."""


class Membership:
    """Keeps the record of one node. `describe` is called for each write and must not block."""

    def __init__(
        self,
        node: str,
        keys: Keys,
        timing: Timing,
        store: LockStore,
        clock: Clock,
        describe: Callable[[], MemberRecord],
        report: Callable[[str], None],
    ) -> None:
        self._node, self._key, self._timing = node, keys.member(node), timing
        self._store, self._clock, self._describe, self._report = store, clock, describe, report
        self._lease = 0
        self._written: MemberRecord | None = None
        self._poke = asyncio.Event()

    def poke(self) -> None:
        """The record may have changed: write it soon."""
        self._poke.set()

    async def register(self) -> None:
        """Until the record stands. An unreachable store is reported and tried again for ever; a living supervisor of
        the same name raises `NameTakenError`."""
        said = ""
        while True:
            try:
                if await self._register_once():
                    return
            except StoreError as error:
                if str(error) != said:
                    said = str(error)
                    self._report(f"the store cannot be reached, trying again: {error}")
            await self._pause(self._timing.retry)

    async def run(self) -> None:
        """Refresh, and write changes, until cancelled. Raises `NameTakenError` if another supervisor took the name
        while our record was gone."""
        while True:
            try:
                await self._write_or_register()
                await self._wait_for_change()
            except StoreError as error:
                self._report(f"the member record was not written: {error}")
                await self._pause(self._timing.retry)

    async def leave(self) -> None:
        """Take the record away. Best effort."""
        if self._lease:
            try:
                await self._store.revoke(self._lease, deadline=self._by())
            except StoreError as error:
                self._report(f"the member record stays until it expires: {error}")

    # --- the parts

    async def _register_once(self) -> bool:
        stands = await self._look()
        if stands is not None and not self._ours(stands):
            stands = await self._wait_out(stands)
        granted = await self._store.grant(self._timing.ttl, deadline=self._by())
        record = self._describe()
        guard = ModIs(self._key, stands.mod_revision if stands else 0)
        txn = Txn((guard,), (Put(self._key, record.model_dump_json().encode(), granted.lease),))
        done = await self._store.commit(txn, deadline=self._by())
        if not done.succeeded:
            await self._store.revoke(granted.lease, deadline=self._by())
            return False
        self._lease, self._written = granted.lease, record
        return True

    async def _wait_out(self, stands: Entry) -> Entry | None:
        """Rule 17: one TTL without a refresh, by our own clock, from the reply that showed the record."""
        ttl = max(self._timing.ttl, _ttl(stands.value))
        self._report(f"a member record of node {self._node!r} stands already; waiting up to {ttl} s for it to go")
        until = self._clock.now() + ttl
        while self._clock.now() < until:
            await self._pause(min(self._timing.verify, until - self._clock.now()))
            now = await self._look()
            if now is None:
                return None
            if now.mod_revision != stands.mod_revision:
                raise NameTakenError(
                    f"another supervisor named {self._node!r} is alive: its member record {self._key} was refreshed "
                    "while this one waited. Give one of the two another `node` name"
                )
        return stands

    async def _write_or_register(self) -> None:
        self._poke.clear()
        try:
            await self._store.keepalive(self._lease, deadline=self._by())
            record = self._describe()
            put = Put(self._key, record.model_dump_json().encode(), self._lease)
            done = await self._store.commit(Txn((LeaseIs(self._key, self._lease),), (put,)), deadline=self._by())
            if done.succeeded:
                self._written = record
                return
        except StoreError as error:
            if error.kind is not ErrorClass.LOST:
                raise
        await self.register()

    async def _wait_for_change(self) -> None:
        until = self._clock.now() + self._timing.refresh
        while (now := self._clock.now()) < until:
            try:
                async with asyncio.timeout(until - now):
                    await self._poke.wait()
            except TimeoutError:
                return
            self._poke.clear()
            if not self._same(self._describe()):
                return
            await self._pause(min(0.05, max(0.0, until - now)))

    def _same(self, record: MemberRecord) -> bool:
        return self._written is not None and record == self._written.model_copy(
            update={"renewed_at": record.renewed_at}
        )

    async def _look(self) -> Entry | None:
        return (await self._store.read([self._key], deadline=self._by())).get(self._key)

    def _ours(self, stands: Entry) -> bool:
        try:
            record = MemberRecord.model_validate_json(stands.value)
        except ValidationError:
            return False
        mine = self._describe()
        return record.boot_id == mine.boot_id and record.run_id == mine.run_id

    def _by(self) -> float:
        return self._clock.now() + self._timing.attempt

    async def _pause(self, seconds: float) -> None:
        await self._clock.sleep_until(self._clock.now() + seconds)


def _ttl(value: bytes) -> int:
    try:
        return MemberRecord.model_validate_json(value).ttl_s
    except ValidationError:
        return 0
