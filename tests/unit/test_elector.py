"""The elector's own part: deadlines, faults of store, disk and clock, and that no fault leaves the machine waiting."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from election import events as e
from election.clock import VirtualClock, VirtualLoop
from election.elector import BEAT, Elector, Identity
from election.phases import Fencing, Holding, Left, State
from election.record import Keys, TermRecord
from election.store import Change, Committed, Granted, Put, Snapshot, Txn
from election.stores.memory import MemoryStore
from election.timing import Timing
from tests.simulation.world import Disk

pytestmark = pytest.mark.virtual_time

KEYS = Keys("unit")
TIMING = Timing(9)


class Store(MemoryStore):
    """Notes its calls, and breaks in ways that a store never should."""

    def _start(self) -> None:
        super()._start()
        self.calls: list[tuple[str, float]] = []
        """(name, deadline)"""
        self.raises: dict[str, int] = {}
        """How many calls of that name raise something that is no StoreError."""
        self.extra_ttl = 0
        self.watches = 0

    def _note(self, name: str, deadline: float) -> None:
        self.calls.append((name, deadline))
        if self.raises.get(name, 0) > 0:
            self.raises[name] -= 1
            raise RuntimeError(f"{name} is broken")

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)

    async def read(self, keys: Sequence[str], *, prefix: bool = False, deadline: float) -> Snapshot:
        self._note("read", deadline)
        return await super().read(keys, prefix=prefix, deadline=deadline)

    async def commit(self, txn: Txn, *, deadline: float) -> Committed:
        self._note("commit", deadline)
        return await super().commit(txn, deadline=deadline)

    async def grant(self, ttl: int, *, deadline: float) -> Granted:
        self._note("grant", deadline)
        return await super().grant(ttl + self.extra_ttl, deadline=deadline)

    async def keepalive(self, lease: int, *, deadline: float) -> int:
        self._note("keepalive", deadline)
        return await super().keepalive(lease, deadline=deadline)

    async def revoke(self, lease: int, *, deadline: float) -> None:
        self._note("revoke", deadline)
        await super().revoke(lease, deadline=deadline)

    async def watch(self, prefix: str) -> AsyncGenerator[Change | None, None]:
        self.watches += 1
        if self.raises.get("watch", 0) > 0:
            self.raises["watch"] -= 1
            raise RuntimeError("the watch is broken")
        if self.raises.get("watch-ends", 0) > 0:
            self.raises["watch-ends"] -= 1
            yield None
            return
        async for change in super().watch(prefix):
            yield change


class TroubledDisk(Disk):
    error: Exception | None = None
    takes = 0.0

    async def note_claim(self, instance: str) -> None:
        await asyncio.sleep(self.takes)
        if self.error is not None:
            raise self.error
        await super().note_claim(instance)


@dataclass
class Bed:
    """One node around an elector. Implements `Host`: take-over and end succeed at once."""

    clock: VirtualClock
    store: Store
    disk: TroubledDisk = field(default_factory=TroubledDisk)
    is_fit: bool = True
    is_alive: bool = True
    arm_fails: bool = False
    ends: list[e.EndServices] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)
    alarms: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    elector: Elector = field(init=False)

    def fit(self) -> bool:
        return self.is_fit

    def alive(self, now: float) -> bool:
        return self.is_alive

    async def arm(self, term: e.Term, deadline: float, *, by: float) -> None:
        assert by <= deadline
        if self.arm_fails:
            raise ConnectionError("the keeper is gone")

    def take_over(self, term: e.Term, *, resumed: bool) -> None:
        self.elector.post(e.TookOver(term.token))

    def end_services(self, action: e.EndServices) -> None:
        self.ends.append(action)
        self.ended_at.append(self.clock.now())

    def changed(self, state: State) -> None:
        pass

    def alarm(self, kind: str, text: str) -> None:
        self.alarms.append((kind, text))

    def note(self, text: str) -> None:
        self.notes.append(text)

    async def pass_time(self, seconds: float) -> None:
        await self.clock.sleep_until(self.clock.now() + seconds)

    async def until_leading(self, within: float = 12.0) -> Holding:
        until = self.clock.now() + within
        while not self.elector.leads():
            assert self.clock.now() < until, self.notes
            await self.pass_time(0.01)
        assert isinstance(self.elector.state.phase, Holding)
        return self.elector.state.phase

    def value(self, key: str) -> Any:
        entry = self.store._data.entries.get(key)
        return None if entry is None else json.loads(entry.value)


@asynccontextmanager
async def bed(**changes: object) -> AsyncIterator[Bed]:
    clock = VirtualClock(asyncio.get_running_loop())
    made = Bed(clock, Store(clock))
    for name, value in changes.items():
        setattr(made, name, value)
    identity = Identity("a", "http://a", "1")
    made.elector = Elector(identity, KEYS, TIMING, made.store, clock, made.disk, made)
    task = asyncio.create_task(made.elector.run())
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.store.close()


def oversleep(seconds: float) -> None:
    """The whole process stands still."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop._jumping.now += seconds


