"""All services of one node, over its terms: launched together, told what the keeper sees, stopped together.

It does not decide whether this node may run anything: the token of each start says under which term, and the keeper
refuses what is over. Nor does it watch devices (supervisor.watchdog): it is told to restart what is broken.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from election.clock import Clock
from supervisor.config.service import Service
from supervisor.gpu.driver import GpuDriver, GpuFacts
from supervisor.keeper.client import KeeperGone, KeeperRefused
from supervisor.keeper.protocol import LOOK
from supervisor.service.footprint import Footprint
from supervisor.service.hand import CALL_LIMIT, Keeper, Shared
from supervisor.service.line import Line
from supervisor.service.messages import Drain, Emptied, Exited, Look, Reset, Restart, Stop
from supervisor.service.order import Surroundings
from supervisor.service.record import Record, Records
from supervisor.service.requests import Act, Decision, Seen, Verb, decide
from supervisor.service.runner import KILL_WAIT, Runner
from supervisor.service.states import ALIVE, State

LIFE_EVERY = 0.5
"""Seconds between signs of life. The lease is refreshed only if the last one is younger than 2 s (rule 4)."""
AFTER_KILL = 0.5
"""Seconds that a stop waits, after its kill, to see everything empty: a kill takes 15 ms, a dump of memory longer."""
SETTLE = 0.5
"""Seconds that an operator's request waits for the first change of state that follows from it."""
STRANGER_GRACE = 10.0
"""Seconds from SIGTERM to SIGKILL for a service that is no longer configured."""
SERVING = frozenset({State.RUNNING, State.UNREADY, State.DRAINING})
"""Once ready: others that start after it need not wait any more."""
ASK = 2.5
"""Seconds that a launch waits for one whose env_file or log does not answer; normally milliseconds."""
NEVER = float("inf")


