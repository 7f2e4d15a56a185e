"""Is it ready, and does it still work: the looks at one run of a service, or of a sidecar, and what they come to."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from election.clock import Clock
from supervisor.config.service import Liveness, Readiness
from supervisor.service.probe import PATIENCE
from supervisor.service.said import Said

EVERY = 2.0
"""Seconds between looks at whether it is ready."""
LATE = 1.0
"""Seconds over its time that a look may be told late; what failed then may have been our own standing still."""
RECENT = EVERY + PATIENCE + LATE
"""Seconds for which the finding of a look says something."""
TROUBLES = 3
"""Looks in a row that must find a running service not ready, before it is called unready."""

Look = Callable[[], Awaitable[str | None]]
"""What is wrong, None: nothing. Raises NoLookError where nothing can be said."""


class NoLookError(Exception):
    """It could not be looked at, through no fault of its own."""

    def __init__(self, why: str, *, lasting: bool = False) -> None:
        super().__init__(why)
        self.lasting = lasting
        """It cannot as it is configured: nor could it be started."""


@dataclass(frozen=True)
class IsReady:
    why: str


@dataclass(frozen=True)
class TooLate:
    why: str


class Ready:
    """One run of one process. Boot-time seconds."""

    def __init__(self, spec: Readiness | None, ready_after: float, clock: Clock) -> None:
        self._spec, self._ready_after, self._clock = spec, ready_after, clock
        self.said = Said()
        """What its processes told by sd_notify in this run."""
        self._began = self._from = 0.0
        self._seen_at = self._unknown_until = 0.0
        self._trouble = ""
        self._troubles = 0
        self._looking: asyncio.Task[None] | None = None

    def begin(self, began: float, look: Look, found: Callable[[str | None], None], *, counts_from: float = 0.0) -> None:
        """Its run began then; its time to become ready counts from `counts_from` at the earliest. `found` gets what
        each look finds, to be given to `seen` by the one whose run this is."""
        self._began, self._from = began, max(began, counts_from)
        self._trouble, self._troubles, self._seen_at = "", 0, self._clock.now()
        if self._spec is not None and self._spec.notify is None:
            self._looking = asyncio.create_task(_again_and_again(look, found, EVERY, PATIENCE, self._clock))

    def end(self) -> None:
        """No more looks."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def seen(self, trouble: str | None) -> None:
        """What a look has found."""
        self._seen_at = self._clock.now()
        self._troubles = 0 if trouble is None else self._troubles + 1
        self._trouble = trouble or ""

    @property
    def unready_because(self) -> str:
        """Why it is no longer ready; empty: it is, or this may pass."""
        return self._trouble if self._troubles >= TROUBLES else ""

    @property
    def limit(self) -> float:
        """When there is something to decide without any message."""
        if self._spec is None:
            return self._began + self._ready_after
        if self._spec.notify and self.said.ready:
            return self._began
        return max(self._from + self._spec.timeout, self.said.more_until, self._unknown_until)

    def decide(self, now: float, *, lost_at: float) -> IsReady | TooLate | None:
        """None: not yet. What it said before `lost_at` may have reached nobody."""
        if self._spec is None:
            return IsReady(f"ready: alive for {self._ready_after:g} s") if now >= self.limit else None
        if self._spec.notify and self.said.ready:
            return IsReady("it said READY=1")
        if now < self.limit:
            return None
        if self._spec.notify and lost_at >= self._began:
            return IsReady("its READY=1 may have been lost, so it is taken for ready")
        if self._spec.notify is None and now - self._seen_at > RECENT:  # it cannot be looked at: that is not its fault
            self._unknown_until = now + RECENT
            return None
        missing = "it has not said READY=1" if self._spec.notify else self._trouble
        return TooLate(f"not ready within {self._spec.timeout:g} s ({missing})")


class Alive:
    """Whether a service that became ready still works."""

    def __init__(self, spec: Liveness | None, clock: Clock) -> None:
        self._spec, self._clock = spec, clock
        self._trouble = ""
        self._troubles = 0
        self._looking: asyncio.Task[None] | None = None

    def begin(self, look: Look, excused: Callable[[], bool]) -> None:
        """Look from now on. While it is `excused` a failed look does not count."""
        self.end()
        if self._spec is not None:
            self._looking = asyncio.create_task(
                _again_and_again(
                    look,
                    lambda trouble: self._seen(trouble, excused()),
                    self._spec.every,
                    self._spec.timeout,
                    self._clock,
                )
            )

    def end(self) -> None:
        """Its run is over: what was counted does not count for the next one (kubernetes 53530)."""
        self._trouble, self._troubles = "", 0
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _seen(self, trouble: str | None, excused: bool) -> None:
        if trouble is None:
            self._trouble, self._troubles = "", 0
        elif not excused:
            self._trouble, self._troubles = trouble, self._troubles + 1

    @property
    def failed(self) -> str:
        """Why it does not work any more; empty: it does, or this may pass."""
        if self._spec is None or self._troubles < self._spec.failures:
            return ""
        return f"{self._troubles} looks in a row failed: {self._trouble}"


async def _again_and_again(
    look: Look, found: Callable[[str | None], None], every: float, patience: float, clock: Clock
) -> None:
    while True:
        began = clock.now()
        with contextlib.suppress(NoLookError):
            trouble = await look()
            if trouble is None or clock.now() <= began + patience + LATE:
                found(trouble)
        await clock.sleep_until(began + every)
