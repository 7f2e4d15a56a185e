"""Sidecars of a service: they start before it, one after the other, and the end of one is the end of all."""

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from election.clock import Clock
from supervisor.config import service
from supervisor.keeper.protocol import SIDECAR
from supervisor.service.messages import Ended, Exited, Probed, describe
from supervisor.service.ready import IsReady, Look, Ready, TooLate


class SidecarState(enum.StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    RUNNING = "running"


class Sidecar:
    """One of them, in one run of the service."""

    def __init__(self, name: str, spec: service.Sidecar, clock: Clock) -> None:
        self.name = name
        self.spec = spec
        self.unit = SIDECAR + name
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """It does not run."""
        self.pid: int | None = None
        self.state = SidecarState.STOPPED
        self.ready = Ready(self.spec.readiness, self.spec.ready_after, self._clock)

    def started(self, pid: int, look: Look, found: Callable[[str | None], None]) -> None:
        """It is being looked at from now on, until it is ready."""
        self.pid, self.state = pid, SidecarState.STARTING
        self.ready.begin(self._clock.now(), look, found)

    def row(self) -> dict[str, Any]:
        """For people."""
        return {"name": self.name, "state": self.state.value, "pid": self.pid, "status": self.ready.said.status}


class Sidecars:
    """All of one service."""

    def __init__(self, specs: Mapping[str, service.Sidecar], clock: Clock) -> None:
        self._all = [Sidecar(name, spec, clock) for name, spec in specs.items()]

    def __bool__(self) -> bool:
        return bool(self._all)

    def __iter__(self) -> Iterator[Sidecar]:
        return iter(self._all)

    def next(self) -> Sidecar | None:
        """Which has to come up before anything else may start; None: all are ready."""
        return next((one for one in self._all if one.state is not SidecarState.RUNNING), None)

    def of_pid(self, pid: int) -> Sidecar | None:
        return next((one for one in self._all if one.pid == pid), None)

    def of_unit(self, unit: str | None) -> Sidecar | None:
        return next((one for one in self._all if one.unit == unit), None)

    def adopt(self, units: Mapping[str, Any]) -> None:
        """As the keeper's `hello` has them: each was ready before the service was started."""
        for sidecar in self._all:
            sidecar.reset()
            if sidecar.unit in units:
                sidecar.pid, sidecar.state = units[sidecar.unit]["pid"], SidecarState.RUNNING

    def ended_meanwhile(self, units: Mapping[str, Any]) -> list[Exited]:
        """Which of ours are over, as `hello` has them, although nobody told us."""
        found = []
        for sidecar in self._all:
            unit = units.get(sidecar.unit)
            if sidecar.pid is not None and (unit is None or not unit["running"] or unit["pid"] != sidecar.pid):
                found.append(Exited(sidecar.pid, None if unit is None else unit["status"]))
        return found

    def take(self, message: object, *, now: float, lost_at: float) -> Ended | str | None:
        """What becomes of the one that is coming up: ready (a sentence), or the end of all."""
        if isinstance(message, Exited) and (gone := self.of_pid(message.pid)) is not None:
            return ended(gone, message.status)
        if isinstance(message, Probed) and (seen := self.of_pid(message.pid)) is not None:
            seen.ready.seen(message.trouble)
        sidecar = self.next()
        if sidecar is None or sidecar.state is SidecarState.STOPPED:
            return None
        if isinstance(message, Probed) and message.pid == sidecar.pid and message.trouble is None:
            return self._is_up(sidecar, "it answers")
        match sidecar.ready.decide(now, lost_at=lost_at):
            case IsReady(why):
                return self._is_up(sidecar, why)
            case TooLate(why):
                return Ended(f"sidecar {sidecar.name}: {why}", graceful=True)
        return None

    def _is_up(self, sidecar: Sidecar, why: str) -> str:
        sidecar.state = SidecarState.RUNNING
        sidecar.ready.end()
        return f"sidecar {sidecar.name} is ready: {why}"

    def look_no_more(self) -> None:
        for sidecar in self._all:
            sidecar.ready.end()

    def reset(self) -> None:
        """The run is over, with nothing of it left."""
        self.look_no_more()
        for sidecar in self._all:
            sidecar.reset()


def ended(sidecar: Sidecar, status: int | None) -> Ended:
    """The end of the service that follows from the end of a sidecar."""
    return Ended(f"sidecar {sidecar.name}: {describe(status)}", graceful=True)