class Services:
    """See above."""

    def __init__(
        self,
        specs: Mapping[str, Service],
        keeper: Keeper,
        *,
        clock: Clock,
        node: str,
        run: Path,
        log: Path,
        gpus: Mapping[int, GpuFacts],
        driver: GpuDriver,
        records: Records,
        on_event: Callable[[str], None],
    ) -> None:
        """`gpus` by index. `on_event` gets a sentence for each change of state and each trouble."""
        self.life = clock.now()
        """Boot-time seconds of the last sign of life of `run`."""
        self.clock = clock
        self.gpus = gpus
        self.lines = {
            index: Line() for index in {*gpus, *(spec.gpu for spec in specs.values() if spec.gpu is not None)}
        }
        self.lost_at = -NEVER
        """When messages of services were last lost: too many came, or the keeper was replaced (boot-time seconds)."""
        self.heard_until = NEVER
        """Whatever was said before this moment is known: the keeper answered a question sent then."""
        self._tell = on_event
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._token: int | None = None
        """Of the term under which services are started, from its launch until all are stopped."""
        shared = Shared(
            keeper=keeper,
            clock=clock,
            where=Surroundings(node, run, log),
            gpus=gpus,
            driver=driver,
            lines=self.lines,
            keep=records.put,
            missing=self._missing,
            lost_at=lambda: self.lost_at,
            wake=self._wake,
            tell=on_event,
        )
        self._records, self._keeper = records, keeper
        self._remembered: dict[str, Record | None] = {}
        self._strangers: set[asyncio.Task[None]] = set()
        self.runners = {name: Runner(name, spec, shared) for name, spec in specs.items()}

    async def remember(self) -> None:
        """What an earlier run of this supervisor knew of the services, in this boot. Once, before anything else."""
        for name, runner in self.runners.items():
            self._remembered[name] = record = await asyncio.to_thread(self._records.load, name)
            if record is not None:
                runner.remember(record)

    async def adopt(
        self,
        token: int,
        found: Mapping[str, Mapping[str, Any]],
        held: Iterable[Mapping[str, Any]],
        *,
        deadline: float,
    ) -> None:
        """Go on with the services that the keeper has (`hello`: `services`, `held`), whether an earlier run of this
        supervisor or an earlier keeper started them; launch the others. Raises as `launch` does."""
        for line in self.lines.values():
            line.holder = None
        for row in held:
            self._taken(row["gpu"], row["holder"])
        for name, entry in found.items():
            runner = self.runners.get(name)
            if runner is None:
                task = asyncio.create_task(self._end_stranger(name, Footprint.of(entry)), name=f"stranger-{name}")
                self._strangers.add(task)
                task.add_done_callback(self._strangers.discard)
            elif not runner.lives:
                self._adopt(runner, token, entry)
        for name, runner in self.runners.items():
            if runner.lives:
                runner.look_again(found.get(name))
        await self._launch([runner for runner in self.runners.values() if not runner.lives], token, deadline)

    def _adopt(self, runner: Runner, token: int, entry: Mapping[str, Any]) -> None:
        name, before = runner.name, self._remembered.get(runner.name)
        runner.adopt(token, Footprint.of(entry), entry)
        self._tasks[name] = asyncio.create_task(runner.live(), name=f"service-{name}")
        if before is not None and before.spec != runner.spec_hash:
            self._tell(f"{name}: its configuration has changed: `gpuward service restart {name}` applies it")

    async def _end_stranger(self, name: str, footprint: Footprint) -> None:
        """A service of an earlier run that is no longer configured."""
        self._tell(f"{name}: runs although it is no longer configured: asked to end")
        for op, patience in (("signal", STRANGER_GRACE), ("kill", KILL_WAIT), ("remove", 0.0)):
            now = self.clock.now()
            fields = {"signal": int(signal.SIGTERM)} if op == "signal" else {}
            with contextlib.suppress(KeeperGone, KeeperRefused):
                await self._keeper.call(op, deadline=now + CALL_LIMIT, service=name, **fields)
            while not footprint.empty() and self.clock.now() < now + patience:
                await self.clock.sleep_until(self.clock.now() + LIFE_EVERY)
        self._tell(f"{name}: {'survives SIGKILL' if not footprint.empty() else 'has ended'}")

    async def launch(self, token: int, *, deadline: float) -> None:
        """Start every service under this term, in parallel; return when the keeper has been asked about each, after ASK
        or at `deadline` (boot-time seconds) at the latest.

        One that an operator stopped stays stopped. A service that fails, hangs, or waits for a lock does not fail the
        launch. Raises KeeperRefused or KeeperGone where the keeper starts nothing at all.
        """
        await self._launch(list(self.runners.values()), token, deadline)

    async def _launch(self, runners: list[Runner], token: int, deadline: float) -> None:
        self._token = token
        by_priority = sorted(runners, key=lambda runner: -runner.spec.priority)
        asked = [runner for runner in by_priority if self._begin(runner, token)]
        await self._until_asked(asked, min(deadline, self.clock.now() + ASK))
        for runner in asked:
            if not runner.asked.is_set():
                self._tell(f"{runner.name}: is still being started; the others do not wait for it")
            if runner.hand.refusal is not None:
                raise runner.hand.refusal

    async def _until_asked(self, runners: list[Runner], deadline: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                for runner in runners:
                    await runner.asked.wait()

    def _begin(self, runner: Runner, token: int) -> bool:
        """False: it is not started under this term, and the reason has been told."""
        task = self._tasks.get(runner.name)
        if runner.held or (task is not None and not task.done()) or not runner.prepare(token):
            self._tell(f"{runner.name}: not started under token {token}: still {runner.state.value}: {runner.why}")
            return False
        self._tasks[runner.name] = asyncio.create_task(runner.live(), name=f"service-{runner.name}")
        return True

    async def stop_all(self, *, by: float, graceful: bool) -> None:
        """SIGTERM to all (if graceful), kill at each `stop_timeout` or at `by`, whichever comes first.

        Returns when nothing is left, at the latest AFTER_KILL after `by` (boot-time seconds; infinite: when what
        survives SIGKILL is quarantined); who is then still there is in `snapshot`. Nothing starts again before the
        next launch. A second call can only shorten the first.
        """
        self._token = None
        tasks = [task for task in self._tasks.values() if not task.done()]
        for name, task in self._tasks.items():
            if not task.done():
                self.runners[name].post(Stop(by, graceful))
        if tasks:
            now = self.clock.now()
            longest = max(runner.spec.stop_timeout for runner in self.runners.values()) + KILL_WAIT
            patience = min(max(by if graceful else now, now), now + longest) + AFTER_KILL
            await asyncio.wait(tasks, timeout=patience - now)

    def term_over(self) -> None:
        """The term has ended, with nothing left of it: the keeper has forgotten its services, and tells no more."""
        for runner in self.runners.values():
            runner.post(Emptied())

    async def fence_now(self) -> None:
        """SIGKILL to all, with no grace."""
        await self.stop_all(by=self.clock.now(), graceful=False)

    def keeper_event(self, event: Mapping[str, Any]) -> None:
        """What the keeper tells (see supervisor.keeper.protocol); events that are not about services are ignored."""
        kind = event.get("event")
        if kind in {"exited", "empty"}:
            runner = self.runners.get(str(event.get("service")))
            if runner is not None and (event.get("unit") or "").startswith(LOOK):
                runner.looked(event["unit"], event["status"])
            elif runner is not None:
                runner.post(Exited(event["pid"], event["status"]) if kind == "exited" else Emptied())
        elif kind == "notify":
            runner = self.runners.get(str(event.get("service")))
            if runner is not None:
                runner.notified(event.get("unit"), event["main"], event["pid"], event["fields"])
        elif kind == "notify-lost":
            self.messages_lost()
        elif kind == "lock-taken" and event.get("gpu") in self.lines:
            self._taken(event["gpu"], event.get("holder") or {})
        elif kind == "lock-free" and event.get("gpu") in self.lines:
            line = self.lines[event["gpu"]]
            line.free(self.clock.now())
            following = line.first()
            if following is not None:
                self._wake(following)

    def _taken(self, gpu: int, holder: Mapping[str, Any]) -> None:
        if gpu in self.lines:
            self.lines[gpu].taken(str(holder.get("service")))

    def messages_lost(self) -> None:
        """What services said just now may have reached nobody."""
        self.lost_at = self.clock.now()

    async def run(self) -> None:
        """Show life until cancelled; then the runners end too, and the processes stay as they are."""
        try:
            while True:
                self.life = self.clock.now()
                await asyncio.sleep(LIFE_EVERY)
        finally:
            tasks = [*self._tasks.values(), *self._strangers]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def restart(
        self,
        name: str,
        why: str,
        *,
        kill: bool,
        counts: bool = True,
        patience: float | None = None,
        resets: bool = True,
        pid: int | None = None,
    ) -> None:
        """End it and start it again; nothing happens to one that is not up. KeyError for an unknown name.

        `kill`: SIGKILL at once; else SIGTERM, and SIGKILL after `patience` seconds (None: its `stop_timeout`).
        `counts`: as a failure; an operator's restart does not, and also ends a backoff. `resets`: a kill
        by the watchdog that is a reason to reset the GPU. `pid`: only if its main process is still this one.
        """
        self.runners[name].post(Restart(why, kill, counts, patience, resets, pid))

    async def reset(self, name: str) -> None:
        """An operator clears its failures; if it is degraded or in backoff it starts now. KeyError: unknown name."""
        self.runners[name].post(Reset())

    async def request(self, name: str, verb: Verb, *, no_start: str) -> Decision:
        """An operator's wish for one service: what was done of it, once it shows. KeyError for an unknown name.

        `no_start`: why this node may start nothing now, empty where it may. What may run is the keeper's to say, as
        for any other start.
        """
        runner = self.runners[name]
        seen = Seen(
            state=runner.state,
            why=runner.why,
            held=runner.held,
            ends=runner.ends,
            has_process=runner.pid is not None,
            told_to_drain=runner.spec.drain_signal is not None,
            launched=self._token is not None,
            no_start=no_start or ("" if self._token is not None else "no term has started services on this node yet"),
        )
        decision = decide(verb, seen)
        if isinstance(decision, Act):
            self._tell(f"{name}: an operator asked to {verb}: {decision.value}")
            if self._act(decision, runner):
                await runner.moved(SETTLE)
        return decision

    def _act(self, act: Act, runner: Runner) -> bool:
        """True: a change of state follows from it."""
        why = "asked for by an operator"
        match act:
            case Act.LAUNCH:
                assert self._token is not None  # `decide` has seen it
                runner.held = False
                self._begin(runner, self._token)
            case Act.RELEASE:
                runner.release()
            case Act.HOLD:
                runner.hold()
            case Act.END:
                runner.post(Stop(NEVER, graceful=True, operator=True))
                return runner.state not in {State.STOPPING, State.QUARANTINED}
            case Act.KILL:
                runner.post(Stop(self.clock.now(), graceful=False, operator=True))
                return True
            case Act.DRAIN | Act.DRAIN_UNTOLD:
                runner.post(Drain())
                return True
            case Act.AGAIN:
                runner.held = False  # it may have been draining
                runner.post(Restart(why, kill=False, counts=False, pid=runner.pid))
                return True
            case Act.GO_ON:
                runner.post(Restart(why, kill=False, counts=False))
                return True
            case Act.RESET | Act.START_ANEW if runner.lives:
                runner.post(Reset())
                return runner.state in {State.DEGRADED, State.BACKOFF}
            case Act.RESET:
                runner.forgive()
        return False

    def running(self) -> int:
        """How many have a process, ready or not."""
        return sum(runner.state in ALIVE and runner.pid is not None for runner in self.runners.values())

    def quarantined(self) -> list[str]:
        """Why this node is not fit to lead, as far as its services go."""
        return [f"{runner.name}: {runner.why}" for runner in self.runners.values() if runner.state is State.QUARANTINED]

    def snapshot(self) -> list[dict[str, Any]]:
        """For people and /status, in the order of the configuration. Durations in seconds."""
        return [self._row(runner) for runner in self.runners.values()]

    def _row(self, runner: Runner) -> dict[str, Any]:
        now = self.clock.now()
        lock: str | None = runner.spec.lock
        if runner.hand.wants_lock:
            lock = "held" if runner.hand.holds_lock else "waiting" if runner.state is State.WAITING_LOCK else "free"
        return {
            "name": runner.name,
            "state": runner.state.value,
            "why": runner.why,
            "for_s": round(now - runner.since, 1),
            "pid": runner.pid,
            "restarts": runner.restarts,
            "failures": runner.account.failures,
            "next_s": None if runner.next_at is None else round(max(0.0, runner.next_at - now), 1),
            "gpu": runner.spec.gpu,
            "lock": lock,
            "status": runner.said.status,
            "sidecars": [sidecar.row() for sidecar in runner.sidecars],
        }

    def _missing(self, names: Sequence[str]) -> list[str]:
        states = {name: self.runners[name].state for name in names}
        return [f"{name} ({state.value})" for name, state in states.items() if state not in SERVING]

    def _wake(self, name: str) -> None:
        self.runners[name].post(Look())
