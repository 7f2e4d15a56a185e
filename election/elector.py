"""Drives the machine with a store, a clock and a host: carries out its actions and tells it what came of them.

One loop. Every call on the store or the host has a deadline, runs in a task of its own and ends in exactly one event,
so giving up never waits for a call to return. There is no free-running keepalive: a loop that does not turn refreshes
nothing (rule 4).
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import structlog

from election import candidate, machine, record
from election import events as e
from election.clock import Clock
from election.holder import resumed
from election.membership import target
from election.memory import Memory
from election.phases import Ending, Holding, Inputs, Left, Phase, StandingBy, State
from election.store import Change, Committed, ErrorClass, LockStore, StoreError, Txn
from election.timing import LIFE, Timing

log = structlog.get_logger()

Work = Callable[[], Coroutine[Any, Any, None]]

BEAT = 0.5
"""Seconds. The loop looks at the clock at least this often: it notices oversleeping, and acts on fitness."""
DISK = 2.0
"""Seconds allowed for one small fsynced write: a dead disk holds nothing up but the claim that depends on it."""


class Host(Protocol):
    """The node, as the election sees it."""

    def fit(self) -> bool:
        """May this node claim (rule 12)?"""
        ...

    def alive(self, now: float) -> bool:
        """Have watchdog and service monitor shown life within `timing.LIFE` (rule 4)?"""
        ...

    async def arm(self, term: e.Term, deadline: float, *, by: float) -> None:
        """The keeper's switch is at `deadline` when it returns. Raises OSError (or a subclass) where it is not."""
        ...

    def take_over(self, term: e.Term, *, resumed: bool) -> None:
        """Begin; ends in `TookOver` or `TakeOverFailed`. `resumed`: adopt what runs (rule 15)."""
        ...

    def end_services(self, action: e.EndServices) -> None:
        """Begin, or hasten; ends in `Gone` for the term."""
        ...

    def changed(self, state: State) -> None:
        """The state is now this. Must return at once."""
        ...

    def alarm(self, kind: str, text: str) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class Identity:
    """What records say of this node."""

    node: str
    url: str
    version: str


