"""The real runners, under anything that can happen to them in any order, on a keeper that forgives nothing.

`tests/bed/strict_keeper.py` notes a start beside a former run and a lock or a GPU that is given away too early; what
else must always hold is here: no edge outside the table, no start after a stop, out of `degraded` only by an operator,
out of a pause only at its end, and, once nothing disturbs any more, every service where it belongs.
"""

import asyncio
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from election.clock import VirtualClock, virtual_loop
from supervisor.config.service import Readiness, Service
from supervisor.service import probe
from supervisor.service.manager import Services
from supervisor.service.record import Record, Records
from supervisor.service.requests import Act, Verb
from supervisor.service.states import TRANSITIONS, State
from tests.bed.services import spec
from tests.bed.strict_keeper import AtOnce, Machine, Process, stand_in_for

T = TypeVar("T")
PAUSE = 5.0
"""Seconds: the shortest pause."""
ANSWER = 2.1
"""Seconds: a pause counts from the failure, not from when the keeper has answered that the lock is given back."""
NAMES = ("plain", "asks", "first", "second", "says", "later")
names = st.sampled_from(NAMES)
numbers = st.integers(0, 5)


def _specs() -> dict[str, Service]:
    """One of each kind, all of them in a hurry."""
    restart = {"window": 10.0, "backoff": (PAUSE, 6.0, 7.0), "healthy": 20.0}
    quick: dict[str, Any] = {"ready_after": 0.5, "stop_timeout": 3.0, "restart": restart}
    return {
        "plain": spec("x", **quick),
        "asks": spec("x", **quick, gpu=0, lock="on-demand"),
        "first": spec("x", **quick, gpu=0, lock="lifetime", priority=1),
        "second": spec("x", **quick, gpu=0, lock="lifetime"),
        "says": spec("x", **quick, readiness=Readiness(notify=True, timeout=6.0)),
        "later": spec("x", **quick, readiness=Readiness(tcp="127.0.0.1:9", timeout=6.0), after=("plain",)),
    }


SPECS = _specs()


