"""Three nodes in virtual time: the real elector, machine and keeper decisions; around them a world that breaks.

What is simulated is what surrounds them: the store's network, processes that are killed and stopped, services (an
interval each), and the keeper's timer. The oracle looks at the intervals, at the term key and at the keeper's
deadlines, never at what a node believes. Every node's clock has an offset of its own; the oracle's is the loop's.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from election import events as e
from election.clock import VirtualClock
from election.elector import Elector, Identity
from election.membership import MemberRecord
from election.memory import Remembered
from election.phases import Claiming, Phase, State
from election.record import Keys, Mark, SettingsRecord, SwitchoverRecord
from election.store import Change, Committed, Entry, ErrorClass, Put, Snapshot, StoreError, Txn
from election.stores.memory import ApplyLate, Fail, LoseReply, MemoryStore
from election.stores.transaction import Effect
from election.timing import Timing
from supervisor.keeper import term as keeper_term
from supervisor.resume import resume_from

KEYS = Keys("sim")
MARK = Mark(since="now", on="n0")


@dataclass
class Interval:
    """A time, on the loop's clock, in which services of a node existed."""

    node: str
    token: int
    began: float
    ended: float | None = None


@dataclass
class Disk:
    """What survives the supervisor. Implements `election.memory.Memory`."""

    instances: tuple[str, ...] = ()
    floor: int = 0
    revision: int = 0
    term: e.Term | None = None
    end_begun: bool = False
    resumed_from: float | None = None

    async def load(self) -> Remembered:
        resumed = self.resumed_from is not None and self.term is not None
        gone = tuple(i for i in self.instances if not resumed or self.term is None or i != self.term.instance)
        return Remembered(gone, self.floor, self.term, self.resumed_from, self.revision)

    async def note_claim(self, instance: str) -> None:
        self.instances = (*self.instances, instance)

    async def note_token(self, token: int) -> None:
        self.floor = max(self.floor, token)

    async def note_revision(self, revision: int) -> None:
        self.revision = revision

    async def note_term(self, term: e.Term) -> None:
        self.term, self.end_begun = term, False

    async def note_end_begun(self, term: e.Term) -> None:
        self.term, self.end_begun = term, True

    async def forget_term(self) -> None:
        self.term = None


class Network(MemoryStore):
    """A node's way to the store: with answers that come slowly, or lie in the socket while the process is stopped."""

    def _start(self) -> None:
        super()._start()
        self.slow = 0.0
        """Seconds that each answer takes, within its deadline."""
        self.held = 0.0
        """Seconds for which the next commit's answer lies unread, its deadline or not."""
        self.last_commit_sent = -float("inf")

    async def commit(self, txn: Txn, *, deadline: float) -> Committed:
        self.last_commit_sent = self._clock.now()
        done = await super().commit(txn, deadline=deadline)
        held, self.held = self.held, 0.0
        await self._travel(deadline)
        await asyncio.sleep(held)
        return done

    async def read(self, keys: Sequence[str], *, prefix: bool = False, deadline: float) -> Snapshot:
        found = await super().read(keys, prefix=prefix, deadline=deadline)
        await self._travel(deadline)
        return found

    async def _travel(self, deadline: float) -> None:
        if self.slow:
            await asyncio.sleep(self.slow)
            if self._clock.now() >= deadline:
                raise StoreError(ErrorClass.TRANSIENT, "no answer by the deadline")


class Elections(Elector):
    """The elector, which can be stopped like a process: nothing is handled until it continues."""

    def __init__(self, *args: object, **fields: object) -> None:
        super().__init__(*args, **fields)  # type: ignore[arg-type]
        self.gate = asyncio.Event()
        self.gate.set()

    async def _next_event(self) -> e.Event:
        event = await super()._next_event()
        if not self.gate.is_set():
            began = self._clock.now()
            await self.gate.wait()
            if self._clock.now() - began > 2.0:
                self.post(e.Suspect("was stopped"))
        return event


