"""What this node does with a term: the steps of the take-over, and the end of everything that ran under it.

`end` is built so that calling it again, with an earlier moment, is always right: every part may be repeated.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from election.clock import Clock
from election.events import Term
from supervisor import mutex
from supervisor.config.schema import Config
from supervisor.foreign import Foreign
from supervisor.gpu.driver import GpuDriver, GpuFacts
from supervisor.keeper.client import KeeperGone, KeeperRefused
from supervisor.keeper.link import KeeperLink
from supervisor.lockwatch import LockWatch
from supervisor.remains import Remains
from supervisor.service.manager import Services
from supervisor.takeover import RESET, Progress, Step, run_steps

CALL = 2.0
"""Seconds for a call of the keeper that does not wait for processes to end."""
LOOK = 2.0
"""Seconds for a driver that is asked in passing."""
KILL = 5.0
"""Seconds from SIGKILL to empty where no authority is at stake (docs/services.md)."""
SETTLE = 0.2
"""Seconds for the services to take note that their term is over, so that the next one finds them ready."""
NEVER = float("inf")


@dataclass(frozen=True)
class Outcome:
    """How a term ended on this node."""

    unkillable: tuple[int, ...]
    """Processes that SIGKILL cannot end yet: frozen, their lock files kept, the node quarantined (rule 11)."""
    proven: bool
    """Nothing can have got away: there are cgroups, or the keeper was there to see its children end."""


class Tenure:
    """One node's terms, one at a time."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        keeper: KeeperLink,
        driver: GpuDriver,
        services: Services,
        remains: Remains,
        lock_watch: LockWatch,
        foreign: Foreign,
        note: Callable[[str], None],
    ) -> None:
        self._config, self._clock, self._keeper, self._driver = config, clock, keeper, driver
        self._services, self._remains, self._lock_watch, self._note = services, remains, lock_watch, note
        self._foreign = foreign
        self._facts: tuple[GpuFacts, ...] = ()

    # --- take-over

    async def take_over(self, term: Term, progress: Progress) -> None:
        """Raises `TakeOverError`; what was begun by then is ended by `end`."""
        steps = [
            Step("gpu-state", self._look_at_gpus, limit=10.0),
            Step("reset", self._reset, limit=RESET, counted=False),
            Step("persistence", self._persistence, limit=20.0),
            Step("foreign-processes", self._no_foreigners, limit=15.0),
            Step("lock-files", lambda by: self._make_locks(term, by), limit=5.0),
            Step("services", lambda by: self._services.launch(term.token, deadline=by), limit=15.0),
        ]
        await run_steps(steps, self._clock, progress)

    async def resume(self, term: Term, progress: Progress) -> None:
        """Go on with what an earlier run of this supervisor began. Raises `TakeOverError` as `take_over` does."""
        steps = [
            Step("gpu-state", self._look_if_it_answers, limit=10.0),
            Step("lock-files", lambda by: self._keep_locks(term, by), limit=5.0),
            Step("services", lambda by: self.adopt(term, by), limit=15.0),
        ]
        await run_steps(steps, self._clock, progress)

    async def keeper_replaced(self, term: Term, by: float) -> None:
        """A new keeper goes on with this term; raises as `adopt` does."""
        await self._give_locks(term, self._lock_watch.locks, by)
        await self.adopt(term, by)

    async def adopt(self, term: Term, by: float) -> None:
        """What the keeper has of this term is ours: its services, and who holds which lock. Raises KeeperGone,
        KeeperRefused, TimeoutError."""
        hello = await self._keeper.call("hello", deadline=by)
        if (hello["armed"] or {}).get("token") != term.token or hello["ending"]:
            raise KeeperGone(f"the keeper does not have term {term.token} any more")
        self._lock_watch.keeper_says(hello["held"])
        await self._services.adopt(term.token, hello["services"], hello["held"], deadline=by)

    async def _look_at_gpus(self, by: float) -> None:
        self._facts = await self._driver.facts(deadline=by)
        faults = [f"GPU {gpu.index} is {gpu.verdict}: {gpu.why}" for gpu in self._facts if gpu.verdict.node_fault]
        if faults:
            raise RuntimeError("; ".join(faults))

    async def _look_if_it_answers(self, by: float) -> None:
        """A driver that is slow just now is no reason to end what runs; it is none while a term goes on, either."""
        try:
            await self._look_at_gpus(min(by, self._clock.now() + LOOK))
        except Exception as error:  # noqa: BLE001 - whatever it is, the services run, and the node looks again
            self._note(f"the GPUs cannot be read just now: {error}")

    async def _reset(self, by: float) -> None:
        needed = [gpu for gpu in self._facts if gpu.verdict.wants_reset]
        for gpu in needed:
            self._note(f"GPU {gpu.index} is {gpu.verdict}: resetting it")
            await self._driver.reset(gpu.uuid, deadline=by)
        if needed:
            await self._look_at_gpus(by)

    async def _persistence(self, by: float) -> None:
        await self._driver.ensure_persistence(deadline=by)

    async def _no_foreigners(self, by: float) -> None:
        await self._foreign.clear(self._facts, by=by)

    async def _make_locks(self, term: Term, by: float) -> None:
        await self._hand_over_locks(term, by, kept=())

    async def _keep_locks(self, term: Term, by: float) -> None:
        hello = await self._keeper.call("hello", deadline=by)
        await self._hand_over_locks(term, by, kept=hello["locks"])

    async def _hand_over_locks(self, term: Term, by: float, kept: Sequence[int]) -> None:
        locks = await asyncio.to_thread(self._create_lock_files, term, kept)
        await self._give_locks(term, locks, by)
        self._lock_watch.begin(locks)

    async def _give_locks(self, term: Term, locks: Mapping[int, mutex.LockFile], by: float) -> None:
        entries = [{"gpu": index, "path": str(lock.path)} for index, lock in locks.items()]
        fds = [lock.fd for lock in locks.values()]
        await self._keeper.call("locks", deadline=by, fds=fds, token=term.token, locks=entries)

    def _create_lock_files(self, term: Term, kept: Sequence[int]) -> dict[int, mutex.LockFile]:
        """`kept`: GPUs whose lock file the keeper has already, from an earlier run of this supervisor."""
        made: dict[int, mutex.LockFile] = {}
        try:
            for index in self._config.gpu_indexes:
                path = self._config.lock_file(index)
                if index in kept:
                    made[index] = mutex.adopt(path)
                    continue
                made[index] = mutex.create(
                    path, token=term.token, node=self._config.node, gid=self._config.gid, note=self._note
                )
        except BaseException:
            for lock in made.values():
                lock.remove()
            raise
        return made

    # --- the end

    async def end(self, term: Term, kill_at: float | None, switch_at: float) -> Outcome:
        """Services, then the term's cgroup, then the lock files. Returns when nothing of the term can run any more, and
        keeps at it until then. `kill_at` and `switch_at` (when the keeper ends everything by itself) are boot-time
        seconds; `kill_at` None: no authority is at stake."""
        if kill_at is None:
            await self._services.stop_all(by=NEVER, graceful=True)
            outcome = await self._end_term(term.token, self._clock.now() + KILL, CALL)
            if not outcome.unkillable:
                self._services.term_over()
        else:
            outcome = await self._fence(term.token, kill_at, switch_at)
        if not outcome.unkillable:
            await self._remove_locks()
        return outcome

    async def _fence(self, token: int, kill_at: float, switch_at: float) -> Outcome:
        """On our own schedule, whatever the keeper does: at `kill_at` the term's cgroup is killed by ourselves, and the
        keeper is waited for no longer than the switch allows (rule 16)."""
        now = self._clock.now()
        stopping = asyncio.create_task(self._services.stop_all(by=kill_at, graceful=kill_at > now))
        try:
            await asyncio.wait({stopping}, timeout=max(0.0, kill_at - now))
            self._remains.strike(token)
            now = self._clock.now()
            by = max(now, min(now + KILL, switch_at))
            outcome = await self._end_term(token, by, min(CALL, (by - now) / 2))
            if not outcome.unkillable:
                self._services.term_over()
                await asyncio.wait({stopping}, timeout=SETTLE)
            return outcome
        finally:
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)

    async def _end_term(self, token: int, by: float, patience: float) -> Outcome:
        """By the keeper, if it answers within `patience` seconds; without it, by ourselves. What SIGKILL has not ended
        at `by` is named."""
        now = self._clock.now()
        tell_by = min(by, now + 0.8 * patience)  # what it cannot end it names before we stop waiting
        try:
            answer = await self._keeper.call("end", deadline=now + patience, token=token, by_ns=int(tell_by * 1e9))
            if answer["clean"]:
                return Outcome((), proven=True)
        except (KeeperGone, KeeperRefused, TimeoutError) as error:
            self._note(f"the keeper did not end the term ({error}); ending it without")
            left = await self._remains.end(token, by=by)
            return Outcome(left, proven=not self._remains.weak)
        left = await self._remains.end(token, by=by) if not self._remains.weak else tuple(answer["unkillable"])
        return Outcome(left, proven=True)

    async def _remove_locks(self) -> None:
        await asyncio.to_thread(_remove, await self._lock_watch.end())


def _remove(locks: list[mutex.LockFile]) -> None:
    for lock in locks:
        with contextlib.suppress(OSError):
            lock.remove()
