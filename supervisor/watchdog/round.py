"""The rounds of the watchdog: look, decide, look again where something is suspected, act.

It never kills on one look, on something it could not read, or after a gap in its own time: a supervisor that was
stopped or starved for a while knows nothing, and skips (gpu-facts, "Alive but not holding the GPU").
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from election.clock import Clock
from supervisor import proc
from supervisor.gpu.aside import Aside, StillStuckError
from supervisor.gpu.driver import DriverError, GpuDriver
from supervisor.service.manager import Services
from supervisor.service.runner import Runner
from supervisor.service.states import ALIVE, State
from supervisor.watchdog.snapshot import ServiceSeen, Target, Who, look
from supervisor.watchdog.verdict import History, Kind, Rules, Verdict, decide, forget_suspicions, offenders

LIFE_EVERY = 0.5
"""Seconds between signs of life (rule 4 asks for one in 2 s)."""
LOOK_LIMIT = 5.0
"""Seconds for one look; a look that takes longer is left behind, and nothing is concluded from it."""
OVERSLEPT = 2.0
"""Seconds by which our own loop may be late (rule 18) before what it saw is worth nothing."""
TERM_WAIT = 10.0
"""Seconds from SIGTERM to SIGKILL for a process with the device and without its mutex (docs/services.md)."""
ACTIONS = {Kind.DEAD, Kind.ZOMBIE, Kind.D_STATE, Kind.EMPTY, Kind.LOST_GPU, Kind.NO_GPU}
"""Verdicts that end at once in SIGKILL of the cgroup and a restart: a process stuck on the GPU answers no SIGTERM."""

ASKED_FIRST = {Kind.LONG_SECTION, Kind.SILENT, Kind.NOT_ALIVE}
"""Verdicts that end in SIGTERM, TERM_WAIT, SIGKILL and a restart."""


class Watchdog:
    """See above."""

    def __init__(
        self,
        services: Services,
        driver: GpuDriver,
        *,
        clock: Clock,
        interval: float,
        confirm: float,
        lock_files: Mapping[int, Path],
        on_event: Callable[[str], None],
    ) -> None:
        """`interval` and `confirm` in seconds; `lock_files` by GPU index. `on_event` gets a sentence per finding."""
        self.life = clock.now()
        """Boot-time seconds of the last sign of life of `run`."""
        self.verdicts: list[Verdict] = []
        """Of the last look, healthy ones too."""
        self.rounds = 0
        """Completed ones."""
        self.skipped = 0
        """Rounds that were not held, or not finished, because we had overslept."""
        self._services = services
        self._driver = driver
        self._clock = clock
        self._interval = interval
        self._rules = Rules(confirm=confirm, stuck_for=interval)
        self._lock_files = lock_files
        self._tell = on_event
        self._history: History = {}
        self._lane = Aside("watchdog")
        self._due = clock.now()
        self._actions: set[asyncio.Task[None]] = set()
        self._chased: set[Who] = set()

    async def run(self) -> None:
        """Rounds until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._show_life())
                tasks.create_task(self._rounds())
        finally:
            for action in self._actions:
                action.cancel()
            await asyncio.gather(*self._actions, return_exceptions=True)

    async def round(self) -> list[Verdict]:
        """One round: a look, a second one after `confirm` if anything is suspected, then the actions."""
        began = self._clock.now()
        verdicts = await self._look(frozenset())
        if not verdicts or all(verdict.kind in {Kind.HEALTHY, Kind.UNKNOWN} for verdict in verdicts):
            return verdicts
        listed = asyncio.ensure_future(self._listed(began + max(self._rules.confirm, OVERSLEPT)))
        again = self._clock.now() + self._rules.confirm
        await self._sleep_until(again)
        pids = listed.result() if listed.done() else frozenset[int]()
        listed.cancel()
        if self._overslept(again):
            return []
        verdicts = await self._look(pids)
        for verdict in verdicts:
            if verdict.kind not in {Kind.HEALTHY, Kind.UNKNOWN} and verdict.confirmed:
                await self._act(verdict)
        return verdicts

    # Time.

    async def _rounds(self) -> None:
        while True:
            planned = self._clock.now() + self._interval
            await self._sleep_until(planned)
            if self._overslept(planned):
                continue
            try:
                await self.round()
            except Exception as error:  # noqa: BLE001 - the edge of the task: the next round comes all the same
                self._tell(f"watchdog: a round broke: {type(error).__name__}: {error}")
            self.rounds += 1

    async def _sleep_until(self, when: float) -> None:
        self._due = when + OVERSLEPT
        await self._clock.sleep_until(when)
        self._due = self._clock.now() + LOOK_LIMIT + OVERSLEPT

    async def _show_life(self) -> None:
        """Only while what is under way is within its time: a round that hangs must cost the lease (rule 4)."""
        while True:
            if self._clock.now() <= self._due:
                self.life = self._clock.now()
            await asyncio.sleep(LIFE_EVERY)

    def _overslept(self, planned: float) -> bool:
        late = self._clock.now() - planned
        if late <= OVERSLEPT:
            return False
        self.skipped += 1
        self._history = forget_suspicions(self._history)
        self._tell(f"watchdog: {late:.1f} s late, so this round is skipped: what happened meanwhile is unknown")
        return True

    # Looking.

    async def _look(self, listed: frozenset[int]) -> list[Verdict]:
        seen = await self._see([runner for runner in self._services.runners.values() if runner.state in ALIVE])
        if seen is None:
            return []
        self.verdicts, self._history = decide(seen, self._history, self._rules, now=self._clock.now(), listed=listed)
        return self.verdicts

    async def _see(self, runners: list[Runner]) -> list[ServiceSeen] | None:
        """What is there of these services. None: nothing can be said."""
        began = self._clock.now()
        targets = [target for runner in runners if (target := self._target(runner)) is not None]
        try:
            seen = await self._lane.read(lambda: look(targets), deadline=began + LOOK_LIMIT)
        except StillStuckError as error:
            self._tell(f"{error}: nothing is concluded from this round")
            self._history = forget_suspicions(self._history)
            return None
        if self._overslept(began + LOOK_LIMIT):
            return None
        await asyncio.sleep(0)  # what the keeper told while we looked
        for service in seen:
            pids = {process.who[0] for process in service.processes}
            self._services.runners[service.target.name].said.forget_all_but(pids)
        return [self._with_jobs(service, began) for service in seen if self._is_current(service.target)]

    def _target(self, runner: Runner) -> Target | None:
        footprint, gpu = runner.hand.footprint, runner.spec.gpu
        if footprint is None or runner.pid is None or runner.started_at is None:
            return None
        facts = None if gpu is None else self._services.gpus.get(gpu)
        said, whole_since = runner.said, self._services.lost_at  # what was said before that may have been lost
        heard = said.heard_at if runner.state is not State.STARTING else None
        return Target(
            name=runner.name,
            footprint=footprint,
            started_at=runner.started_at,
            gpu=gpu,
            device=None if facts is None else facts.device,
            lock_file=None if gpu is None else self._lock_files.get(gpu),
            needs_device=runner.spec.needs_gpu_fd,
            start_grace=runner.spec.start_grace,
            has_mutex=runner.hand.holds_lock,
            sections={key: since for key, since in said.sections.items() if since > whole_since},
            max_section=runner.spec.max_gpu_section,
            heard_at=None if heard is None or heard <= whole_since else heard,
            heartbeat=runner.spec.heartbeat,
            not_alive=runner.not_alive,
            heard_until=self._services.heard_until,
        )

    def _is_current(self, target: Target) -> bool:
        """Its run did not end while we looked."""
        runner = self._services.runners[target.name]
        return runner.state in ALIVE and runner.hand.footprint is target.footprint

    def _with_jobs(self, service: ServiceSeen, since: float) -> ServiceSeen:
        gpu = service.target.gpu
        mutex = gpu is not None and self._services.lines[gpu].held_by(service.target.name, since)
        return replace(service, job_mutex=mutex)

    async def _listed(self, deadline: float) -> frozenset[int]:
        """PIDs that the driver lists. Nobody waits for it: what it has not said by the second look does not count."""
        try:
            facts = await self._driver.facts(deadline=deadline)
        except DriverError:
            return frozenset()
        return frozenset(pid for gpu in facts for pid in gpu.pids or ())

    # Acting.

    async def _act(self, verdict: Verdict) -> None:
        self._tell(f"watchdog: {verdict.service}: {verdict.kind.value}: {verdict.evidence}")
        if verdict.kind in ACTIONS:
            why = f"{verdict.kind.value}: {verdict.evidence}"
            spec = self._services.runners[verdict.service].spec
            resets = verdict.kind is not Kind.LOST_GPU or spec.container is None  # nvidia-container-toolkit 48
            await self._services.restart(verdict.service, why, kill=True, resets=resets, pid=verdict.main[0])
            return
        if verdict.kind in ASKED_FIRST:
            why = f"{verdict.kind.value}: {verdict.evidence}"
            restart = self._services.restart
            await restart(verdict.service, why, kill=False, patience=TERM_WAIT, pid=verdict.main[0])
            return
        for who in verdict.offenders:
            if who not in self._chased:
                self._chased.add(who)
                self._start(self._chase(verdict.service, who))

    def _start(self, action: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(action)
        self._actions.add(task)
        task.add_done_callback(self._actions.discard)

    async def _chase(self, name: str, who: Who) -> None:
        """SIGTERM, patience, SIGKILL, each to exactly this process and only while it still is in the wrong."""
        pidfd = None
        try:
            pidfd = proc.open_pidfd(*who)
            if pidfd is None or not await self._offends(name, who):
                return
            self._tell(f"watchdog: {name}: SIGTERM to {who[0]}, which has the GPU without its mutex")
            proc.send(pidfd, signal.SIGTERM)
            if await self._ends(pidfd) or not await self._offends(name, who):
                return
            self._tell(f"watchdog: {name}: SIGKILL to {who[0]}, which did not end in {TERM_WAIT:g} s")
            proc.send(pidfd, signal.SIGKILL)
        except OSError as error:
            self._tell(f"watchdog: {name}: {who[0]} has the GPU without its mutex, and cannot be looked at: {error}")
        finally:
            self._chased.discard(who)
            if pidfd is not None:
                os.close(pidfd)

    async def _offends(self, name: str, who: Who) -> bool:
        seen = await self._see([self._services.runners[name]])
        return bool(seen) and any(who in offenders(service) for service in seen or ())

    async def _ends(self, pidfd: int) -> bool:
        """Whether it ends within TERM_WAIT: a pidfd becomes readable then (pidfd_open(2))."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        try:
            async with asyncio.timeout_at(self._clock.now() + TERM_WAIT):
                await ended.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(pidfd)
        return True
