"""The lock files of the present term, watched: what somebody else does to them is told and undone, and who holds a
GPU's lock for too long is told.

inotify wakes it, so a deletion or a replacement is noticed at once; every POLL seconds it looks without being woken.
What an event says is never believed, only that there is something to see: so lost events cost nothing (a full queue
is one event more, after which everything is looked at).

Not promised: who deleted a file (the kernel does not say), and a repair when both links were deleted.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from asyncinotify import Event, Inotify, Mask, Watch

from election.clock import Clock
from supervisor import flock
from supervisor.config.service import Service
from supervisor.keeper.client import KeeperGone, KeeperRefused
from supervisor.mutex import LockFile
from supervisor.service.hand import CALL_LIMIT, Keeper

POLL = 3.0
"""Seconds between looks when nothing is told."""
REST = 0.02
"""Seconds after a look, so that somebody who writes all the time cannot keep us busy."""
TOLD_AGAIN = 60.0
"""Seconds for which the same finding is not told again."""
WARN_AFTER = 4 * 3600.0
ALARM_AFTER = 6 * 3600.0
"""Seconds from the taking."""
_NAMES = Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
_CONTENT = Mask.MODIFY
_QUEUE = 256  # events with the longest name that one read takes

Holder = Mapping[str, Any]


class Held(IntEnum):
    """For how long a lock is held, as a judgement."""

    FINE = 0
    WARNING = 1
    ALARM = 2


@dataclass(frozen=True)
class Limits:
    """Seconds from the taking of a lock; infinite: never."""

    warning: float = WARN_AFTER
    alarm: float = ALARM_AFTER


UNLIMITED = Limits(float("inf"), float("inf"))


def limits_for(holder: Holder, services: Mapping[str, Service]) -> Limits:
    """`max_hold` in place of both limits; a `lifetime` service without it may hold its lock for ever. Pure."""
    spec = services.get(str(holder.get("service")))
    if spec is None:
        return Limits()
    if spec.max_hold is not None:
        return Limits(spec.max_hold, spec.max_hold)
    return UNLIMITED if spec.lock == "lifetime" else Limits()


def held_too_long(holder: Holder | None, since: float, now: float, limits: Limits) -> Held:
    """`since` is the taking; both are boot-time seconds: the wall clock may jump. Pure. Nobody holds it: FINE."""
    if holder is None:
        return Held.FINE
    if now - since > limits.alarm:
        return Held.ALARM
    return Held.WARNING if now - since > limits.warning else Held.FINE


@dataclass
class _Taking:
    """One holder, from `lock-taken` to `lock-free`."""

    holder: dict[str, Any]
    since: float
    taken_ns: int
    """As the keeper has it: by this a taking is known again."""
    told: Held = Held.FINE


@dataclass
class _Told:
    """When a finding was last told, and how often it was seen since."""

    at: float
    unsaid: int = 0


class LockWatch:
    """See the module. `begin` and `end` are a term; `run` is for the whole life of a node."""

    def __init__(
        self,
        services: Mapping[str, Service],
        keeper: Keeper,
        clock: Clock,
        note: Callable[[str], None],
        alarm: Callable[[str, str], None],
    ) -> None:
        """`note` gets events, `alarm` a kind (`lock-file`, `lock-held`) and a sentence."""
        self._services, self._keeper, self._clock = services, keeper, clock
        self._note, self._alarm = note, alarm
        self._locks: dict[int, LockFile] = {}
        self._takings: dict[int, _Taking] = {}
        self._told: dict[tuple[int, str], _Told] = {}
        self._looking = asyncio.Lock()
        self._stirred = asyncio.Event()
        self._inotify: Inotify | None = None
        self._watched: list[Watch] = []

    # --- a term

    def begin(self, locks: Mapping[int, LockFile]) -> None:
        """The lock files of a term, which the keeper has."""
        self._unwatch()
        self._locks = dict(locks)
        self._told.clear()
        self._watch()
        self._stirred.set()

    @property
    def locks(self) -> Mapping[int, LockFile]:
        """By GPU: those of the present term."""
        return self._locks

    async def end(self) -> list[LockFile]:
        """The term is over: nothing is repaired any more. The caller removes the files."""
        async with self._looking:
            locks, self._locks = self._locks, {}
            self._takings.clear()
            self._unwatch()
        return list(locks.values())

    # --- what the keeper tells

    def keeper_event(self, event: Mapping[str, Any]) -> None:
        """See supervisor.keeper.protocol; events that are not about locks are ignored."""
        if event["event"] == "lock-taken":
            before = self._takings.get(event["gpu"])
            if before is not None and before.taken_ns == event["since_ns"]:
                before.holder = event["holder"]  # the same taking: its service was restarted
            else:
                self._takings[event["gpu"]] = _Taking(event["holder"], self._clock.now(), event["since_ns"])
        elif event["event"] == "lock-free":
            self._takings.pop(event["gpu"], None)

    def keeper_says(self, held: Iterable[Mapping[str, Any]]) -> None:
        """Who holds what now, as the keeper's `hello` has it: whatever was heard before counts no longer."""
        told = {gpu: taking.told for gpu, taking in self._takings.items()}
        self._takings = {
            row["gpu"]: _Taking(
                dict(row["holder"]), row["since_ns"] / 1e9, row["since_ns"], told.get(row["gpu"], Held.FINE)
            )
            for row in held
        }

    def keeper_gone(self) -> None:
        """Nobody knows any more who holds what."""
        self._takings.clear()

    def holders(self) -> dict[int, dict[str, Any]]:
        """By GPU: what the keeper says of the holder, and `held_s`, seconds since it took the lock."""
        now = self._clock.now()
        return {gpu: {**taking.holder, "held_s": round(now - taking.since, 1)} for gpu, taking in self._takings.items()}

    # --- all the time

    async def run(self) -> None:
        """Until cancelled."""
        reader: asyncio.Task[None] | None = None
        try:
            self._inotify = Inotify(cache_size=_QUEUE)
            self._watch()
            reader = asyncio.create_task(self._read(self._inotify))
        except OSError as error:
            self._note(f"no inotify ({error}): the lock files are looked at every {POLL:g} s only")
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL):
                        await self._stirred.wait()
                self._stirred.clear()
                await self.look()
                await asyncio.sleep(REST)
        finally:
            if reader is not None:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            self._watched.clear()
            if self._inotify is not None:
                self._inotify.close()
                self._inotify = None

    async def _read(self, inotify: Inotify) -> None:
        try:
            async for event in inotify:
                if Mask.Q_OVERFLOW in event.mask:
                    self._note("inotify lost events: every lock file is looked at anew")
                if self._matters(event):
                    self._stirred.set()
        except OSError as error:
            self._note(f"inotify broke ({error}): the lock files are looked at every {POLL:g} s only")

    def _matters(self, event: Event) -> bool:
        """A name of ours, a content, a folder that went away, or a full queue."""
        return event.name is None or str(event.name) in {os.path.basename(name) for name in self._names()}

    def _names(self) -> Iterable[str]:
        for lock in self._locks.values():
            yield os.fspath(lock.path)
            yield flock.guard_path(os.fspath(lock.path))

    def _watch(self) -> None:
        if self._inotify is None:
            return
        folders = {os.path.dirname(name) or "." for name in self._names()}
        wanted = [(folder, _NAMES) for folder in sorted(folders)]
        wanted += [(f"/proc/self/fd/{lock.fd}", _CONTENT) for lock in self._locks.values()]
        for path, mask in wanted:
            try:
                self._watched.append(self._inotify.add_watch(path, mask))
            except OSError as error:
                self._note(f"no inotify on {path} ({error}): looked at every {POLL:g} s only")

    def _unwatch(self) -> None:
        for watch in self._watched:
            if self._inotify is not None:
                with contextlib.suppress(OSError):  # it went with its file
                    self._inotify.rm_watch(watch)
        self._watched.clear()

    # --- a look

    async def look(self) -> None:
        """At every lock file, its content, and its holder."""
        async with self._looking:
            for gpu, lock in self._locks.items():
                await self._look_at_links(gpu, lock)
                await self._look_at_content(gpu, lock)
        for gpu, taking in self._takings.items():
            self._judge(gpu, taking)

    async def _look_at_links(self, gpu: int, lock: LockFile) -> None:
        try:
            found = await asyncio.to_thread(lock.repair)
        except OSError as error:
            self._tell(gpu, f"cannot be repaired: {error}")
            return
        if found is not None:
            self._tell(gpu, f"{found}; linked back. The kernel does not say who did it")

    async def _look_at_content(self, gpu: int, lock: LockFile) -> None:
        try:
            answer = await self._keeper.call("describe", deadline=self._clock.now() + CALL_LIMIT, gpu=gpu)
            if answer["foreign"] is None:
                return
            hello = await self._keeper.call("hello", deadline=self._clock.now() + CALL_LIMIT)
        except (KeeperGone, KeeperRefused, TimeoutError):
            return  # the node's matter: without a keeper the term ends
        open_in = [who for who in await asyncio.to_thread(flock.writers, lock.fd) if who.pid != hello["pid"]]
        who = ", ".join(map(repr, open_in)) or "nobody any more"
        self._tell(
            gpu,
            f"{lock.path} was written to by somebody else ({answer['foreign']!r}); its description is written again. "
            f"Open for writing in: {who}",
        )

    def _tell(self, gpu: int, text: str) -> None:
        now = self._clock.now()
        told = self._told.get((gpu, text))
        if told is not None and now - told.at < TOLD_AGAIN:
            told.unsaid += 1
            return
        again = f" ({told.unsaid} more times since the last alarm)" if told is not None and told.unsaid else ""
        self._told = {key: value for key, value in self._told.items() if now - value.at < TOLD_AGAIN}
        self._told[gpu, text] = _Told(now)
        self._alarm("lock-file", f"the lock file of GPU {gpu}: {text}{again}")

    def _judge(self, gpu: int, taking: _Taking) -> None:
        """Told once for each step; the lock is never taken away, and the file never deleted."""
        now, holder = self._clock.now(), taking.holder
        limits = limits_for(holder, self._services)
        held = held_too_long(holder, taking.since, now, limits)
        if held <= taking.told:
            return
        taking.told = held
        text = f"the lock of GPU {gpu} is held by {holder.get('service')} (pid {holder.get('pid')}) "
        if held is Held.ALARM:
            self._alarm("lock-held", text + f"for more than {_span(limits.alarm)}")
        else:
            self._note(f"warning: {text}for more than {_span(limits.warning)}; from {_span(limits.alarm)} on an alarm")


def _span(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"
