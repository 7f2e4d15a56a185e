"""The states of a service and the one table of allowed transitions, with the sentence that each is told with.

Pure: the table knows no clock, no process and no keeper. Whoever changes a state goes through `step`.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType


class State(enum.StrEnum):
    STOPPED = "stopped"
    WAITING_LOCK = "waiting-lock"
    STARTING = "starting"
    RUNNING = "running"
    UNREADY = "unready"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    DEGRADED = "degraded"
    QUARANTINED = "quarantined"


ALIVE = frozenset({State.STARTING, State.RUNNING, State.UNREADY, State.DRAINING})
"""States in which the service's process is meant to exist."""

TRANSITIONS: Mapping[tuple[State, State], str] = MappingProxyType(
    {
        (State.STOPPED, State.STARTING): "asked to start",
        (State.STARTING, State.RUNNING): "ready",
        (State.STARTING, State.WAITING_LOCK): "another holds the lock of its GPU",
        (State.STARTING, State.STOPPING): "did not come up, or is asked to stop: what there is of it is ended",
        (State.WAITING_LOCK, State.STARTING): "the lock of its GPU is free",
        (State.WAITING_LOCK, State.STOPPED): "asked to stop while it waited",
        (State.RUNNING, State.UNREADY): "no longer ready",
        (State.RUNNING, State.DRAINING): "takes no new work and finishes what it has",
        (State.RUNNING, State.STOPPING): "ended, has to be ended, or is asked to stop: what is left of it is ended",
        (State.UNREADY, State.RUNNING): "ready again",
        (State.UNREADY, State.DRAINING): "takes no new work and finishes what it has",
        (State.UNREADY, State.STOPPING): "ended, has to be ended, or is asked to stop: what is left of it is ended",
        (State.DRAINING, State.STOPPING): "has drained, or is asked to stop at once",
        (State.STOPPING, State.STOPPED): "nothing is left of it, and nobody wants it to run",
        (State.STOPPING, State.STARTING): "nothing is left of it: restarted at once",
        (State.STOPPING, State.WAITING_LOCK): "left with 75: another holds the lock of its GPU",
        (State.STOPPING, State.BACKOFF): "failed again: restarted after a pause",
        (State.STOPPING, State.DEGRADED): "failed too often: no restart until an operator resets it",
        (State.STOPPING, State.QUARANTINED): "survived SIGKILL or is still on the GPU: its lock is kept",
        (State.BACKOFF, State.STARTING): "the pause is over",
        (State.BACKOFF, State.STOPPED): "asked to stop during its pause",
        (State.DEGRADED, State.STARTING): "an operator reset or restarted it",
        (State.DEGRADED, State.STOPPED): "an operator stopped it, or reset it while this node has no term",
        (State.QUARANTINED, State.STOPPED): "what had survived is gone",
    }
)
"""(from, to) → why, in one sentence. What is not here is never done."""


class IllegalTransitionError(Exception):
    """A state change that the table does not have: a fault of this program, never of a service."""


def step(present: State, new: State) -> str:
    """The sentence of this edge. Raises IllegalTransitionError where there is none."""
    try:
        return TRANSITIONS[present, new]
    except KeyError:
        allowed = ", ".join(to.value for (frm, to) in TRANSITIONS if frm is present)
        raise IllegalTransitionError(
            f"{present.value} → {new.value} is not in the table; from {present.value}: {allowed}"
        ) from None