class Disk:
    """Records as `supervisor.service.record` keeps them, written at once."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}

    def load(self, service: str) -> Record | None:
        return self.records.get(service)

    def put(self, service: str, record: Record) -> None:
        self.records[service] = record


class NodeLife(RuleBasedStateMachine):
    """A node's services, over terms and restarts of its supervisor."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = virtual_loop()
        self.loop.set_default_executor(AtOnce())
        self.machine = Machine()
        self.patch = pytest.MonkeyPatch()
        stand_in_for(self.machine, self.patch)
        self.patch.setattr(probe, "look", self._look)
        self.machine.tell = lambda event: self.services.keeper_event(event)
        self.machine.may_start = self._why_not
        self.disk = Disk()
        self.told: list[str] = []
        self.held: set[str] = set()
        """An operator stopped them."""
        self.asked: dict[str, float] = {}
        """When an operator asked for them last. It may lie in the mailbox for as long as a keeper is waited for."""
        self.survived: set[str] = set()
        """They were quarantined in this term."""
        self.trouble: str | None = None
        self.stop: asyncio.Task[None] | None = None
        self.stops = False
        self.services = self._supervisor()
        self._next_term()

    # The surroundings.

    def teardown(self) -> None:
        try:
            self.calm()
        finally:
            self._die()
            self.patch.undo()
            self.loop.close()

    def run(self, work: Coroutine[Any, Any, T], then: float = 0.0) -> T:
        async def both() -> T:
            result = await work
            await asyncio.sleep(then)
            return result

        return self.loop.run_until_complete(both())

    def _supervisor(self) -> Services:
        self.states = dict.fromkeys(NAMES, State.STOPPED)
        self.since = dict.fromkeys(NAMES, 0.0)
        driver = self.machine.driver

        async def made() -> Services:
            services = Services(
                SPECS,
                self.machine,
                clock=VirtualClock(self.loop),
                node="n",
                run=Path("/x"),
                log=Path("/x"),
                gpus={0: driver.gpu},
                driver=driver,
                records=cast(Records, self.disk),
                on_event=self._hear,
            )
            self.life = self.loop.create_task(services.run())
            return services

        return self.run(made())

    def _die(self) -> None:
        """The supervisor ends, with no word to anybody."""
        self.life.cancel()
        self.loop.run_until_complete(asyncio.gather(self.life, return_exceptions=True))

    def _next_term(self) -> None:
        self.machine.end_term()
        self._the_keeper_is_there()
        self.machine.driver.lists.clear()  # a take-over fails while anybody is on a GPU
        self.survived.clear()
        self.run(self.services.launch(self.machine.token, deadline=self.loop.time() + 5))

    def _the_keeper_is_there(self) -> None:
        """Without it there is no take-over and no resumption, and so nothing to see here."""
        self.machine.next_start = self.machine.next_start.replace("gone", "")

    async def _look(self, _: Readiness, _patience: float) -> str | None:
        await asyncio.sleep(0)
        return self.trouble

    def process(self, service: str) -> Process | None:
        return self.machine.now.get(service)

    @property
    def there(self) -> list[Process]:
        return [process for process in self.machine.now.values() if process.there]

    # What must hold at every moment.

    def _why_not(self, service: str) -> str:
        if self.stops:
            return "after the node was told to stop"
        if service in self.held:
            return "though an operator stopped it"
        if self.states[service] not in {State.STARTING, State.WAITING_LOCK}:
            return f"while it is {self.states[service]}"
        former = {process.pid for process in self.machine.starts if process.service == service}
        if SPECS[service].gpu is not None and former & self.machine.driver.lists:
            return "while the driver lists what it was before (sglang 39545)"
        return ""

    def _hear(self, sentence: str) -> None:
        self.told.append(sentence)
        found = re.match(r"(\w+): ([\w-]+) → ([\w-]+): ", sentence)
        if found is not None:
            self._changes(found[1], State(found[2]), State(found[3]))
        elif "fault while" in sentence:
            self.machine.wrong(sentence)

    def _changes(self, service: str, old: State, new: State) -> None:
        wrong = self.machine.wrong
        if self.states[service] is not old or (old, new) not in TRANSITIONS:
            wrong(f"{service}: {old} → {new} from {self.states[service]}")
        asked = self.asked.get(service, 0.0) > self.since[service] - 3 * ANSWER
        if old is State.DEGRADED and new is State.STARTING and not asked:
            wrong(f"{service}: out of degraded, and nobody asked for it")
        early = self.loop.time() - self.since[service] < PAUSE - ANSWER
        if old is State.BACKOFF and new is State.STARTING and early and not asked:
            wrong(f"{service}: out of its pause before its end")
        process = self.process(service)
        left = process is not None and process.answered and process.there
        if old in {State.STOPPING, State.QUARANTINED} and new is not State.QUARANTINED and process is not None and left:
            wrong(f"{service}: {new} while {process.pids} are there")
        if (old, new) == (State.STOPPING, State.STARTING) and service in self.machine.given_back:
            wrong(f"{service}: restarted at once, and its lock was free meanwhile")
        if new is State.STARTING:
            self.machine.given_back.discard(service)
        if new is State.QUARANTINED:
            self.survived.add(service)
        self.states[service], self.since[service] = new, self.loop.time()

    @invariant()
    def nothing_forbidden_has_happened(self) -> None:
        assert not self.machine.violations, (self.machine.violations, self.told[-20:])

    # What can happen.

    @rule(seconds=st.sampled_from([0.0, 0.02, 0.3, 1.0, 6.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    def any_of(self, number: int) -> Process | None:
        there = [process for process in self.there if not process.stuck]
        return there[number % len(there)] if there else None

    @rule(
        number=numbers,
        status=st.sampled_from([0, 1 << 8, 75 << 8, 9]),
        children=numbers,
        listed=st.sampled_from([True, True, False]),
    )
    def a_process_ends(self, number: int, status: int, children: int, listed: bool) -> None:
        process = self.any_of(number)
        if process is not None:
            process.children = children % 3 if process.alive else 0
            if listed and SPECS[process.service].gpu is not None:
                self.machine.driver.lists.add(process.pid)
            self.machine.exit(process, status)

    @rule(number=numbers, how=st.sampled_from(["deaf", "stuck"]))
    def a_process_turns(self, number: int, how: str) -> None:
        process = self.any_of(number)
        if process is not None:
            setattr(process, how, True)

    @rule()
    def whatever_holds_on_lets_go(self) -> None:
        """Of what stood in the kernel, and of what the driver still listed."""
        self.machine.driver.lists.clear()
        for process in list(self.machine.now.values()):
            self.machine.let_go(process)

    @rule(how=st.sampled_from(["exec", "silent", "silent and done", "gone"]), seconds=st.sampled_from([0.0, 0.1, 1.5]))
    def the_keeper_has_trouble(self, how: str, seconds: float) -> None:
        """With the next start, and with its answers; orders take as long as they do."""
        self.machine.next_start, self.machine.answers_after = how, seconds

    @rule()
    def a_job_comes_or_goes(self) -> None:
        if self.machine.lock == "job":
            self.machine.leave("job")
        elif self.machine.lock is None:
            self.machine.take("job")

    @rule()
    def says_is_ready(self) -> None:
        process = self.process("says")
        if process is not None and process.alive:
            event = {"event": "notify", "service": "says", "main": process.pid, "pid": process.pid}
            self.machine.tell({**event, "fields": {"READY": "1"}})

    @rule(trouble=st.sampled_from([None, "no answer"]))
    def later_answers(self, trouble: str | None) -> None:
        self.trouble = trouble

    @rule(service=names, verb=st.sampled_from(list(Verb)), then=st.sampled_from([0.0, 0.3]))
    def an_operator_asks(self, service: str, verb: Verb, then: float) -> None:
        before = service in self.held
        if verb in {Verb.START, Verb.RESTART}:
            self.held.discard(service)
        if verb in {Verb.START, Verb.RESTART, Verb.RESET}:
            self.asked[service] = self.loop.time()
        decision = self.run(self.services.request(service, verb, no_start=""), then)
        if decision in {Act.END, Act.KILL, Act.HOLD} or (before and not isinstance(decision, Act)):
            self.held.add(service)

    @rule(number=numbers, kill=st.booleans())
    def the_watchdog_restarts(self, number: int, kill: bool) -> None:
        process = self.any_of(number)
        if process is not None:
            patience = None if kill else 1.0
            restart = self.services.restart
            self.run(restart(process.service, "made up", kill=kill, patience=patience, pid=process.pid), 0.001)

    @rule(service=names)
    def the_watchdog_means_an_earlier_process(self, service: str) -> None:
        self.run(asyncio.sleep(0.001))
        process, before = self.process(service), self.states[service]
        self.run(self.services.restart(service, "made up", kill=True, pid=7), 0.001)
        assert self.states[service] is before or process is None or not process.alive, self.told[-5:]

    @precondition(lambda self: self.stop is None)
    @rule(graceful=st.booleans(), patience=st.sampled_from([0.0, 2.0, 10.0]))
    def the_node_stops(self, graceful: bool, patience: float) -> None:
        async def stop() -> None:
            self.stops = True
            await self.services.stop_all(by=self.loop.time() + patience, graceful=graceful)

        self.stop = self.loop.create_task(stop())
        self.run(asyncio.sleep(0.05))

    @rule(impatient=st.booleans())
    def the_next_term_begins(self, impatient: bool) -> None:
        if self.stop is None:
            self.the_node_stops(graceful=True, patience=2.0)
        assert self.stop is not None
        self.whatever_holds_on_lets_go()  # the keeper arms no term beside what survived
        if impatient:
            self.run(self.services.fence_now())
        self.loop.run_until_complete(self.stop)
        for process in self.there:  # a keeper that was slow to kill; what it ends the term with is below
            assert not process.answered or self.states[process.service] is State.STOPPING, self.told[-20:]
        self.machine.end_term()
        self.services.term_over()
        self.run(asyncio.sleep(12))  # longer than one waits for a driver
        self.stop, self.stops = None, False
        self._next_term()

    @precondition(lambda self: self.stop is None)
    @rule()
    def the_supervisor_is_killed_and_comes_back(self) -> None:
        self._die()
        self._the_keeper_is_there()
        self.services = self._supervisor()
        self.run(self.services.remember())
        found, held = self.machine.hello()
        adopted = self.services.adopt(self.machine.token, found, held, deadline=self.loop.time() + 5)
        self.run(adopted)

    # What must hold once nothing disturbs any more.

    @rule()
    def calm(self) -> None:
        """Whatever was stuck, listed, hidden or held is let go: every service is where it belongs, and can be told to
        be there."""
        self.trouble, self.machine.next_start, self.machine.answers_after = None, "", 0.0
        self.whatever_holds_on_lets_go()
        self.machine.leave("job")
        self.run(asyncio.sleep(60))
        self.nothing_forbidden_has_happened()
        for service in NAMES:
            wrong = self._out_of_place(service)
            assert not wrong, (service, wrong, self.states, self.machine.lock, self.told[-30:])

    def _out_of_place(self, service: str) -> str:
        state, process, runner = self.states[service], self.process(service), self.services.runners[service]
        if runner.state is not state:
            return f"it is {runner.state}"
        there = process is not None and process.there
        if self.stop is not None:
            return f"{state} after a stop" if there or state not in {State.STOPPED, State.DEGRADED} else ""
        match state:
            case State.RUNNING | State.UNREADY | State.DRAINING:
                alive = process is not None and process.alive and runner.pid == process.pid
                return "" if alive else f"{state} without a process"
            case State.STARTING:
                waits = service == "later" and self.states["plain"] not in {State.RUNNING, State.DRAINING}
                return "" if service == "says" or waits else "it starts for ever"
            case State.WAITING_LOCK:
                others = self.machine.lock not in {None, service} and not there
                return "" if others else f"waits for a lock that {self.machine.lock} has, with {process}"
            case State.STOPPED if not runner.held and service not in self.survived:
                return f"stopped, and nobody asked for that: {runner.why}"
            case State.STOPPED | State.DEGRADED | State.BACKOFF:
                return f"{state}, and {process} is there" if there else ""
        return f"still {state}"


TestNodeLife = NodeLife.TestCase
TestNodeLife.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.shrink],  # it takes minutes; `told` says what happened
)