# --- claiming


async def test_a_lease_granted_for_another_time_is_given_back_and_the_reader_told_what_to_do() -> None:
    """The section on timing: etcd silently raises small TTLs."""
    async with bed() as b:
        b.store.extra_ttl = 3
        await b.pass_time(12.0)
        assert b.store.count("grant") > 0
        assert b.store.count("commit") == 0, "no claim"
        b.is_fit = False
        await b.pass_time(1.0)
        assert b.store._data.leases == {}
        told = next(note for note in b.notes if "asked for a lease of 9 s, was granted 12 s" in note)
        assert "raise election.ttl" in told


@pytest.mark.parametrize("trouble", ["full", "dead"])
async def test_without_the_journal_a_claim_is_sent_all_the_same_and_the_trouble_told_once(trouble: str) -> None:
    """mikopbx 1051: a full disk does not keep a cluster down. What is not on disk only is no known end later (8c)."""
    async with bed() as b:
        b.disk.error = OSError(28, "No space left on device") if trouble == "full" else None
        b.disk.takes = 1e6 if trouble == "dead" else 0.0
        await b.until_leading(within=14.0)
        await b.pass_time(30.0)
        assert [kind for kind, _ in b.alarms] == ["disk"]


async def test_the_journal_is_written_before_the_claim_is_sent() -> None:
    """Rule 8c."""
    async with bed() as b:
        b.disk.takes = 1.0
        await b.pass_time(9.5)
        assert b.store.count("grant") == 1
        assert (b.store.count("commit"), b.disk.instances) == (0, ())
        phase = await b.until_leading()
        assert b.disk.instances == (phase.term.instance,)


async def test_the_token_is_the_revision_of_the_term_key_and_stands_in_the_record() -> None:
    """Rule 6."""
    async with bed() as b:
        phase = await b.until_leading()
        assert phase.term.token == b.store._data.entries[KEYS.term].mod_revision
        assert b.value(KEYS.leader)["token"] == phase.term.token
        assert b.disk.floor == phase.term.token
        await b.pass_time(30.0)
        assert phase.term.token == b.store._data.entries[KEYS.term].mod_revision, "no refresh touches it"


async def test_an_unfit_node_sends_no_claim() -> None:
    """Rule 12."""
    async with bed(is_fit=False) as b:
        await b.pass_time(40.0)
        assert b.store.count("grant") + b.store.count("commit") == 0


# --- faults of our own


@pytest.mark.parametrize("call", ["read", "grant", "commit", "keepalive", "revoke"])
async def test_a_call_that_breaks_in_an_unforeseen_way_never_leaves_the_machine_waiting(call: str) -> None:
    """Every action that names a call is answered by exactly one event."""
    async with bed() as b:
        b.store.raises[call] = 2
        await b.pass_time(1.0)
        reads = b.store.count("read")
        await b.pass_time(2.0)
        assert b.store.count("read") > reads
        await b.until_leading(within=25.0)


async def test_an_orderly_end_that_breaks_in_an_unforeseen_way_is_tried_again() -> None:
    async with bed() as b:
        phase = await b.until_leading()
        b.elector.post(e.StandDown("as told"))
        await b.pass_time(0.1)
        b.is_fit = False
        b.store.raises["commit"] = 2
        b.elector.post(e.Gone(phase.term.token))
        await b.pass_time(3.0)
        assert b.value(KEYS.term)["ended"] is not None
        assert b.value(KEYS.leader) is None


async def test_a_journal_that_breaks_in_an_unforeseen_way_sends_no_claim_and_is_tried_again() -> None:
    async with bed() as b:
        b.disk.error = RuntimeError("a bug")
        await b.pass_time(12.0)
        assert b.store.count("commit") == 0
        b.disk.error = None
        await b.until_leading(within=12.0)


@pytest.mark.parametrize("how", ["watch", "watch-ends"])
async def test_a_watch_that_breaks_or_ends_is_opened_again(how: str) -> None:
    async with bed() as b:
        b.store.raises[how] = 2
        await b.pass_time(3 * TIMING.retry)
        assert b.store.watches == 3


# --- holding


async def test_a_refresh_makes_both_calls_under_one_deadline() -> None:
    """Rule 3."""
    async with bed() as b:
        await b.until_leading()
        await b.pass_time(0.1)
        b.store.calls.clear()
        await b.pass_time(5.0)
        calls = [call for call in b.store.calls if call[0] in ("keepalive", "commit")]
        assert [name for name, _ in calls] == ["keepalive", "commit"]
        assert calls[0][1] == calls[1][1]
        assert isinstance(b.elector.state.phase, Holding)
        assert calls[0][1] == pytest.approx(b.elector.state.phase.t0 + TIMING.attempt)