def member(ready_for: int) -> MemberRecord:
    fields: dict[str, Any] = {"boot_id": "b", "run_id": "r", "ttl_s": 9, "gpus": (), "services": {}, "url": ""}
    return MemberRecord(role="standby", unfit_because=(), version="1", renewed_at="", ready_for=ready_for, **fields)


@dataclass
class Node:
    """A node: keeper, services and disk outlive its supervisor. Implements `election.elector.Host`."""

    name: str
    world: "World"
    clock: VirtualClock
    store: Network
    disk: Disk = field(default_factory=Disk)
    ledger: keeper_term.Ledger = field(default_factory=keeper_term.Ledger)
    running: Interval | None = None
    elector: Elections | None = None
    task: "asyncio.Task[None] | None" = None
    work: "asyncio.Task[None] | None" = None
    told: int = 0
    """What its member record says of a request to switch over."""
    telling: "asyncio.Task[None] | None" = None
    alarms: list[str] = field(default_factory=list)
    fails_take_over: bool = False
    take_over_takes: float = 0.5
    """Seconds, at most."""

    @property
    def phase(self) -> Phase | None:
        return self.elector.state.phase if self.elector is not None else None

    # --- the keeper

    def _now_ns(self) -> int:
        return int(self.clock.now() * 1e9)

    def keeper_arm(self, token: int, deadline: float) -> None:
        got = keeper_term.arm(self.ledger, token, int(deadline * 1e9), self._now_ns())
        if isinstance(got, keeper_term.Refusal):
            raise ConnectionError(got.message)
        self.ledger = got
        delay = deadline - self.clock.now()
        asyncio.get_running_loop().call_later(delay, self.keeper_switch)

    def keeper_switch(self) -> None:
        held = self.ledger.term
        if held is not None and held.deadline_ns <= self._now_ns() + 1000:
            self.keeper_end(held.token)
            if self.elector is not None:
                self.elector.post(e.FenceNow("the switch fired"))

    def keeper_end(self, token: int) -> None:
        self.ledger = keeper_term.Ledger(over=max(self.ledger.over, token))
        if self.running is not None:
            self.running.ended = self.world.now()
            self.running = None

    def keeper_start(self, token: int) -> bool:
        if keeper_term.admit(self.ledger, token, self._now_ns()) is not None:
            return False
        self.running = Interval(self.name, token, self.world.now())
        self.world.intervals.append(self.running)
        self.world.check()  # nothing but a start can break what it checks
        return True

    # --- the supervisor

    def start(self) -> None:
        """A (re)started supervisor resumes its term (rule 15), or ends everything first."""
        if not self._resumes() and self.ledger.term is not None:
            self.keeper_end(self.ledger.term.token)
        self.elector = Elections(
            Identity(self.name, f"http://{self.name}", "1"),
            KEYS,
            self.world.timing,
            self.store,
            self.clock,
            self.disk,
            self,
            fresh_id=self.world.fresh_id,
        )
        self.task = asyncio.create_task(self.elector.run())
        self.told = 0
        self.world.write(KEYS.member(self.name), member(0))

    def _resumes(self) -> bool:
        """The decision of `supervisor.resume`, with the parts of this world."""
        self.disk.resumed_from = None
        armed, term = self.ledger.term, self.disk.term
        if armed is not None and term is not None and not self.disk.end_begun:
            t0 = resume_from(term, self.disk.floor, armed, self.clock.now(), self.world.timing)
            self.disk.resumed_from = t0
        return self.disk.resumed_from is not None

    async def kill(self) -> None:
        """SIGKILL of the supervisor."""
        for task in (self.task, self.work):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self.elector = self.task = self.work = None

    # --- Host

    def fit(self) -> bool:
        return True

    def alive(self, now: float) -> bool:
        return True

    async def arm(self, term: e.Term, deadline: float, *, by: float) -> None:
        self.world.check_deadline(self, deadline)
        await asyncio.sleep(self.world.random.random() * 0.01)
        self.keeper_arm(term.token, deadline)

    def take_over(self, term: e.Term, *, resumed: bool) -> None:
        self._do(self._take_over(term, resumed))

    def end_services(self, action: e.EndServices) -> None:
        self._do(self._end(action))

    def changed(self, state: State) -> None:
        """Its member record answers to a request to switch over."""
        ready_for = self.elector.ready_for() if self.elector is not None else 0
        if ready_for != self.told:
            self.told = ready_for
            self.telling = asyncio.create_task(self._tell(ready_for))

    async def _tell(self, ready_for: int) -> None:
        put = Put(KEYS.member(self.name), member(ready_for).model_dump_json().encode())
        with contextlib.suppress(StoreError):
            await self.store.commit(Txn((), (put,)), deadline=self.clock.now() + self.world.timing.attempt)

    def alarm(self, kind: str, text: str) -> None:
        self.alarms.append(f"{kind}: {text}")

    def note(self, text: str) -> None:
        self.world.trace.append(f"{self.clock.now():9.3f} {self.name} {text}")

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        if self.work is not None:
            self.work.cancel()
        self.work = asyncio.create_task(work)

    async def _take_over(self, term: e.Term, resumed: bool) -> None:
        await asyncio.sleep(self.world.random.random() * self.take_over_takes)
        assert self.elector is not None
        await self.elector.gate.wait()
        if resumed and self.running is not None:  # its services are adopted
            self.elector.post(e.TookOver(term.token))
        elif self.fails_take_over or not self.keeper_start(term.token):
            self.elector.post(e.TakeOverFailed(term.token, "could not start"))
        else:
            self.elector.post(e.TookOver(term.token))

    async def _end(self, action: e.EndServices) -> None:
        assert self.elector is not None
        grace = 2.0 if action.kill_at is None else max(0.0, action.kill_at - self.clock.now())
        await asyncio.sleep(self.world.random.random() * grace)
        await self.elector.gate.wait()
        self.keeper_end(action.term.token)
        self.elector.post(e.Gone(action.term.token))


