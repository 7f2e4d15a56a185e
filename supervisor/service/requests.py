"""What an operator asks of one service, and what is done about it. Pure.

| asked | does |
|---|---|
| start | runs it, also out of a pause or `degraded`, and from then on in each term |
| stop | ends it in good order, and no term of this node starts it; asked again while it ends: SIGKILL at once |
| restart | ends it in good order and starts it again; one without a process is started |
| drain | sends it `drain_signal`, if there is one; it goes on, and once it has ended by itself it stays stopped |
| reset | forgets its failures; out of a pause or `degraded` it starts |
"""

import enum
from dataclasses import dataclass
from typing import TypeAlias

from supervisor.service.states import State


class Verb(enum.StrEnum):
    START = "start"
    STOP = "stop"
    RESTART = "restart"
    DRAIN = "drain"
    RESET = "reset"


@dataclass(frozen=True)
class Seen:
    """A service as a request finds it."""

    state: State
    why: str
    held: bool
    """An operator stopped it."""
    ends: bool
    """It has been asked to stop, and is not stopped yet."""
    has_process: bool
    told_to_drain: bool
    """It has a `drain_signal`."""
    launched: bool
    """This node has a term under which its services were started."""
    no_start: str
    """Why nothing may be started now; empty: it may."""


class Act(enum.Enum):
    """What is done, and how the operator is told of it."""

    LAUNCH = "it is being started"
    GO_ON = "it starts now, before its pause is over"
    RELEASE = "it is no longer stopped by an operator, and starts with the next term of this node"
    END = "it is being stopped"
    KILL = "it is killed"
    HOLD = "it is stopped, and stays so"
    DRAIN = "it drains, and stays stopped once it has ended by itself"
    DRAIN_UNTOLD = "it has no drain_signal and is told nothing; it stays stopped once it has ended, and `stop` ends it"
    AGAIN = "it is being restarted"
    RESET = "its failures are forgotten"
    START_ANEW = "its failures are forgotten, and it is being started"


@dataclass(frozen=True)
class Already:
    """Nothing is to be done, and why."""

    why: str


@dataclass(frozen=True)
class Refused:
    """It cannot be done now, and why."""

    why: str


Decision: TypeAlias = Act | Already | Refused


def decide(verb: Verb, seen: Seen) -> Decision:
    """What a request comes to."""
    if verb is Verb.RESET:
        return Act.RESET
    if verb is Verb.DRAIN:
        return _drain(seen)
    return _stop(seen) if verb is Verb.STOP else _start(verb, seen)


def _stop(seen: Seen) -> Decision:
    if seen.state is State.QUARANTINED and seen.ends:
        return Already(f"it cannot be ended: {seen.why}")
    if seen.ends:
        return Act.KILL
    if seen.state is State.STOPPED and seen.held:
        return Already("it is stopped by an operator already")
    if not seen.launched:
        return Refused(seen.no_start)
    return Act.HOLD if seen.state is State.STOPPED else Act.END


def _drain(seen: Seen) -> Decision:
    if seen.state in {State.RUNNING, State.UNREADY} and not seen.ends:
        return Act.DRAIN if seen.told_to_drain else Act.DRAIN_UNTOLD
    if seen.state is State.DRAINING:
        return Already("it drains already")
    return Refused(f"it is {seen.state.value}, and only what runs can drain: {seen.why}")


def _start(verb: Verb, seen: Seen) -> Decision:
    if verb is Verb.START and seen.held and seen.state is State.STOPPED and not seen.launched:
        return Act.RELEASE
    if seen.no_start:
        return Refused(seen.no_start)
    if seen.ends or seen.state is State.STOPPING:
        return Refused(f"it is still being stopped: {seen.why}")
    match seen.state:
        case State.STOPPED:
            return Act.LAUNCH
        case State.BACKOFF:
            return Act.GO_ON
        case State.DEGRADED:
            return Act.START_ANEW
        case State.QUARANTINED:
            return Refused(f"it is quarantined: {seen.why}")
        case State.WAITING_LOCK:
            return Already(f"it starts when the lock of its GPU is free: {seen.why}")
        case State.DRAINING if verb is Verb.START:
            return Refused("it drains: restart it, or start it once it has ended")
        case State.STARTING if verb is Verb.START or not seen.has_process:
            return Already("it is starting already")
        case _:
            return Act.AGAIN if verb is Verb.RESTART else Already("it is running already")
