"""Three nodes in virtual time: the real elector, machine and keeper decisions; around them a world that breaks.

What is simulated is what surrounds them: the store's network, processes that are killed and stopped, services (an
interval each), and the keeper's timer. The oracle looks at the intervals, never at what a node believes.
"""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from election import events as e
from election.clock import VirtualClock
from election.elector import Elector, Identity
from election.memory import Remembered
from election.phases import State
from election.record import Keys
from election.store import ErrorClass, StoreError
from election.stores.memory import ApplyLate, Fail, LoseReply, MemoryStore
from election.timing import Timing
from supervisor.keeper import term as keeper_term

KEYS = Keys("sim")


@dataclass
class Interval:
    """A time in which services of a node existed."""

    node: str
    token: int
    began: float
    ended: float | None = None


@dataclass
class Disk:
    """What survives the supervisor. Implements `election.memory.Memory`."""

    instances: tuple[str, ...] = ()
    floor: int = 0
    term: e.Term | None = None

    async def load(self) -> Remembered:
        return Remembered(self.instances, self.floor, self.term)

    async def note_claim(self, instance: str) -> None:
        self.instances = (*self.instances, instance)

    async def note_token(self, token: int) -> None:
        self.floor = max(self.floor, token)

    async def note_term(self, term: e.Term) -> None:
        self.term = term

    async def note_end_begun(self, term: e.Term) -> None:
        self.term = term

    async def forget_term(self) -> None:
        self.term = None


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


@dataclass
class Node:
    """A node: keeper, services and disk outlive its supervisor. Implements `election.elector.Host`."""

    name: str
    world: "World"
    clock: VirtualClock
    store: MemoryStore
    disk: Disk = field(default_factory=Disk)
    ledger: keeper_term.Ledger = field(default_factory=keeper_term.Ledger)
    running: Interval | None = None
    elector: Elections | None = None
    task: "asyncio.Task[None] | None" = None
    work: "asyncio.Task[None] | None" = None
    alarms: list[str] = field(default_factory=list)
    fails_take_over: bool = False

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
            self.running.ended = self.clock.now()
            self.running = None

    def keeper_start(self, token: int) -> bool:
        if keeper_term.admit(self.ledger, token, self._now_ns()) is not None:
            return False
        self.running = Interval(self.name, token, self.clock.now())
        self.world.intervals.append(self.running)
        self.world.check()  # nothing but a start can break what it checks
        return True

    # --- the supervisor

    def start(self) -> None:
        """A (re)started supervisor ends everything first."""
        if self.ledger.term is not None:
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
        await asyncio.sleep(self.world.random.random() * 0.01)
        self.keeper_arm(term.token, deadline)

    def take_over(self, term: e.Term) -> None:
        self._do(self._take_over(term))

    def end_services(self, action: e.EndServices) -> None:
        self._do(self._end(action))

    def changed(self, state: State) -> None:
        """Nothing of ours hangs on it."""

    def alarm(self, kind: str, text: str) -> None:
        self.alarms.append(f"{kind}: {text}")

    def note(self, text: str) -> None:
        self.world.trace.append(f"{self.clock.now():9.3f} {self.name} {text}")

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        if self.work is not None:
            self.work.cancel()
        self.work = asyncio.create_task(work)

    async def _take_over(self, term: e.Term) -> None:
        await asyncio.sleep(self.world.random.random() * 0.5)
        assert self.elector is not None
        await self.elector.gate.wait()
        if self.fails_take_over or not self.keeper_start(term.token):
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
        clocks = [VirtualClock(loop) for _ in range(nodes)]
        first = MemoryStore(clocks[0])
        self.stores = [first.handle(clock) for clock in clocks]
        self.admin = first
        self.nodes = [Node(f"n{i}", self, clocks[i], self.stores[i]) for i in range(nodes)]

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

    def leader(self) -> Node | None:
        return next((node for node in self.nodes if node.running is not None), None)

    async def watch_for(self, seconds: float) -> None:
        """Let time pass. A violation is kept, since it comes up in a task of some node."""
        await asyncio.sleep(seconds)
        assert not self.violations, "\n".join([*self.violations, *self.trace[-60:]])

    async def until_led(self, within: float) -> Node:
        for _ in range(int(within / 0.02)):
            await self.watch_for(0.02)
            if (leader := self.leader()) is not None and leader.elector is not None and leader.elector.leads():
                return leader
        raise AssertionError(f"nobody leads after {within} s\n" + "\n".join(self.trace[-60:]))

    async def until_led_by_another(self, old: Node, within: float) -> Node:
        for _ in range(int(within / 0.02)):
            await self.watch_for(0.02)
            if (leader := self.leader()) is not None and leader is not old:
                return leader
        raise AssertionError(f"nobody but {old.name} leads after {within} s\n" + "\n".join(self.trace[-60:]))

    async def until_gone(self, node: Node, within: float) -> None:
        for _ in range(int(within / 0.02)):
            await asyncio.sleep(0.02)
            if node.running is None:
                return
        raise AssertionError(f"{node.name} still runs after {within} s")

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
                for lease in list(self.admin._data.leases):
                    self.admin.kill_lease(lease)
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
            case _:
                pass

    def _restart(self, node: Node) -> None:
        if node.elector is None:
            node.start()
