"""One service's life in one term: a step per state, until it is stopped.

Each step looks at the machine, decides by the pure tables (`states`, `restart`) and makes the transitions. Messages
from outside wait in a mailbox; what they hint at is verified before it counts. An exception in a step is told and ends
in the service's own restart accounting: it never reaches another service.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from supervisor.config.service import Liveness, Readiness, Service
from supervisor.keeper.protocol import LOOK
from supervisor.service import probe, restart
from supervisor.service.ending import KILL_WAIT, LOOK_EVERY, Ending
from supervisor.service.footprint import Footprint
from supervisor.service.hand import Busy, Hand, Shared
from supervisor.service.line import Line
from supervisor.service.messages import (
    BUSY_EXIT,
    Drain,
    Emptied,
    Ended,
    Exited,
    Message,
    Probed,
    Reset,
    Restart,
    SaidReady,
    Stop,
    Stopping,
    describe,
)
from supervisor.service.ready import Alive, IsReady, Look, NoLookError, Ready, TooLate
from supervisor.service.record import Record, spec_hash
from supervisor.service.said import Said
from supervisor.service.sidecar import Sidecars, ended
from supervisor.service.states import ALIVE, State, step

__all__ = ["KILL_WAIT", "Runner"]

POLL = 1.0
"""Seconds between looks of one who waits for a lock: a holder may be outside our cgroups."""
QUARANTINE_LOOK = 5.0
"""Seconds between looks at what survived."""
RECENTLY = 1.0
"""Seconds for which a holder that has just let go still explains an exit with 75."""
SERVED = frozenset({State.RUNNING.value, State.UNREADY.value, State.DRAINING.value})
"""States after becoming ready."""
AFTER_FAULT = 0.5
"""Seconds of rest after a fault of our own, so that it cannot spin."""

STOPPED_BY_OPERATOR = "stopped by an operator"


class Runner:
    """See above. Made once per node; `prepare` and `live` are one term."""

    def __init__(self, name: str, spec: Service, shared: Shared) -> None:
        self.name = name
        self.spec = spec
        self.spec_hash = spec_hash(spec)
        self.hand = Hand(name, spec, shared)
        self.state = State.STOPPED
        self.why = "not launched yet"
        self.since = shared.clock.now()
        self.started_at: float | None = None
        self.next_at: float | None = None
        self.restarts = 0
        """Starts after the first one of this term, or after an operator's start."""
        self.held = False
        """An operator stopped it: no term starts it, until an operator does."""
        self._drains = False
        """It was draining when an earlier run of the supervisor ended."""
        self._before: Record | None = None
        """What an earlier run of the supervisor wrote of it."""
        self.asked = asyncio.Event()
        """Set once the keeper has been asked to start it in this term, or it stands in line for a lock."""
        self._account = restart.CLEAR
        self._policy = restart.Policy(spec.restart.window, tuple(spec.restart.backoff), spec.restart.healthy)
        self._healthy_since: float | None = None
        self._blind = ""
        """Why it could not be looked at, as last told."""
        self._was_ready = False
        """Its present run has become ready."""
        self._shared = shared
        self._mailbox: asyncio.Queue[Message] = asyncio.Queue()
        self._stop: Stop | None = None
        self._moved = asyncio.Event()
        self._ended = Ended("")
        self._ending = Ending(spec, self.hand, shared, self._next, lambda: self._stop)
        self._token = 0
        self._finished = True
        self._ready = Ready(spec.readiness, spec.ready_after, shared.clock)
        self._alive = Alive(spec.liveness, shared.clock)
        self.sidecars = Sidecars(spec.sidecars, shared.clock)

    @property
    def pid(self) -> int | None:
        """Of its main process, which may have ended; None: it has none."""
        return self.hand.pid

    @property
    def said(self) -> Said:
        """What its processes told by sd_notify in this run."""
        return self._ready.said

    @property
    def not_alive(self) -> str:
        """Why its liveness looks say that it does not work any more; empty: they do not."""
        return self._alive.failed

    @property
    def account(self) -> restart.Account:
        """Its failures as they count now."""
        return restart.settle(
            self._policy, self._account, healthy_since=self._healthy_since, now=self._shared.clock.now()
        )

    def post(self, message: Message) -> None:
        """Put a message into the mailbox. A Stop counts from now on, whatever the present step is at."""
        if isinstance(message, Emptied):
            self.hand.emptied = True
        if isinstance(message, Reset):
            self._account = restart.CLEAR
        if isinstance(message, Stop):
            if message.operator:
                self.held, self._account = True, restart.CLEAR
            self._stop = message if self._stop is None else self._stop.merged(message)
            if not message.operator:
                self._ending.hasten.set()
        self._mailbox.put_nowait(message)
        if isinstance(message, Reset) or (isinstance(message, Stop) and message.operator):
            self._keep()

    @property
    def ends(self) -> bool:
        """It lives, and has been asked to stop."""
        return not self._finished and self._stop is not None

    @property
    def lives(self) -> bool:
        """Somebody reads its messages."""
        return not self._finished

    async def moved(self, within: float) -> None:
        """Until its next change of state, at most for so many seconds."""
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._moved.wait()

    def hold(self) -> None:
        """An operator stops what does not run: no term starts it."""
        self.held, self.why = True, STOPPED_BY_OPERATOR
        self._keep()

    def release(self) -> None:
        """An operator's stop is over; nothing is started by this."""
        self.held, self.why = False, "no longer stopped by an operator"
        self._keep()

    def forgive(self) -> None:
        """An operator's reset while nobody reads its messages, between two terms."""
        self._account = restart.CLEAR
        if self.state in {State.DEGRADED, State.BACKOFF}:
            self._to(State.STOPPED, "reset by an operator")

    def prepare(self, token: int) -> bool:
        """A new term: it is about to `live`, and a `lifetime` service takes its place in line.

        False: something of its former term is still there, so it is not started beside it (systemd 13288).
        """
        if self.state not in {State.STOPPED, State.DEGRADED, State.BACKOFF}:
            return False
        self._enter(token)
        self.restarts = 0
        if self.state is State.BACKOFF or (self.state is State.DEGRADED and self._account.degraded):
            self.asked.set()
        else:
            self._to(State.STARTING, "launched")
        return True

    def _enter(self, token: int) -> None:
        self._token, self._stop, self._finished = token, None, False
        self._mailbox = asyncio.Queue()
        self.hand.refusal = self.started_at = None
        self._ending.hasten.clear()
        self.asked.clear()

    def remember(self, record: Record) -> None:
        """What an earlier run of this supervisor knew, in this boot: before anything is launched or adopted."""
        self._account, self.held, self.restarts = record.account, record.held, record.restarts
        self._drains = record.state == State.DRAINING
        self._before = record
        if self.held:
            self.why = STOPPED_BY_OPERATOR
        elif self._account.degraded or (record.state == State.BACKOFF and record.next_at is not None):
            self._to(State.STARTING, "known from an earlier run of the supervisor")
            self._to(State.STOPPING, record.why)
            self._to(State.DEGRADED if self._account.degraded else State.BACKOFF, record.why)
            self.next_at = None if self._account.degraded else record.next_at
            self._keep()

    def adopt(self, token: int, footprint: Footprint, found: Mapping[str, Any]) -> None:
        """It goes on from an earlier run of this supervisor; `found` is what the keeper's `hello` says of it. To be
        followed by `look_again`."""
        self._enter(token)
        self.hand.adopt(footprint, holds_lock=found["lock"] is not None, empty=found["empty"])
        self.started_at = found["since_ns"] / 1e9
        self.asked.set()
        self.sidecars.adopt(found.get("units", {}))
        if self.held and not self._drains:  # an operator's stop was under way
            self.post(Stop(float("inf"), graceful=True, operator=True))
        self._to(State.STARTING, "adopted; its earlier output is in its log file")
        if self.pid is not None:
            self._watch_over(found["ready"])
        before = self._before
        if before is not None and before.state in SERVED and self._is(before):
            self._is_ready("adopted; it was ready before")

    def _is(self, record: Record) -> bool:
        footprint = self.hand.footprint
        return footprint is not None and (record.pid, record.start_ticks) == (footprint.pid, footprint.start_ticks)

    def look_again(self, found: Mapping[str, Any] | None) -> None:
        """Its keeper was replaced, or it was adopted: what ended meanwhile was told to nobody. `found` as in `adopt`;
        None: the keeper does not know it."""
        footprint = self.hand.footprint
        if footprint is None:
            return
        if self.pid is None:
            self.post(Restart("its start was interrupted: what there is of it is ended", kill=True, counts=False))
        elif found is None or not found["running"] or found["pid"] != footprint.pid:
            if self._before is not None and self._before.pid is None:
                self.post(Restart("it had ended, and was about to start again", kill=True, counts=False))
            else:
                self.post(Exited(footprint.pid, None if found is None else found["status"]))
        self._before = None
        units = {} if found is None else found.get("units", {})
        for message in self.sidecars.ended_meanwhile(units):
            self.post(message)
        if found is None or found["empty"]:
            self.post(Emptied())

    def _record(self) -> Record:
        footprint = self.hand.footprint
        return Record(
            token=self._token,
            spec=self.spec_hash,
            state=self.state.value,
            why=self.why,
            held=self.held,
            restarts=self.restarts,
            executable=self.spec.program,
            account=self._account,
            pid=self.pid,
            start_ticks=None if footprint is None or self.pid is None else footprint.start_ticks,
            cgroup=None if footprint is None else footprint.cgroup,
            next_at=self.next_at,
        )

    def _keep(self) -> None:
        self._shared.keep(self.name, self._record())

    def notified(self, unit: str | None, main: int, pid: int, fields: Mapping[str, str]) -> None:
        """A process of its present run has said something."""
        now = self._shared.clock.now()
        sidecar = self.sidecars.of_unit(unit)
        if sidecar is not None:
            sidecar.ready.said.take(pid, fields, now)
            self.said.take(pid, {key: value for key, value in fields.items() if key.startswith("X_GPU_SECTION")}, now)
        elif self.pid in (main, None):  # the answer to its start may be read later than what it says then
            self.said.take(pid, fields, now)
        else:
            return
        if fields.keys() & {"READY", "EXTEND_TIMEOUT_USEC"}:
            self.post(SaidReady(pid))
        if fields.get("STOPPING") == "1" and sidecar is None and pid == main:
            self.post(Stopping(main))

    def looked(self, unit: str, status: int | None) -> None:
        """A command that looks at it has ended."""
        self.hand.looked(unit.removeprefix(LOOK), status)

    async def live(self) -> None:
        """Run until it is stopped. Raises nothing but CancelledError."""
        steps: dict[State, Callable[[], Awaitable[None]]] = {
            State.STARTING: self._starting,
            State.WAITING_LOCK: self._waiting,
            State.RUNNING: self._watching,
            State.UNREADY: self._watching,
            State.DRAINING: self._watching,
            State.STOPPING: self._stopping,
            State.BACKOFF: self._pausing,
            State.DEGRADED: self._resting,
            State.QUARANTINED: self._holding,
        }
        try:
            await self._live(steps)
        finally:
            self._look_no_more()

    async def _live(self, steps: Mapping[State, Callable[[], Awaitable[None]]]) -> None:
        while not self._finished:
            try:
                await steps[self.state]()
            except Exception as error:  # noqa: BLE001 - the edge of this service's task: told, and contained here
                self._shared.tell(f"{self.name}: fault while {self.state.value}: {type(error).__name__}: {error}")
                self.asked.set()
                await asyncio.sleep(AFTER_FAULT)
                if self.state in ALIVE:
                    self._end(Ended(f"a fault of the supervisor: {error}"))

    # One step per state.

    async def _starting(self) -> None:
        if self.pid is not None:
            await self._watching()
        elif self._stop is not None:
            self._end(Ended(self._stop_why(), failure=False, graceful=self._stop.graceful))
        elif self.hand.footprint is not None:
            await self._raising()
        elif missing := self._shared.missing(self.spec.after):
            self.why = f"after {', '.join(missing)}"
            self.asked.set()
            await self._next(self._shared.clock.now() + LOOK_EVERY)
        elif self._waits_in_line():
            self._to(State.WAITING_LOCK, f"behind {self._line().first()} in line for GPU {self.spec.gpu}")
            self.asked.set()
        else:
            await self._start()

    async def _raising(self) -> None:
        """Sidecars run, or have been adopted without the service: the next one, or the service, is to follow."""
        coming = self.sidecars.next()
        waits = coming is not None and coming.pid is not None
        message = await self._next(coming.ready.limit if coming is not None and waits else self._shared.clock.now())
        if self._stop is not None:
            return
        if isinstance(message, Restart) and message.pid is None:
            self._end(_restarted(message))
            return
        match self.sidecars.take(message, now=self._shared.clock.now(), lost_at=self._shared.lost_at()):
            case Ended() as ended:
                self._end(ended)
            case str(why):
                self._shared.tell(f"{self.name}: {why}")
            case None if message is None and not waits:
                await self._start()

    async def _waiting(self) -> None:
        self._line().join(self.name, self.spec.priority)
        self.asked.set()
        await self._next(self._shared.clock.now() + POLL)
        if self._stop is not None:
            self._leave_line()
            self._finish(State.STOPPED, self._stop_why())
        elif self._line().first() != self.name:
            return
        elif self.hand.wants_lock:
            await self._start()
        elif self._line().other_holder(self.name, since=self._shared.clock.now()) is None:
            self._leave_line()
            self._to(State.STARTING, f"GPU {self.spec.gpu} is free")

    async def _watching(self) -> None:
        message = await self._next(self._ready.limit if self.state is State.STARTING else None)
        now = self._shared.clock.now()
        drains = self.state is State.DRAINING or self._drains
        if self._stop is not None:
            self._end(Ended(self._stop_why(), failure=False, graceful=self._stop.graceful))
        elif isinstance(message, Exited | Stopping) and drains and self._has(message.pid):
            self._stop = Stop(float("inf"), graceful=True, operator=True)
            gone = self.sidecars.of_pid(message.pid)
            why = "has drained" if gone is None or isinstance(message, Stopping) else ended(gone, message.status).why
            self._end(Ended(why, failure=False, graceful=True, by_itself=isinstance(message, Stopping)))
        elif isinstance(message, Exited) and message.pid == self.pid:
            self._end(self._exit(message.status))
        elif isinstance(message, Stopping) and message.pid == self.pid:
            self._end(Ended("it said STOPPING=1", graceful=True, by_itself=True))
        elif isinstance(message, Exited) and (sidecar := self.sidecars.of_pid(message.pid)) is not None:
            self._end(ended(sidecar, message.status))
        elif isinstance(message, Drain) and self.state in {State.RUNNING, State.UNREADY}:
            self.held, self._account = True, restart.CLEAR
            self._to(State.DRAINING, "asked for by an operator")
            await self.hand.drain()
        elif isinstance(message, Restart) and (message.pid is None or message.pid == self.pid):
            self._end(_restarted(message))
        elif isinstance(message, Probed) and message.pid == self.pid:
            self._probed(message.trouble)
        elif self.state is State.STARTING:
            match self._ready.decide(now, lost_at=self._shared.lost_at()):
                case IsReady(why):
                    self._is_ready(why)
                case TooLate(why):
                    self._end(Ended(why, graceful=True))

    def _has(self, pid: int) -> bool:
        return pid == self.pid or self.sidecars.of_pid(pid) is not None

    def _is_ready(self, why: str) -> None:
        self._to(State.RUNNING, why)
        self._healthy_since = self.said.heard_at = self._shared.clock.now()
        self._was_ready = True
        self._alive.begin(self._look_at(self.spec.liveness), excused=self._is_excused)
        if self._drains:
            self._drains = False
            self._to(State.DRAINING, "drains since before the supervisor was restarted")

    def _is_excused(self) -> bool:
        """It works on the GPU, as it says, or somebody has frozen it: that it does not answer means nothing."""
        return bool(self.said.sections) or (self.hand.footprint is not None and self.hand.footprint.frozen())

    def _probed(self, trouble: str | None) -> None:
        """Not ready while it runs: told, and nothing is killed for it."""
        if self.state is State.DRAINING:
            return
        self._ready.seen(trouble)
        if trouble is None and self.state is State.UNREADY:
            self._to(State.RUNNING, "it answers")
            self._healthy_since = self._shared.clock.now()
        elif trouble is None and self.state is State.STARTING:
            self._is_ready("it answers")
        elif self.state is State.RUNNING and self._ready.unready_because:
            self._to(State.UNREADY, self._ready.unready_because)
        elif self.state in {State.STARTING, State.UNREADY} and trouble is not None:
            self.why = f"not ready: {trouble}"

    def _watch_over(self, said_ready: bool) -> None:
        """Its run has begun, or has been adopted: then its time to become ready counts from now."""
        assert self.pid is not None
        assert self.started_at is not None
        self.said.ready = self.said.ready or said_ready
        look, found = self._look_at(self.spec.readiness), self._found(self.pid)
        self._ready.begin(self.started_at, look, found, counts_from=self._shared.clock.now())

    def _found(self, pid: int) -> Callable[[str | None], None]:
        return lambda trouble: self.post(Probed(pid, trouble))

    def _look_at(self, at: Readiness | Liveness | None) -> Look:
        """How it is looked at: a command through the keeper, beside its processes; else from outside."""

        async def look() -> str | None:
            assert at is not None
            patience = at.timeout if isinstance(at, Liveness) else probe.PATIENCE
            try:
                if at.command is None:
                    return await probe.look(at, patience)
                name = "alive" if isinstance(at, Liveness) else "ready"
                return await self.hand.look(name, at.command, self._token, patience)
            except NoLookError as error:
                self._tell_blind(str(error))
                if error.lasting and isinstance(at, Readiness):
                    return f"it cannot be looked at: {error}"
                raise
            except Exception as error:
                self._tell_blind(f"a fault of the supervisor: {error!r}")
                raise NoLookError(repr(error)) from error

        return look

    def _tell_blind(self, why: str) -> None:
        if why != self._blind:
            self._blind = why
            self._shared.tell(f"{self.name}: it cannot be looked at: {why}")

    def _look_no_more(self) -> None:
        self._alive.end()
        self._ready.end()
        self.sidecars.look_no_more()

    async def _stopping(self) -> None:
        ended = self._ended
        trouble = await self._ending.make_empty(ended)
        self.sidecars.reset()
        if trouble is None and not self._node_stops() and not ended.refused:
            trouble = await self._ending.device_trouble(ended)
        if trouble is not None:
            self._to(State.QUARANTINED, trouble)
        elif self._stop is not None or ended.refused:
            await self.hand.forget()
            self._finish(State.STOPPED, self._stop_why() if self.held else ended.why)
        elif ended.busy:
            await self.hand.forget()
            self._to(State.WAITING_LOCK, ended.why)
        elif ended.failure:
            await self._count(ended)
        else:
            self.hand.drop()
            self._to(State.STARTING, ended.why)

    async def _pausing(self) -> None:
        message = await self._next(self.next_at)
        by_hand = isinstance(message, Reset) or (isinstance(message, Restart) and not message.counts)
        if self._stop is not None:
            self._finish(State.STOPPED, self._stop_why())
        elif by_hand or (self.next_at is not None and self._shared.clock.now() >= self.next_at):
            self._to(State.STARTING, "asked for by an operator" if by_hand else "its pause is over")

    async def _resting(self) -> None:
        message = await self._next(None)
        if self._stop is not None and self.held:
            self._finish(State.STOPPED, self._stop_why())
        elif self._stop is not None:
            self._finished = True
        elif isinstance(message, Reset):
            self._to(State.STARTING, "reset by an operator")

    async def _holding(self) -> None:
        await self._next(self._shared.clock.now() + QUARANTINE_LOOK)
        if not self.hand.empty() or (
            not self._node_stops() and await self._ending.device_trouble(self._ended) is not None
        ):
            return
        await self.hand.forget()
        self._finish(State.STOPPED, "what had survived is gone")

    # What the steps are made of.

    async def _start(self) -> None:
        """The next of its sidecars; after them its main process."""
        sidecar = self.sidecars.next()
        self._was_ready = False
        if sidecar is None:
            self._ready = Ready(self.spec.readiness, self.spec.ready_after, self._shared.clock)
        else:
            self.why = f"sidecar {sidecar.name} starts"
        try:
            name = None if sidecar is None else sidecar.name
            outcome = await self.hand.start(self._token, name, wanted=lambda: self._stop is None)
        finally:
            self.asked.set()
        if isinstance(outcome, Busy):
            self._wait_for_lock(outcome)
            return
        self._at_its_turn()
        if sidecar is None:
            self.restarts += self.started_at is not None
            self.started_at = self._shared.clock.now()
            self._keep()
        if isinstance(outcome, Ended):
            self._end(outcome)
        elif sidecar is None:
            self._watch_over(said_ready=False)
        else:
            sidecar.started(outcome, self._look_at(sidecar.spec.readiness), self._found(outcome))

    def _wait_for_lock(self, busy: Busy) -> None:
        self.why = busy.why
        if self.state is not State.WAITING_LOCK:
            self._to(State.WAITING_LOCK, busy.why)

    def _at_its_turn(self) -> None:
        self._leave_line()
        if self.state is State.WAITING_LOCK:
            self._to(State.STARTING, f"its turn on GPU {self.spec.gpu}")

    def _node_stops(self) -> bool:
        """The whole node stops: unlike after an operator's stop, nobody here gets the GPU next."""
        return self._stop is not None and not self._stop.operator

    def _stop_why(self) -> str:
        return STOPPED_BY_OPERATOR if self.held else "asked to stop"

    def _waits_in_line(self) -> bool:
        if not self.hand.wants_lock or self.hand.holds_lock:
            return False
        self._line().join(self.name, self.spec.priority)
        return self._line().first() != self.name

    def _line(self) -> Line:
        assert self.spec.gpu is not None
        return self._shared.lines[self.spec.gpu]

    def _leave_line(self) -> None:
        """Out of the line, and the next one may look."""
        if self.spec.gpu is not None:
            line = self._line()
            line.leave(self.name)
            following = line.first()
            if following is not None:
                self._shared.wake(following)

    def _exit(self, status: int | None) -> Ended:
        """An exit that nobody asked for."""
        if self.spec.gpu is not None and status == BUSY_EXIT << 8:
            holder = self._line().other_holder(self.name, since=self._shared.clock.now() - RECENTLY)
            if holder is not None:
                return Ended(f"left with 75: GPU {self.spec.gpu} is held by {holder}", failure=False, busy=True)
        return Ended(describe(status))

    def _end(self, ended: Ended) -> None:
        self._ended = ended
        self._look_no_more()
        self._to(State.STOPPING, ended.why)

    async def _count(self, ended: Ended) -> None:
        """Restart accounting. The lock is kept through a restart at once, and freed otherwise."""
        now = self._shared.clock.now()
        self._account, decision = restart.failed(
            self._policy, self._account, was_ready=self._was_ready, healthy_since=self._healthy_since, now=now
        )
        match decision:
            case restart.RestartNow():
                self.hand.drop()
                self._to(State.STARTING, ended.why)
            case restart.Backoff(seconds):
                await self.hand.forget()
                self._to(State.BACKOFF, f"{ended.why}; a pause of {seconds:g} s")
                self.next_at = now + seconds
                self._keep()
            case restart.Degrade():
                await self.hand.forget()
                advice = f"`gpuward service reset {self.name}` starts it again"
                self._to(State.DEGRADED, f"{ended.why}; failed {self._account.failures} times; {advice}")

    async def _next(self, until: float | None) -> Message | None:
        """The next message; None at `until` (boot time, as the loop's)."""
        try:
            async with asyncio.timeout_at(until):
                return await self._mailbox.get()
        except TimeoutError:
            return None

    def _finish(self, state: State, why: str) -> None:
        self._to(state, why)
        self._finished = True

    def _to(self, new: State, why: str) -> None:
        sentence = step(self.state, new)
        self._shared.tell(f"{self.name}: {self.state.value} → {new.value}: {why} ({sentence})")
        self.state, self.why, self.since, self.next_at = new, why, self._shared.clock.now(), None
        self._moved.set()
        self._keep()
        if new not in {State.RUNNING, State.STOPPING}:
            self._healthy_since = None


def _restarted(asked: Restart) -> Ended:
    killed = asked.counts and asked.resets and (asked.kill or asked.patience is not None)
    return Ended(asked.why, failure=asked.counts, graceful=not asked.kill, patience=asked.patience, killed=killed)