class Elector:
    """Campaigns until told to leave. `state` may be read at any time; events come in by `post`."""

    def __init__(
        self,
        identity: Identity,
        keys: record.Keys,
        timing: Timing,
        store: LockStore,
        clock: Clock,
        memory: Memory,
        host: Host,
        *,
        claim_delay: float = 0.0,
        fresh_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self.state = State(StandingBy(), node=identity.node, claim_delay=claim_delay)
        self.timing = timing
        self._identity, self._keys = identity, keys
        self._store, self._clock, self._memory, self._host = store, clock, memory, host
        self._fresh_id = fresh_id
        self._events: asyncio.Queue[e.Event] = asyncio.Queue()
        self._calls: set[asyncio.Task[None]] = set()
        self._read: asyncio.Task[None] | None = None
        self.seen: record.View | None = None
        """What the last answered read showed, and when (boot-time seconds): for display."""
        self.seen_at = 0.0
        self.written: record.LeaderRecord | None = None
        """What our own last refresh wrote: for display."""
        self._offset = clock.wall() - clock.now()
        self._disk_trouble = ""

    # --- for the host

    def post(self, event: e.Event) -> None:
        """Something happened. Never blocks."""
        self._events.put_nowait(event)

    def leads(self) -> bool:
        return machine.leads(self.state, self._clock.now(), self.timing)

    def last_holder(self) -> str | None:
        """Whose term the last read before this one's own showed, for people."""
        return self.seen.term.node if self.seen is not None and self.seen.term is not None else None

    def leader(self) -> str | None:
        """Who holds the lock, as the last answered read showed it."""
        return self.seen.leader.node if self.seen is not None and self.seen.leader is not None else None

    @property
    def settings(self) -> record.SettingsRecord:
        """What operators have asked of the cluster, as the last answered read showed it."""
        return record.SettingsRecord() if self.seen is None else self.seen.settings

    def ready_for(self) -> int:
        """The mod_revision of a request to switch over to this node, to which its member record answers; else 0."""
        asked = None if self.seen is None else self.seen.pending
        if self.seen is None or asked is None or asked.target != self._identity.node:
            return 0
        ready = isinstance(self.state.phase, StandingBy) and not self.state.leaving and self._host.fit()
        return self.seen.switchover_mod if ready and not candidate.barred(self.seen, asked.target) else 0

    def authority_until(self) -> float:
        return machine.authority_until(self.state, self.timing)

    async def run(self) -> None:
        """Until a `StandDown` with `leave` has been carried out, or cancelled. When it begins, nothing may be left of
        an earlier run but the term that `Memory.load` says may be resumed: its processes have ended and its term's
        cgroup is removed."""
        await self._remember()
        watch = asyncio.create_task(self._watch())
        try:
            self._handle(e.Tick())
            while not isinstance(self.state.phase, Left):
                self._handle(await self._next_event())
            await asyncio.wait(self._calls, timeout=self.timing.attempt) if self._calls else None
        finally:
            for task in (watch, *self._calls):
                task.cancel()
            await asyncio.gather(watch, *self._calls, return_exceptions=True)

    async def _remember(self) -> None:
        found = await self._memory.load()
        phase: Phase = StandingBy()
        now = self._clock.now()
        if found.term is not None and found.resumed_from is not None:
            phase = resumed(found.term, found.resumed_from, now)
        elif found.term is not None:
            phase = Ending(found.term, "the supervisor was restarted", until=now + self.timing.ttl)
        self.state = replace(
            self.state, phase=phase, floor=found.floor, gone=found.instances, revision=found.revision, noted_at=now
        )

    # --- the loop

    async def _next_event(self) -> e.Event:
        now = self._clock.now()
        wake = machine.wake_at(self.state, self.timing)
        wake = min(wake, now + BEAT) if wake > now else now + BEAT
        try:
            async with asyncio.timeout(wake - now):
                event = await self._events.get()
        except TimeoutError:
            event = e.Tick()
        self._look_at_clocks(self._clock.now() - wake)
        return event

    def _look_at_clocks(self, late: float) -> None:
        offset = self._clock.wall() - self._clock.now()
        if late > LIFE:
            self.post(e.Suspect(f"the loop was {late:.1f} s late"))
        elif abs(offset - self._offset) > LIFE:
            self.post(e.Suspect(f"the wall clock stepped by {offset - self._offset:+.1f} s"))
        self._offset = offset

    def _handle(self, event: e.Event) -> None:
        """One event, then whatever is due by now."""
        self._step(event)
        if machine.wake_at(self.state, self.timing) <= self._clock.now():
            self._step(e.Tick())

    def _step(self, event: e.Event) -> None:
        now = self._clock.now()
        inputs = Inputs(self._host.fit(), self._host.alive(now), self._fresh_id())
        before = self.state.phase
        self.state, actions = machine.step(self.state, event, now, inputs, self.timing)
        if type(before) is not type(self.state.phase) and self._read is not None:
            self._read.cancel()  # its answer was meant for another phase
        for action in actions:
            self._carry_out(action, now)
        if before is not self.state.phase:
            self._host.changed(self.state)

    def _carry_out(self, action: e.Action, now: float) -> None:
        match action:
            case e.Read():
                self._read = self._call(self._do_read, lambda why: e.ReadFailed(why, now))
            case e.Claim():
                self._call(
                    partial(self._do_claim, action),
                    lambda why: e.ClaimFailed(action.instance, 0, now, "ambiguous", why),
                )
            case e.Refresh():
                self._call(
                    partial(self._do_refresh, action),
                    lambda why: e.RefreshFailed(action.nonce, action.t0, ErrorClass.TRANSIENT, why),
                )
            case e.Arm():
                self._call(partial(self._do_arm, action), lambda why: e.ArmFailed(action.term.token, why))
            case e.End():
                self._call(partial(self._do_end, action), lambda why: e.EndFailed(action.term.token, why))
            case e.Revoke():
                self._call(partial(self._do_revoke, action))
            case e.NoteToken():
                self._call(partial(self._on_disk, partial(self._memory.note_token, action.token)))
            case e.NoteRevision():
                self._call(partial(self._on_disk, partial(self._memory.note_revision, action.revision)))
            case e.RefuseSwitchover():
                self._call(partial(self._do_refuse, action))
            case e.TakeOver():
                self._call(partial(self._on_disk, partial(self._memory.note_term, action.term)))
                self._host.take_over(action.term, resumed=action.resumed)
            case e.EndServices():
                self._host.end_services(action)
            case e.Alarm():
                self._host.alarm(action.kind, action.text)
            case e.Note():
                self._host.note(action.text)

    def _call(self, work: Work, failed: Callable[[str], e.Event] = lambda why: e.Tick()) -> asyncio.Task[None]:
        """`failed` makes the event for a fault of our own in `work`, which must not leave the machine waiting."""

        async def guarded() -> None:
            try:
                await work()
            except Exception as error:
                log.exception("a call of the election broke")
                self.post(failed(f"a fault in the election itself: {error!r}"))

        task = asyncio.create_task(guarded())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    # --- the calls

    async def _do_read(self) -> None:
        sent_at = self._clock.now()
        try:
            snapshot = await self._store.read(self._keys.read, deadline=sent_at + self.timing.attempt)
            view = record.view(snapshot, self._keys)
            target = await self._look_at_target(view, sent_at + self.timing.attempt)
        except StoreError as error:
            self.post(e.ReadFailed(str(error), sent_at))
        else:
            self.seen, self.seen_at = view, self._clock.now()
            self.post(e.Viewed(view, sent_at, target))

    async def _look_at_target(self, view: record.View, deadline: float) -> e.Target | None:
        """As it is now, for a holder that is asked to pass the lock on."""
        asked = view.pending
        if asked is None or not isinstance(self.state.phase, Holding):
            return None
        key = self._keys.member(asked.target)
        found = (await self._store.read([key], deadline=deadline)).get(key)
        return target(found, view.switchover_mod)

    async def _do_claim(self, claim: e.Claim) -> None:
        """Grant, journal, claim. What has not been sent cannot arrive late: only the claim itself can be ambiguous."""
        self._host.note(f"claiming: {claim.why}")
        lease = 0
        try:
            lease = await self._grant()
        except StoreError as error:
            self.post(e.ClaimFailed(claim.instance, lease, 0.0, "not sent", str(error)))
            return
        await self._journal(claim.instance)
        t0 = self._clock.now()
        began = record.timestamp(self._clock.wall())
        try:
            done = await self._store.commit(self._claim_txn(claim, lease, began), deadline=t0 + self.timing.attempt)
        except StoreError as error:
            ambiguous = error.sent and error.kind is not ErrorClass.LOST
            outcome: Literal["not sent", "ambiguous"] = "ambiguous" if ambiguous else "not sent"
            self.post(e.ClaimFailed(claim.instance, lease, t0, outcome, str(error)))
            return
        if done.succeeded:
            self.post(e.Claimed(e.Term(claim.instance, done.revision, lease, began), t0))
        else:
            why = "another node was faster, or a key changed"
            self.post(e.ClaimFailed(claim.instance, lease, t0, "refused", why))

    async def _grant(self) -> int:
        granted = await self._store.grant(self.timing.ttl, deadline=self._clock.now() + self.timing.attempt)
        if granted.ttl == self.timing.ttl:
            return granted.lease
        self._call(partial(self._do_revoke, e.Revoke(granted.lease)))
        raise StoreError(
            ErrorClass.UNSUPPORTED,
            f"asked for a lease of {self.timing.ttl} s, was granted {granted.ttl} s: raise election.ttl to at least "
            "that, or lower etcd's election timeout, which sets the shortest lease",
        )

    async def _journal(self, instance: str) -> None:
        """A claim that is not in the journal only cannot be known as our own by a later supervisor (rule 8c): the
        others wait it out. So a full disk costs a wait, and not the claim."""
        await self._on_disk(partial(self._memory.note_claim, instance))

    def _claim_txn(self, claim: e.Claim, lease: int, began: str) -> Txn:
        leader = self._leader_record(e.Term(claim.instance, 0, lease, began), "taking-over", claim.instance)
        term = record.TermRecord(instance=claim.instance, node=self._identity.node, ttl_s=self.timing.ttl, began=began)
        return record.claim(self._keys, claim.seen, leader, term, lease)

    def _leader_record(self, term: e.Term, stage: record.LeaderState, nonce: str) -> record.LeaderRecord:
        return record.LeaderRecord(
            node=self._identity.node,
            instance=term.instance,
            token=term.token or None,
            state=stage,
            since=term.began,
            renewed_at=record.timestamp(self._clock.wall()),
            nonce=nonce,
            lease_ttl_s=self.timing.ttl,
            url=self._identity.url,
            version=self._identity.version,
        )

    async def _do_refresh(self, refresh: e.Refresh) -> None:
        """One attempt: both calls under one deadline (rule 3)."""
        term, deadline = refresh.term, min(refresh.t0 + self.timing.attempt, self.authority_until())
        leader = self._leader_record(term, refresh.stage, refresh.nonce)
        try:
            await self._store.keepalive(term.lease, deadline=deadline)
            done = await self._store.commit(record.refresh(self._keys, leader, term.lease), deadline=deadline)
        except StoreError as error:
            self.post(e.RefreshFailed(refresh.nonce, refresh.t0, error.kind, str(error)))
        else:
            self.written = leader if done.succeeded else self.written
            self.post(self._refreshed(refresh, done))

    def _refreshed(self, refresh: e.Refresh, done: Committed) -> e.Event:
        if done.succeeded:
            return e.Refreshed(refresh.nonce, refresh.t0)
        why = "the leader key is no longer attached to our lease"
        return e.RefreshFailed(refresh.nonce, refresh.t0, ErrorClass.LOST, why)

    async def _do_refuse(self, refuse: e.RefuseSwitchover) -> None:
        """Best effort: it is looked at again with the next read."""
        self._host.note(f"not switching over: {refuse.why}")
        txn = record.refuse(self._keys, refuse.switchover_mod, refuse.asked, refuse.why)
        try:
            await self._store.commit(txn, deadline=self._clock.now() + self.timing.attempt)
        except StoreError as error:
            self._host.note(f"the request to switch over was not answered: {error}")

    async def _do_arm(self, arm: e.Arm) -> None:
        now = self._clock.now()
        try:
            await self._host.arm(arm.term, arm.deadline, by=min(now + LIFE, arm.deadline))
        except (OSError, TimeoutError) as error:
            self.post(e.ArmFailed(arm.term.token, str(error)))
        else:
            self.post(e.Armed(arm.term.token, arm.deadline))

    async def _do_end(self, end: e.End) -> None:
        await self._on_disk(partial(self._memory.note_end_begun, end.term))
        now = record.timestamp(self._clock.wall())
        ended = record.TermRecord(
            instance=end.term.instance,
            node=self._identity.node,
            ttl_s=self.timing.ttl,
            began=end.term.began or now,
            ended=now,
            because=end.because,
        )
        try:
            done = await self._store.commit(
                record.end(self._keys, end.term.token, ended), deadline=self._clock.now() + self.timing.attempt
            )
        except StoreError as error:
            self.post(e.EndFailed(end.term.token, str(error)))
        else:
            await self._on_disk(self._memory.forget_term)
            self.post(e.Ended(end.term.token, overtaken=not done.succeeded))

    async def _do_revoke(self, revoke: e.Revoke) -> None:
        """Best effort: a lease that is left behind expires by itself."""
        try:
            await self._store.revoke(revoke.lease, deadline=self._clock.now() + self.timing.attempt)
        except StoreError as error:
            self._host.note(f"lease {revoke.lease:x} not revoked, it will expire: {error}")

    async def _on_disk(self, write: Work) -> None:
        """A write that helps but on which nothing hangs: on a full or dead disk the node runs on in memory."""
        trouble = ""
        try:
            async with asyncio.timeout(DISK):
                await write()
        except (OSError, TimeoutError) as error:
            trouble = f"the memory of terms cannot be written: {error!r}"
        if trouble and trouble != self._disk_trouble:
            self._host.alarm("disk", trouble)
        self._disk_trouble = trouble

    # --- the watch

    async def _watch(self) -> None:
        """Watches are hints; one that breaks is opened again."""
        while True:
            try:
                async for change in self._store.watch(self._keys.prefix):
                    self._hear(change)
            except Exception:
                log.exception("the watch broke")
            await self._clock.sleep_until(self._clock.now() + self.timing.retry)

    def _others(self) -> tuple[str, ...]:
        """Keys beside leader and term whose changes matter now."""
        asked = None if self.seen is None else self.seen.pending
        words = (self._keys.settings, self._keys.switchover)
        return words if asked is None else (*words, self._keys.member(asked.target))

    def _hear(self, change: Change | None) -> None:
        if change is None:
            self.post(e.Gap())
        elif change.key in self._others():
            self.post(e.Changed())
        elif change.key in (self._keys.leader, self._keys.term):
            self.post(
                e.Heard(
                    is_leader=change.key == self._keys.leader,
                    mod_revision=change.mod_revision,
                    deleted=change.value is None,
                    lease=change.lease,
                    previous_mod_revision=change.previous_mod_revision,
                )
            )
