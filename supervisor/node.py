"""A node's life: start, main loop, stop. The only place where the parts are wired.

start   run folder locked → whatever an earlier run left is ended → keeper → store → member record
loop    elector (who may act) · services · watchdog · GPU facts · keeper, each a task
stop    stand down in good order → member record away → keeper told to go
"""

import asyncio
import re
from collections import deque
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

import structlog

from election import events as e
from election.clock import Clock
from election.elector import Elector, Identity
from election.membership import MemberRecord, Membership, NameTakenError, Role
from election.phases import Holding, StandingBy, State
from election.record import Keys, timestamp
from election.requests import Requests
from election.store import LockStore, StoreError
from election.timing import LIFE, TimingError
from supervisor import proc
from supervisor.config.schema import Config
from supervisor.config.service import Log
from supervisor.earlier import end_earlier_run
from supervisor.fitness import Condition, unfit_because
from supervisor.foreign import Foreign
from supervisor.gpu.driver import DriverError, GpuDriver, GpuFacts, GpuVerdict
from supervisor.history import History
from supervisor.keeper import term as keeper_term
from supervisor.keeper.client import KeeperGone, KeeperRefused
from supervisor.keeper.link import KeeperLink
from supervisor.lockwatch import LockWatch
from supervisor.memory import FileMemory
from supervisor.remains import Remains
from supervisor.resume import resume_from
from supervisor.run_folder import RunFolder
from supervisor.service.logfile import Rotation
from supervisor.service.manager import Services
from supervisor.service.order import sidecar_log
from supervisor.service.record import Records
from supervisor.storewatch import watch_store
from supervisor.succession import Guarded, Succession
from supervisor.takeover import Progress, TakeOverError, describe
from supervisor.tenure import Outcome, Tenure
from supervisor.version import VERSION
from supervisor.watchdog.round import Watchdog

log = structlog.get_logger()

DRIVER = 10.0
"""Seconds for the driver to tell its facts; after that it counts as unresponsive."""
LOOK = 1.0
"""Seconds between looks at keeper and quarantined processes."""
RESUME = 8.0
"""Seconds for which a resumption is tried; its services run all the while."""
AGAIN = 0.2
"""Seconds between two tries of it."""
KEPT = 200
"""Events and alarms kept for the status."""


