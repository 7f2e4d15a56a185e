"""The keeper: one term, its services, its jobs, and the switch that ends them all at the deadline.

State is small: a ledger (term.py), the term's place, services, jobs, locks, and, while a term ends, an `_Ending`.
The loop calls `turn` after every round. Nothing waits: an ending that takes long is looked at again in the next turn,
and sockets are served meanwhile.
"""

import json
import os
import time
from collections.abc import Callable
from typing import Any

from supervisor import proc
from supervisor.keeper import kernel, left, term
from supervisor.keeper.adopt import adopt
from supervisor.keeper.hardware import Device, Hardware
from supervisor.keeper.jobs import Jobs
from supervisor.keeper.locks import Lock
from supervisor.keeper.loop import Loop, guard, log, rearm
from supervisor.keeper.notify import Notify
from supervisor.keeper.pace import KILLS_NS, Slowest
from supervisor.keeper.places import CgroupPlaces, Places, TermPlace
from supervisor.keeper.services import Process, Reply, Service, Services, is_sidecar

SWITCH_PATIENCE_NS = 400_000_000
"""How long the switch waits for emptiness before it freezes and names what is left: below the smallest distance between
switch and TTL (0.5 s, docs/election.md, Timing), so that it is told before anybody else may claim."""
_LEAST_PATIENCE_NS = 100_000_000
"""A process that was just killed needs a moment to be gone: not to be called unkillable for a `by_ns` in the past."""
_SWEEP_NS = 1_000_000_000
_ENDING_TICK_S = 0.01
_START_UP_TRIES = 100
_IDLE_TICK_S = 1.0


class _Ending:
    """A term on its way out."""

    def __init__(self, place: TermPlace | None, by_ns: int, fired: bool) -> None:
        self.place = place
        self.by_ns = by_ns
        self.fired = fired
        self.began_ns = kernel.boot_ns()
        self.killed = False
        """None of its processes can do anything any more."""
        self.waiters: list[Reply] = []