class World:
    """The nodes, the store, and the oracle."""

    def __init__(self, seed: int, ttl: int = 9, nodes: int = 3) -> None:
        self.random = random.Random(seed)
        self.timing = Timing(ttl)
        self.intervals: list[Interval] = []
        self.trace: list[str] = []
        self.violations: list[str] = []
        self._ids = 0
        loop = asyncio.get_running_loop()
        self.now = loop.time
        clocks = [VirtualClock(loop, offset=self.random.uniform(0, 1e5)) for _ in range(nodes)]
        self.admin = Network(VirtualClock(loop))
        self.stores = [self.admin.handle(clock) for clock in clocks]
        self.nodes = [Node(f"n{i}", self, clocks[i], self.stores[i]) for i in range(nodes)]
        self.admin._data.listeners.append(self.check_change)

    def fresh_id(self) -> str:
        self._ids += 1
        return f"id{self._ids}"

    def start(self) -> None:
        for node in self.nodes:
            node.start()

    async def stop(self) -> None:
        for node in self.nodes:
            await node.kill()
            await node.store.close()
        await self.admin.close()

    # --- the oracle

    def check(self) -> None:
        """No two nodes run services at one instant; tokens rise."""
        running = [node.running for node in self.nodes if node.running is not None]
        if len(running) > 1:
            self.violations.append(f"never two: {running}")
        tokens = [interval.token for interval in self.intervals]
        if tokens != sorted(set(tokens)):
            self.violations.append(f"tokens must rise: {tokens}")

    def check_change(self, change: Change) -> None:
        """While the term key says "ended", which lets anybody in at once, nobody runs (rule 11)."""
        if change.key == KEYS.term and change.value is not None and json.loads(change.value)["ended"] is not None:
            running = [node.running for node in self.nodes if node.running is not None]
            if running:
                self.violations.append(f"on record as ended, yet there is {running}")

    def check_deadline(self, node: Node, deadline: float) -> None:
        """The keeper's deadline counts from before the send of something that was sent (rule 2)."""
        late = deadline - (node.store.last_commit_sent + self.timing.switch)
        if late > 1e-6:
            self.violations.append(f"{node.name}: a deadline {late:.3f} s later than its last request allows")

    def leader(self) -> Node | None:
        return next((node for node in self.nodes if node.running is not None), None)

    async def watch_for(self, seconds: float) -> None:
        """Let time pass. A violation is kept, since it comes up in a task of some node."""
        await asyncio.sleep(seconds)
        assert not self.violations, "\n".join([*self.violations, *self.trace[-60:]])

    async def until(self, true: Callable[[], bool], within: float, what: str, step: float = 0.001) -> None:
        """Let time pass until it is; `within` seconds, looking every `step`."""
        for _ in range(int(within / step)):
            if true():
                return
            await self.watch_for(step)
        raise AssertionError(f"not {what} within {within} s\n" + "\n".join(self.trace[-60:]))

    async def until_led(self, within: float) -> Node:
        def led() -> bool:
            leader = self.leader()
            return leader is not None and leader.elector is not None and leader.elector.leads()

        await self.until(led, within, "led", step=0.02)
        return self._leading()

    async def until_led_by_another(self, old: Node, within: float) -> Node:
        await self.until(lambda: self.leader() not in (None, old), within, f"led by another than {old.name}", 0.02)
        return self._leading()

    def _leading(self) -> Node:
        leader = self.leader()
        assert leader is not None
        return leader

    async def until_gone(self, node: Node, within: float) -> None:
        await self.until(lambda: node.running is None, within, f"{node.name} gone", step=0.02)

    async def until_refreshed(self, node: Node) -> float:
        """Its next refresh is on record; when it was (the loop's clock)."""
        before = self.admin._data.entries[KEYS.leader].mod_revision
        await self.until(
            lambda: self.admin._data.entries[KEYS.leader].mod_revision != before, self.timing.ttl, "refreshed"
        )
        assert self.leader() is node
        return self.now()

    async def until_claiming(self, node: Node) -> None:
        """Its claim is about to be sent."""
        await self.until(lambda: isinstance(node.phase, Claiming), 2 * self.timing.ttl, "claiming")

    def revoke_all(self) -> None:
        """Every lease, by hand."""
        for lease in list(self.admin._data.leases):
            self.admin.kill_lease(lease)

    def backup(self) -> tuple[dict[str, Entry], int]:
        return dict(self.admin._data.entries), self.admin._data.revision

    def restore(self, backup: tuple[dict[str, Entry], int], bump: int) -> None:
        """As `etcdutl snapshot restore` with a bumped revision, or without (0). Watches hear of a gap."""
        data = self.admin._data
        data.entries, data.revision = dict(backup[0]), backup[1] + bump
        for node in self.nodes:
            node.store.reconnect()

    # --- faults

    async def break_something(self) -> str:
        """One random fault, and its end some time later (in a task of its own)."""
        node = self.random.choice(self.nodes)
        name = self.random.choice(
            [
                "cut",
                "lose",
                "late",
                "fail",
                "lease",
                "delete",
                "election",
                "kill",
                "stop",
                "stand-down",
                "bad-take-over",
                "slow",
                "held",
                "claims-late",
                "claims-lost",
                "behind-the-back",
                "switchover",
                "pause",
                "exclude",
            ]
        )
        lasts = self.random.random() * 2.5 * self.timing.ttl
        self.trace.append(f"{node.clock.now():9.3f} {node.name} FAULT {name} for {lasts:.1f}")
        await self._inject(name, node, lasts)
        return name

    async def _inject(self, name: str, node: Node, lasts: float) -> None:
        loop = asyncio.get_running_loop()
        match name:
            case "cut":
                node.store.cut_off()
                loop.call_later(lasts, node.store.reconnect)
            case "lose":
                for _ in range(self.random.randint(1, 4)):
                    node.store.inject(LoseReply(), on=self.random.choice(["read", "commit", "keepalive", "grant"]))
            case "late":
                node.store.inject(ApplyLate(lasts), on=self.random.choice(["commit", "keepalive"]))
            case "fail":
                kind = self.random.choice([ErrorClass.TRANSIENT, ErrorClass.AUTH, ErrorClass.NO_SPACE])
                for _ in range(self.random.randint(1, 6)):
                    node.store.inject(Fail(StoreError(kind, "as told")))
            case "lease":
                self.revoke_all()
            case "delete":
                for key in self.random.choice([[KEYS.leader], [KEYS.term], [KEYS.leader, KEYS.term]]):
                    self.admin.delete(key)
            case "election":
                self.admin.restart_leases()
            case "kill":
                await node.kill()
                loop.call_later(lasts, self._restart, node)
            case "stop" if node.elector is not None:
                gate = node.elector.gate
                gate.clear()
                loop.call_later(lasts, gate.set)
            case "stand-down" if node.elector is not None:
                node.elector.post(e.StandDown("as told"))
            case "bad-take-over":
                node.fails_take_over = True
                loop.call_later(lasts, setattr, node, "fails_take_over", False)
            case "slow":
                node.store.slow = self.random.random() * self.timing.attempt
                loop.call_later(lasts, setattr, node.store, "slow", 0.0)
            case "held":
                node.store.held = lasts
            case "claims-late":
                self._delay_claims(lasts)
            case "claims-lost":
                for other in self._standbys():
                    other.store.inject(LoseReply(), on="commit")
            case "switchover":
                self.ask_for_switchover(node)
            case "pause" | "exclude":
                settings = (
                    SettingsRecord(paused=MARK) if name == "pause" else SettingsRecord(excluded={node.name: MARK})
                )
                self.write(KEYS.settings, settings)
                loop.call_later(lasts, self.write, KEYS.settings, SettingsRecord())
            case "behind-the-back":
                self._vanish_unseen(lasts)
            case _:
                pass

    def write(self, key: str, record: BaseModel) -> None:
        """As an operator does."""
        before = self.admin._data.entries.get(key)
        value = record.model_dump_json().encode()
        self.admin._data.apply([Effect(key, value, 0, before.mod_revision if before else 0)])

    def ask_for_switchover(self, target: "Node") -> None:
        """Away from whoever has the term now."""
        term = self.admin._data.entries.get(KEYS.term)
        if term is not None:
            instance = json.loads(term.value)["instance"]
            self.write(
                KEYS.switchover,
                SwitchoverRecord(target=target.name, instance=instance, hold_back_s=5.0, asked="now", on="n0"),
            )

    def _standbys(self) -> list[Node]:
        return [node for node in self.nodes if node.running is None]

    def _delay_claims(self, lasts: float) -> None:
        """Claims arrive late, while keys vanish once or twice."""
        loop = asyncio.get_running_loop()
        for node in self._standbys():
            node.store.inject(ApplyLate(self.random.choice([0.1, 0.3, 1.0, lasts])), on="commit")
        for _ in range(self.random.randint(1, 2)):
            vanish = self.random.choice([self.revoke_all, self.delete_prefix])
            loop.call_later(self.random.random() * (self.timing.ttl + 1), vanish)

    def delete_prefix(self) -> None:
        for key in (KEYS.leader, KEYS.term):
            self.admin.delete(key)

    def _vanish_unseen(self, lasts: float) -> None:
        """The standbys miss some refreshes, then the keys go, and the holder does not hear of it."""
        loop = asyncio.get_running_loop()
        for node in self.nodes:
            begin, end = (lasts, 2 * self.timing.ttl) if node.running is not None else (0.0, lasts)
            loop.call_later(begin, node.store.cut_off)
            loop.call_later(begin + end, node.store.reconnect)
        loop.call_later(lasts, self.random.choice([self.revoke_all, self.delete_prefix]))

    def _restart(self, node: Node) -> None:
        if node.elector is None:
            node.start()