class Node:
    """One supervisor. `run` returns the exit code."""

    def __init__(self, config: Config, clock: Clock, store: LockStore, driver: GpuDriver, folder: RunFolder) -> None:
        self.config, self.clock = config, clock
        self.timing = config.election.timing
        self.keys = Keys(config.cluster)
        self.folder = folder
        self.events: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.alarms: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.takeovers: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.gpus: dict[int, GpuFacts] = {}
        self.progress = Progress()
        self._store, self._driver = store, driver
        self._gpu_trouble = "not asked yet"
        self._quarantined: tuple[proc.Identity, ...] = ()
        self._armed_until = 0.0
        self._ending = 0
        """Token of the last term whose end was begun."""
        self._to_resume: e.Term | None = None
        """An earlier run's, until the elector goes on with it."""
        self._work: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unfit: set[str] = set()
        self._registered = False
        self._exit = 0
        self._build()

    def _build(self) -> None:
        config, clock = self.config, self.clock
        cgroup = self.folder.cgroup
        self.keeper = KeeperLink(
            config.paths.run,
            cgroup,
            None if config.gid is None else str(config.gid),
            config.hardware_option,
            on_event=self._keeper_event,
            on_gone=lambda: self._succession.lost(),
        )
        self._records = Records(config.paths.run, self.folder.boot_id, self._record_trouble)
        self.services = Services(
            config.services,
            self.keeper,
            clock=clock,
            node=config.node,
            run=config.paths.run,
            log=config.paths.log,
            gpus=self.gpus,
            driver=self._driver,
            records=self._records,
            on_event=self.note,
        )
        self.watchdog = Watchdog(
            self.services,
            self._driver,
            clock=clock,
            interval=config.watchdog.interval,
            confirm=config.watchdog.confirm,
            lock_files={index: config.lock_file(index) for index in config.gpu_indexes},
            on_event=self.note,
        )
        self._remains = Remains(cgroup, config.paths.run, clock)
        self._rotation = Rotation(_logs(config), clock, self.note)
        self._lock_watch = LockWatch(config.services, self.keeper, clock, self.note, self.alarm)
        self._foreign = Foreign(config.gpu, self._driver, clock, self.note, self.alarm)
        self._tenure = Tenure(
            config,
            clock,
            self.keeper,
            self._driver,
            self.services,
            self._remains,
            self._lock_watch,
            self._foreign,
            self.note,
        )
        self._succession = Succession(self.keeper, clock, self, self._tenure, self.services, self._lock_watch)
        self._memory = FileMemory(
            config.paths.state, config.paths.run, self.folder.boot_id, self.folder.home, self.timing.ttl, self.note
        )
        identity = Identity(config.node, config.status_url, VERSION)
        delay = config.election.claim_delay
        self.elector = Elector(
            identity, self.keys, self.timing, self._store, clock, self._memory, self, claim_delay=delay
        )
        self.requests = Requests(self.keys, self._store, clock, config.node)
        self._membership = Membership(
            config.node, self.keys, self.timing, self._store, clock, self.member_record, self._store_trouble
        )
        self._history = History(self.keys, self._store, clock, config.node, self.timing.attempt)

    # --- life

    async def run(self) -> int:
        """Until told to stop (0), or another supervisor has this node's name (1)."""
        try:
            for trouble in self.folder.troubles:
                self.alarm("disk", trouble)
            await self._clean_up()
            self.spawn(self._records.run())
            self.spawn(self.services.run())
            self.spawn(self.watchdog.run())
            self.spawn(self._look_after_gpus())
            self.spawn(self._look_after_node())
            self.spawn(self._lock_watch.run())
            self.spawn(self._rotation.run())
            etcd = self.config.election.etcd
            if etcd is not None:
                self.spawn(watch_store(self._store, etcd.quota, self.clock, self.alarm))
            await self._campaign()
        finally:
            await self._stop()
        return self._exit

    def stop(self, why: str) -> None:
        """Stand down and leave. Asked again: at once."""
        if self.elector.state.leaving:
            self.fence(f"{why}, again")
        self.note(f"leaving: {why}")
        self.elector.post(e.StandDown(why, leave=True))

    async def _campaign(self) -> None:
        """Register, then campaign until the elector has left. The elector begins at once, so that the term of an
        earlier run is ended on record even while the member record waits; without a record nobody claims."""
        elector = self.spawn(self.elector.run())
        member = self.spawn(self._be_member())
        await asyncio.wait({elector, member}, return_when=asyncio.FIRST_COMPLETED)
        if not elector.done():
            error = member.exception()
            self.alarm("name-taken" if isinstance(error, NameTakenError) else "fault", str(error))
            self._exit = 1
            self.elector.post(e.StandDown(str(error), leave=True))
            await elector
        elector.result()

    async def _be_member(self) -> None:
        await self._membership.register()
        self._registered = True
        self.note(f"registered as a member; where no term has ended in good order a claim waits {self.timing.ttl} s")
        await self._membership.run()

    async def _clean_up(self) -> None:
        await self.services.remember()
        if await self._resumes():
            return
        left, self._memory.this_boot_is_gone = await end_earlier_run(
            self.folder, self.keeper, self._remains, self.clock, self.note
        )
        await self._succession.ensure()
        self._quarantine(left)
        if self._memory.this_boot_is_gone and not left:
            await asyncio.to_thread(self.folder.remove_stale_locks, self.note)

    async def _resumes(self) -> bool:
        """The term of an earlier run goes on, if the elector can refresh it (rule 15)."""
        found = await self._memory.resumable()
        await self._succession.ensure()  # and no wait from here on: what it says is what there is
        hello = self.keeper.hello
        armed = hello.get("armed")
        if not self.keeper.connected or armed is None or found is None:
            return False
        if hello["parent"] != self.folder.cgroup or self.folder.earlier_cgroup is not None:
            return False
        kept = keeper_term.Term(armed["token"], armed["deadline_ns"], hello["ending"])
        t0 = resume_from(*found, kept, self.clock.now(), self.timing)
        if t0 is None:
            return False
        self._memory.resumed_from, self._memory.this_boot_is_gone = t0, False
        self._to_resume = found[0]
        self.note(f"resuming term {armed['token']} of an earlier run, last refreshed {self.clock.now() - t0:.1f} s ago")
        return True

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._membership.leave()
        await self.keeper.leave(deadline=self.clock.now() + LIFE)
        await self._store.close()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A part of the node: if it breaks, the node cannot be trusted with a term."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, NameTakenError):
            self._exit = 1
            self.fence("a part of the supervisor broke")
            self.elector.post(e.StandDown("a part of the supervisor broke", leave=True))
            self.alarm("fault", f"a part of the supervisor broke: {error!r}")
            log.error("a part of the node broke", exc_info=error)

    # --- what the elector asks (election.elector.Host)

    def fit(self) -> bool:
        return self._registered and not self.unfit_because()

    def alive(self, now: float) -> bool:
        return now - self.services.life <= LIFE and now - self.watchdog.life <= LIFE

    async def arm(self, term: e.Term, deadline: float, *, by: float) -> None:
        try:
            await self._succession.arm(term.token, deadline, by)
        except (KeeperGone, KeeperRefused) as error:
            if self._ending == term.token and isinstance(error, KeeperRefused):
                return  # nothing of it runs any more: there is no deadline to move
            self.spawn(self._stay_out(f"the keeper did not take term {term.token}: {error}"))
            raise ConnectionError(str(error)) from error
        self._armed_until = max(self._armed_until, deadline)

    def take_over(self, term: e.Term, *, resumed: bool) -> None:
        self._set_work(self._take_over(term, resumed))

    def end_services(self, action: e.EndServices) -> None:
        self._set_work(self._end_services(action))

    def changed(self, state: State) -> None:
        self._to_resume = None
        self._membership.poke()
        phase, rows = state.phase, self.takeovers
        if isinstance(phase, Holding) and self.elector.leads() and rows and rows[-1]["work_s"] is None:
            work = rows[-1]["work_s"] = round(self.clock.now() - phase.claimed_at, 4)
            steps = describe(rows[-1]["steps"])
            self.note(f"leads with token {phase.term.token}, {work * 1000:.0f} ms after the claim was sent: {steps}")

    def alarm(self, kind: str, text: str) -> None:
        log.warning("alarm", kind=kind, text=text)
        self.alarms.append({"at": timestamp(self.clock.wall()), "kind": kind, "text": text})

    def note(self, text: str) -> None:
        log.info(text)
        add_event(self.events, timestamp(self.clock.wall()), text)

    # --- take-over and end, one at a time: the later wins

    def _set_work(self, work: Coroutine[Any, Any, None]) -> None:
        if self._work is not None:
            self._work.cancel()
        self._work = self.spawn(work)

    async def _take_over(self, term: e.Term, resumed: bool) -> None:
        progress, before = Progress(), self.elector.last_holder()
        self.progress = progress
        try:
            await (self._resume(term, progress) if resumed else self._tenure.take_over(term, progress))
        except TakeOverError as error:
            await self._stay_out(f"the {'resumption' if resumed else 'take-over'} failed at {error}")
            self.elector.post(e.TakeOverFailed(term.token, str(error)))
            return
        if resumed:
            self.note(f"term {term.token} is resumed: {describe(progress.steps)}")
            self.elector.post(e.TookOver(term.token))
            return
        row = {"token": term.token, "from": before, "at": term.began, "work_s": None, "steps": progress.steps}
        self.takeovers.append(row)
        self.elector.post(e.TookOver(term.token))
        await self._tell_history(self._history.began(term, before, progress.steps))

    async def _resume(self, term: e.Term, progress: Progress) -> None:
        """Tried for a while: what runs is not ended because a keeper was lost on the way."""
        until = self.clock.now() + RESUME
        while True:
            try:
                return await self._tenure.resume(term, progress)
            except TakeOverError as error:
                if self.clock.now() >= until:
                    raise
                self.note(f"not resumed yet: {error}")
                await self.clock.sleep_until(self.clock.now() + AGAIN)

    async def _end_services(self, action: e.EndServices) -> None:
        self.note(f"ending the services: {action.why}")
        self._ending = action.term.token
        outcome = await self._end_until_done(action)
        self._quarantine(outcome.unkillable)
        if not outcome.unkillable:
            await asyncio.to_thread(self.folder.remove_stale_locks, self.note)
        self.elector.post(e.Gone(action.term.token, outcome.proven))
        await self._tell_history(self._history.ended(action.term, action.why))

    async def _end_until_done(self, action: e.EndServices) -> Outcome:
        """A fault of our own must not leave the term half ended: the end is tried until it is done."""
        while True:
            try:
                switch_at = max(self._armed_until, self.clock.now())
                return await self._tenure.end(action.term, action.kill_at, switch_at)
            except Exception as error:
                log.exception("the end of the term broke")
                self.alarm("fault", f"ending the term failed, trying again: {error!r}")
                await self.clock.sleep_until(self.clock.now() + LOOK)

    async def _stay_out(self, because: str) -> None:
        """For one TTL: the next node goes (rule 13), and what fails at once does not spin."""
        self.alarm("staying-out", f"{because}; no claim for {self.timing.ttl} s")
        await asyncio.to_thread(self.folder.stay_out, self.clock.now() + self.timing.ttl, because)

    async def _tell_history(self, write: Coroutine[Any, Any, None]) -> None:
        try:
            await write
        except StoreError as error:
            self.note(f"the history was not written: {error}")

    def _quarantine(self, pids: Iterable[int]) -> None:
        found = (proc.identity(pid) for pid in pids)
        self._quarantined = tuple(who for who in found if who is not None)
        if self._quarantined:
            pids = [who.pid for who in self._quarantined]
            self.alarm("quarantined", f"processes {pids} survive SIGKILL; the lock files stay, this node is unfit")

    # --- the keeper

    def _keeper_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "fired":
            self.alarm("switch-fired", f"the keeper's switch ended term {event['token']}")
            self._quarantine(event["unkillable"])
            self.fence("the keeper's switch fired")
        self._lock_watch.keeper_event(event)
        self.services.keeper_event(event)

    def guarded(self) -> Guarded | None:
        """What would be without a guard if the keeper were lost now."""
        phase = self.elector.state.phase
        if not isinstance(phase, Holding):
            return Guarded(self._to_resume, adopted=False, outlives=True) if self._to_resume is not None else None
        active = phase.stage == "active"
        return Guarded(phase.term, adopted=active, outlives=active or phase.resumed)

    def fence(self, why: str) -> None:
        """End at once what runs under the term, if there is one."""
        self.elector.post(e.FenceNow(why))

    def ends(self, token: int) -> bool:
        """Has the end of this term been begun?"""
        return self._ending == token

    # --- what is looked after all the time

    async def _look_after_gpus(self) -> None:
        while True:
            now = self.clock.now()
            try:
                facts = await self._driver.facts(deadline=now + DRIVER)
                self.gpus.update({gpu.index: gpu for gpu in facts})
                self._gpu_trouble = ""
            except DriverError as error:
                self._gpu_trouble = str(error)
            if isinstance(self.elector.state.phase, Holding) and self._node_faults():
                self.elector.post(e.StandDown("; ".join(self._node_faults())))
            if self._acts():
                self.spawn(self._look_for_foreigners())
            self._membership.poke()
            await self.clock.sleep_until(now + self.config.watchdog.interval)

    async def _look_for_foreigners(self) -> None:
        try:
            await self._foreign.look(tuple(self.gpus.values()), self._is_ours)
        except OSError as error:
            self.note(f"who else is on the GPUs is not known: {error}")

    def _acts(self) -> bool:
        """It is active, and can tell its own processes from others'."""
        phase = self.elector.state.phase
        return isinstance(phase, Holding) and phase.stage == "active" and self.folder.cgroup is not None

    def _is_ours(self, pid: int) -> bool:
        """What has just ended counts as ours: it is nobody's any more."""
        path = proc.cgroup_path(pid)
        return path is None or path.startswith(f"{self.folder.cgroup}/")

    def _node_faults(self) -> list[str]:
        lost = (GpuVerdict.LOST, GpuVerdict.REBOOT_REQUIRED, GpuVerdict.NO_DRIVER)
        return [f"GPU {gpu.index} is {gpu.verdict}: {gpu.why}" for gpu in self.gpus.values() if gpu.verdict in lost]

    async def _look_after_node(self) -> None:
        while True:
            if not self.keeper.connected and not self.has_term():
                await self._succession.ensure()
            if self._quarantined:
                left = tuple(who for who in self._quarantined if proc.is_alive(who))
                if not left:
                    self.note("the quarantined processes have ended")
                self._quarantined = left
            asked = self.clock.now()
            if await self.keeper.look(deadline=asked + LIFE):
                self.services.heard_until = asked
            self._tell_fitness()
            await self.clock.sleep_until(self.clock.now() + LOOK)

    @property
    def holders(self) -> dict[int, dict[str, Any]]:
        """Who has the lock of each GPU, as far as the keeper says, and for how many seconds (`held_s`)."""
        return self._lock_watch.holders()

    def has_term(self) -> bool:
        """From the claim until the orderly end is on record or given up."""
        return hasattr(self.elector.state.phase, "term")

    def unfit_because(self) -> list[str]:
        left, because = self.folder.stay_out_left(self.clock.now())
        return unfit_because(
            Condition(
                keeper_answers=self.keeper.connected,
                keeper_trouble=self._succession.trouble,
                hardware_trouble=self._hardware_trouble(),
                weak=self.folder.cgroup is None,
                weak_allowed=self.config.allow_weak_containment,
                gpus=tuple(self.gpus.values()),
                gpu_trouble=self._gpu_trouble,
                quarantined=tuple(who.pid for who in self._quarantined),
                store_trouble=self._history_trouble(),
                timing_trouble=self._timing_trouble(),
                stuck_services=tuple(self.services.quarantined()),
                stay_out_left=left,
                stay_out_because=because,
            )
        )

    def _tell_fitness(self) -> None:
        """For the log: why no claim is made, once per reason (numbers in it change all the time)."""
        reasons = {_without_numbers(reason): reason for reason in self.unfit_because()}
        for kind in reasons.keys() - self._unfit:
            self.note(f"unfit to lead: {reasons[kind]}")
        if self._unfit and not reasons:
            self.note("fit to lead again")
        self._unfit = set(reasons)

    def _timing_trouble(self) -> str:
        hello = self.keeper.hello
        try:
            self.timing.measured(hello.get("tick_s", 0.0), hello.get("kill_s", 0.0))
        except TimingError as error:
            return str(error)
        return ""

    def _hardware_trouble(self) -> str:
        if self.config.hardware_watchdog.mode != "required" or not self.keeper.connected:
            return ""
        state = self.keeper.hello.get("hardware") or {"error": "the keeper was started without it; start it anew"}
        return str(state["error"] or "")

    def _history_trouble(self) -> str:
        phase, floor = self.elector.state.phase, self.elector.state.floor
        if not isinstance(phase, StandingBy) or phase.watched is None or phase.watched.view.revision >= floor:
            return ""
        return (
            f"the store is at revision {phase.watched.view.revision}, but by {self.config.paths.state}/floor.json "
            f"token {floor} was seen: either the store was restored or replaced, or that file is wrong"
        )

    def role(self) -> Role:
        """`leader standby unfit excluded`, as member record and status show it."""
        if self.has_term():
            return "leader"
        if self.config.node in self.elector.settings.excluded:
            return "excluded"
        return "unfit" if self.unfit_because() else "standby"

    def member_record(self) -> MemberRecord:
        """What this node says of itself in the store: no command, environment, path or user."""
        return MemberRecord(
            role=self.role(),
            boot_id=self.folder.boot_id,
            run_id=self.folder.run_id,
            ttl_s=self.timing.ttl,
            unfit_because=tuple(self.unfit_because()),
            gpus=tuple({"index": gpu.index, "uuid": gpu.uuid, "state": str(gpu.verdict)} for gpu in self.gpus.values()),
            services={row["name"]: row["state"] for row in self.services.snapshot()},
            url=self.config.status_url,
            version=VERSION,
            renewed_at=timestamp(self.clock.wall()),
            ready_for=self.elector.ready_for(),
        )

    def _record_trouble(self, text: str) -> None:
        self.alarm("record", text)

    def _store_trouble(self, text: str) -> None:
        self.alarm("store", text)


def _logs(config: Config) -> dict[str, tuple[Path, Log]]:
    """Of all services and sidecars; a sidecar's is rotated as its service's."""
    found = {}
    for name, spec in config.services.items():
        found[name] = (config.paths.log / f"{name}.log", spec.log)
        for sidecar in spec.sidecars:
            path = sidecar_log(config.paths.log, name, sidecar)
            found[path.stem] = (path, spec.log)
    return found


def add_event(events: deque[dict[str, Any]], at: str, text: str) -> None:
    """What says the same as one of the last two but for its numbers takes its place: a store that is down for an hour
    leaves room for the rest."""
    row: dict[str, Any] = {"at": at, "what": text}
    for index in range(len(events) - 1, max(-1, len(events) - 3), -1):
        before = events[index]
        if _without_numbers(before["what"]) == _without_numbers(text):
            del events[index]
            row["times"] = before.get("times", 1) + 1
            break
    events.append(row)


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9.]+", "#", text)