async def test_a_holder_that_is_cut_off_gives_up_on_time_whatever_its_calls_do() -> None:
    """Rules 3 and 14."""
    async with bed() as b:
        phase = await b.until_leading()
        b.store.cut_off()
        await b.pass_time(TIMING.ttl)
        assert isinstance(b.elector.state.phase, Fencing)
        (end,) = b.ends
        assert end.kill_at == pytest.approx(phase.t0 + TIMING.kill, abs=0.2)
        assert end.kill_at is not None
        assert b.ended_at[0] - (end.kill_at - TIMING.kill) == pytest.approx(TIMING.give_up, abs=BEAT)


async def test_a_hung_node_refreshes_nothing_and_loses_the_lock() -> None:
    """Rule 4; swarmkit 1658."""
    async with bed() as b:
        await b.until_leading()
        await b.pass_time(0.1)
        b.is_alive = False
        kept = b.store.count("keepalive")
        await b.pass_time(TIMING.ttl)
        assert b.store.count("keepalive") == kept
        assert isinstance(b.elector.state.phase, Fencing)
        assert [kind for kind, _ in b.alarms] == ["fenced"]


async def test_a_switch_that_cannot_be_set_starts_nothing() -> None:
    """Rule 16."""
    async with bed(arm_fails=True) as b:
        await b.pass_time(9.5)
        assert isinstance(b.elector.state.phase, Fencing)
        assert "the keeper is gone" in b.elector.state.phase.why
        assert b.disk.term is None, "no take-over was begun"


async def test_the_lease_revoked_by_hand_fences_at_once() -> None:
    """Rule 5."""
    async with bed() as b:
        phase = await b.until_leading()
        b.store.kill_lease(phase.term.lease)
        await b.pass_time(0.01)
        (end,) = b.ends
        assert end.kill_at == pytest.approx(b.clock.now(), abs=0.02)


# --- rule 18


async def test_a_loop_that_was_late_verifies_at_once() -> None:
    """Rule 18; Patroni PR 2969."""
    async with bed() as b:
        await b.until_leading()
        await b.pass_time(0.1)
        oversleep(2.5)
        await b.pass_time(0.01)
        assert any("verifying at once: the loop was" in note for note in b.notes)
        assert isinstance(b.elector.state.phase, Holding)
        assert b.elector.state.phase.suspect_until == float("inf"), "verified"


async def test_a_loop_that_was_a_little_late_is_no_cause_for_suspicion() -> None:
    """Rule 18."""
    async with bed() as b:
        await b.until_leading()
        oversleep(1.5)
        await b.pass_time(0.5)
        assert not any("verifying" in note for note in b.notes)


@pytest.mark.parametrize("step", [-3600.0, 2.5])
async def test_a_wall_clock_that_is_set_is_verified_once(step: float) -> None:
    """Rule 18: after a suspend the offset between the clocks differs, too."""
    async with bed() as b:
        await b.until_leading()
        b.clock.wall_offset += step
        await b.pass_time(1.0)
        assert sum("the wall clock stepped" in note for note in b.notes) == 1
        assert isinstance(b.elector.state.phase, Holding)


async def test_a_wall_clock_that_is_set_while_the_store_is_away_fences_in_a_ninth_of_the_ttl() -> None:
    """Rule 18."""
    async with bed() as b:
        await b.until_leading()
        b.store.cut_off()
        b.clock.wall_offset += 60.0
        await b.pass_time(BEAT + TIMING.verify_limit + BEAT)
        assert isinstance(b.elector.state.phase, Fencing)


async def test_a_holder_that_slept_beyond_its_deadline_gives_up_first_of_all() -> None:
    """Rule 3."""
    async with bed() as b:
        await b.until_leading()
        oversleep(TIMING.ttl)
        await b.pass_time(0.01)
        assert isinstance(b.elector.state.phase, Fencing)


# --- beginning and leaving


async def test_a_term_found_at_the_start_is_ended_on_record_before_anything_else() -> None:
    """Rules 11 and 15."""
    clock = VirtualClock(asyncio.get_running_loop())
    store = Store(clock)
    old = TermRecord(instance="old", node="a", ttl_s=9, began="then")
    done = await store.commit(Txn((), (Put(KEYS.term, old.to_json()),)), deadline=clock.now() + 1)
    store.calls.clear()
    disk = TroubledDisk(instances=("old",), floor=done.revision, term=e.Term("old", done.revision, 7, "then"))
    async with bed(store=store, disk=disk) as b:
        b.is_fit = False
        await b.pass_time(0.1)
        assert b.store.calls[0][0] == "commit"
        assert b.value(KEYS.term)["ended"] is not None
        assert b.value(KEYS.term)["because"] == "the supervisor was restarted"
        assert disk.term is None


async def test_leaving_ends_the_term_and_then_the_run() -> None:
    async with bed() as b:
        phase = await b.until_leading()
        b.elector.post(e.StandDown("stopped", leave=True))
        await b.pass_time(1.0)
        assert b.value(KEYS.term)["ended"] is None, "services may still run"
        b.elector.post(e.Gone(phase.term.token))
        await b.pass_time(0.1)
        assert isinstance(b.elector.state.phase, Left)
        assert b.value(KEYS.term)["ended"] is not None
        assert b.store._data.leases == {}