class Keeper:
    """See the module."""

    def __init__(self, run: str, places: Places, loop: Loop) -> None:
        self._file = f"{run}/keeper.json"
        self._left = left.read(self._file)
        self._loop = loop
        self.places = places
        self.weak = places.kind != "cgroup"
        self.tell: Callable[..., None] = lambda name, **fields: None
        """Sends an event to the supervisor, if there is one."""
        self.ledger = term.Ledger(over=self._left.over)
        self.place: TermPlace | None = None
        self.services = Services(loop, self._event, self.weak, self.remember)
        self.jobs = Jobs(loop, self._event, self.remember)
        self.locks: dict[int, Lock] = {}
        self._ending: _Ending | None = None
        self.leftover: list[TermPlace] = []
        """Terms that are over although something unkillable is left of them."""
        self.kill_time = Slowest(KILLS_NS)
        """From the kill of a term to the moment at which none of its processes can do anything any more."""
        self._hardware: Hardware | None = None
        self._hardware_required = False
        self.hardware_state: dict[str, Any] | None = None
        """Of the machine's watchdog, for people; None: none is used."""
        self._stale: list[int] = []
        self._swept_ns = 0
        self._timer = kernel.boot_timer()
        loop.add(self._timer, self._timer_rang)
        self.notify: Notify | None = None
        self.stopped = False
        self.home: tuple[str, int, int] | None = None
        """Path, device and inode of our control socket: by it a supervisor finds us."""

    def _event(self, name: str, **fields: Any) -> None:
        self.tell(name, **fields)

    # --- the term -----------------------------------------------------------------------------------------------

    def arm(self, token: int, deadline_ns: int) -> term.Refusal | None:
        """Start a term or move its deadline on. Raises OSError when the term's place cannot be made."""
        decided = term.arm(self.ledger, token, deadline_ns, kernel.boot_ns())
        if isinstance(decided, term.Refusal):
            return decided
        trouble = self._arm_hardware(deadline_ns)
        if trouble is not None:
            return trouble
        try:
            if self.place is None:
                self._sweep()
                if self.leftover or self._stale:
                    return term.Refusal(
                        "unkillable", f"terms {self.left_over()} are over, but processes of theirs live"
                    )
                self._enter(self.places.open_term(token))
        finally:
            if self.place is None and self._hardware is not None:
                self._hardware.disarm()
        self.ledger = decided
        kernel.set_timer(self._timer, deadline_ns)
        self.remember()
        return None

    def use_hardware(self, device: Device, required: bool) -> None:
        """The machine's watchdog watches over each term. Raises OSError where it is required and will not do."""
        self._hardware_required = required
        self.hardware_state = {"device": device.path, "timeout_s": device.timeout_s, "error": None}
        try:
            self._hardware = Hardware(device)
        except OSError as error:
            if required:
                raise
            self.hardware_state["error"] = str(error)
            log(f"{error}; going on without")

    def _arm_hardware(self, deadline_ns: int) -> term.Refusal | None:
        if self._hardware is None or self.hardware_state is None:
            return None
        try:
            self._hardware.arm(kernel.boot_ns(), deadline_ns)
            self.hardware_state["error"] = None
        except OSError as error:
            self.hardware_state["error"] = str(error)
            if self._hardware_required:
                return term.Refusal("hardware", str(error))
            log(f"{error}; going on without")
        return None

    def _enter(self, place: TermPlace) -> None:
        self.place = place
        self.services.ending = False
        if place.events is not None:
            events = place.events
            self._loop.add(events, lambda _: rearm(events), _PRI)

    def _adopt(self) -> None:
        """The term of an earlier keeper of this boot that was killed: it goes on with its deadline."""
        was = self._left
        if was.token <= was.over or was.deadline_ns <= kernel.boot_ns() or not isinstance(self.places, CgroupPlaces):
            return
        place = self.places.reopen(was.token)
        if place is not None:
            self.ledger = self.ledger._replace(term=term.Term(was.token, was.deadline_ns))
            kernel.set_timer(self._timer, was.deadline_ns)
            self._arm_hardware(was.deadline_ns)
            self._enter(place)
            self.locks = adopt(place, was, self.services, self.jobs)
            log(f"term {was.token} goes on: adopted {sorted(self.services.all)}")
            self.remember()

    def begin_end(self, token: int, by_ns: int, reply: Reply) -> None:
        """End a term; the reply comes when nothing of it is left, or at `by_ns`."""
        decided = term.begin_end(self.ledger, token)
        if isinstance(decided, term.Refusal):
            reply(decided.error, decided.message)
            return
        if self._ending is None and decided.term is not None:
            self._start_ending(decided, by_ns, fired=False)
        elif self._ending is None:
            self.ledger = decided
            self.remember()
            pids = self._leftover_pids()
            reply(None, "", clean=not pids, unkillable=pids, took_ms=0)
            return
        if self._ending is not None:
            least = self._ending.began_ns + _LEAST_PATIENCE_NS
            self._ending.by_ns = max(least, min(self._ending.by_ns, by_ns))
            self._ending.waiters.append(reply)

    def _start_ending(self, decided: term.Ledger, by_ns: int, fired: bool) -> None:
        self.ledger = decided
        self.services.ending = True
        kernel.set_timer(self._timer, None)
        self._ending = _Ending(self.place, by_ns, fired)
        if self.place is not None:
            guard(self.place.kill)
        guard(self.places.shut)
        self.remember()

    def _timer_rang(self, _: int) -> None:
        try:
            os.read(self._timer, 8)
        except BlockingIOError:
            return

    # --- turns --------------------------------------------------------------------------------------------------

    def tick_s(self) -> float:
        """How long the loop may sleep when nothing happens."""
        soon = self._ending is not None or (self.notify is not None and self.notify.resting())
        if soon or self._hardware is None or self.ledger.term is None:
            return _ENDING_TICK_S if soon else _IDLE_TICK_S
        return min(_IDLE_TICK_S, self._hardware.wait_s(kernel.boot_ns(), self.ledger.term.deadline_ns))

    def turn(self) -> None:
        """After every round of the loop: the switch, the ending under way, the slow checks."""
        now = kernel.boot_ns()
        if self.notify is not None:
            self.notify.turn(now)
        if self._hardware is not None and self.ledger.term is not None:
            guard(self._hardware.turn, now, self.ledger.term.deadline_ns)
        if term.switch_due(self.ledger, now) and self.ledger.term is not None:
            decided = term.begin_end(self.ledger, self.ledger.term.token)
            if isinstance(decided, term.Ledger):
                self._start_ending(decided, now + SWITCH_PATIENCE_NS, fired=True)
        if self._ending is not None:
            guard(self._step, self._ending, now)
        if self.weak or now - self._swept_ns >= _SWEEP_NS:
            guard(self.services.look_at_all)
            guard(self.jobs.look_at_all)
        if now - self._swept_ns >= _SWEEP_NS and self._ending is None:
            guard(self._sweep)

    def _step(self, ending: _Ending, now_ns: int) -> None:
        place = ending.place
        populated = place is not None and place.populated()
        guard(self._measure, ending, populated)
        step = term.end_step(populated, now_ns, ending.by_ns)
        if step == "remove" and place is not None:
            self._unwatch(place)
            if not place.discard():  # something entered between the look and the removal
                step = "wait" if now_ns < ending.by_ns else "freeze"
        if step == "wait" and place is not None:
            place.kill()
        elif step == "freeze" and place is not None:
            place.kill()
            self._finish(ending, place, place.freeze())
        elif step == "remove":
            self._finish(ending, None, [])

    def _measure(self, ending: _Ending, populated: bool) -> None:
        if not ending.killed:
            pids = ending.place.pids() if ending.place is not None and populated else []
            ending.killed = all(map(proc.is_over, pids))
            now = kernel.boot_ns()
            self.kill_time.add(now - ending.began_ns, now)

    def _finish(self, ending: _Ending, left: TermPlace | None, pids: list[int]) -> None:
        over = self.ledger.term
        self._ending = None
        self.place = None
        self.ledger = term.finish_end(self.ledger)
        if self._hardware is not None:
            guard(self._hardware.disarm)
        if left is not None:
            self.leftover.append(left)
        self._forget(left is None)
        result = {
            "clean": not pids,
            "unkillable": pids,
            "pending": all(proc.kill_pending(pid) for pid in pids),
            "took_ms": round((kernel.boot_ns() - ending.began_ns) / 1e6, 3),
        }
        log(f"term {over.token if over else '?'} is over: {json.dumps(result)}")
        for reply in ending.waiters:
            reply(None, "", **result)
        if ending.fired and over is not None:
            self.tell("fired", token=over.token, **result)

    def _forget(self, removed: bool) -> None:
        """Services, jobs and locks of a term that is over; whatever fails here, the term is over."""
        guard(lambda: self.services.drop_all(term_removed=removed))
        guard(lambda: self.jobs.drop_all(term_removed=removed))
        guard(self._drop_locks)

    def _drop_locks(self) -> None:
        """Forget lock files, those excepted that something unkillable still holds."""
        kept = {service.lock.gpu for service in self.services.all.values() if service.lock is not None}
        kept |= {job.lock.gpu for job in self.jobs.all if job.lock is not None}
        for gpu in [gpu for gpu in self.locks if gpu not in kept]:
            self.locks.pop(gpu).close()

    def _unwatch(self, place: TermPlace) -> None:
        self._loop.remove(place.events)
        for service in self.services.all.values():
            self._loop.remove(None if service.box is None else service.box.events)

    def _sweep(self) -> None:
        self._swept_ns = kernel.boot_ns()
        self.jobs.drop_idle()
        if self.ledger.term is None and not self.leftover and not self._at_home():
            log("our socket is gone or replaced, so nobody can find us; nothing runs: leaving")
            self.stopped = True
        for place in list(self.leftover):
            if place.populated():
                continue
            self._unwatch(place)
            if place.discard():
                self.leftover.remove(place)
                self._forget(True)
                self.tell("cleared", token=place.token)
        keep = [place.token for place in self.leftover]
        if self.place is not None:
            keep.append(self.place.token)
        found = self.places.sweep(keep)
        if found:
            log(f"folders of terms that are over: {found}")
        if max(found, default=0) > self.ledger.over and self.place is None:
            self.ledger = self.ledger._replace(over=max(found))
            self.remember()
        self._stale = self.places.sweep(keep) if found else []

    def _at_home(self) -> bool:
        if self.home is None:
            return True
        path, device, inode = self.home
        try:
            found = os.stat(path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (device, inode)

    def left_over(self) -> list[int]:
        """Tokens of terms that are over although something of them lives."""
        return sorted({place.token for place in self.leftover} | set(self._stale))

    def _leftover_pids(self) -> list[int]:
        return sorted(pid for place in self.leftover for pid in place.freeze())

    def hear(self, path: str) -> None:
        """Services may notify us at this path from now on. Raises OSError."""
        self.notify = Notify(path, self._loop, self.services, self._event)

    def start_up(self) -> None:
        """A new keeper: the term of an earlier one goes on if it may; all else below its parent ends now."""
        guard(self._adopt)
        for _ in range(_START_UP_TRIES):
            guard(self._sweep)
            if not self._stale:
                break
            time.sleep(_ENDING_TICK_S)
        if self.place is None:
            guard(self.places.shut)

    def remember(self) -> None:
        """For the next keeper, should this one be killed."""
        guard(left.write, self._file, self._to_leave())

    def _to_leave(self) -> left.Left:
        over, armed = self.ledger.over, self.ledger.term
        if armed is None or armed.ending or self.weak:
            return left.Left(over)
        services = {
            name: left.LeftService(_left(service), service.since_ns, _left_sidecars(service))
            for name, service in self.services.all.items()
            if service.pid and service.hear is None
        }
        boxes = {id(service.lock): service.box for service in self.services.all.values()}
        boxes |= {id(job.lock): job.box for job in self.jobs.all}
        locks = {}
        for gpu, lock in self.locks.items():
            box = None if lock.holder is None else boxes.get(id(lock))
            locks[gpu] = left.LeftLock(
                lock.path, lock.inode, lock.holder, None if box is None else box.cgroup, lock.taken_ns
            )
        return left.Left(over, armed.token, armed.deadline_ns, services, locks)


def _left(process: Process) -> left.LeftProcess:
    return left.LeftProcess(process.pid, process.start_ticks, process.ready)


def _left_sidecars(service: Service) -> dict[str, left.LeftProcess]:
    return {unit: _left(process) for unit, process in service.units.items() if is_sidecar(unit) and process.running}


_PRI = 2  # select.EPOLLPRI
