"""What can reach a service's runner from outside, and what becomes of a run that ended."""

import os
import signal
from dataclasses import dataclass
from typing import TypeAlias

BUSY_EXIT = 75
"""EX_TEMPFAIL of sysexits.h: how `gpuward lock run` says that the GPU's lock is busy."""


@dataclass(frozen=True)
class Exited:
    """The keeper reaped its main process, or a sidecar of it."""

    pid: int
    status: int | None
    """As wait(2) gives it; None: lost."""


@dataclass(frozen=True)
class Emptied:
    """The keeper finds no process of it any more."""


@dataclass(frozen=True)
class Look:
    """The lock of its GPU may be free. A hint, to be verified."""


@dataclass(frozen=True)
class Stop:
    """End it and do not start it again."""

    by: float
    """Boot-time seconds at which the kill comes, whatever `stop_timeout` says."""
    graceful: bool
    operator: bool = False
    """An operator's wish for this one service, under a term that goes on; else the node's, for all of them."""

    def merged(self, later: "Stop") -> "Stop":
        """A later stop can only shorten an earlier one; the node's wins over an operator's."""
        return Stop(min(self.by, later.by), self.graceful and later.graceful, operator=self.operator and later.operator)


@dataclass(frozen=True)
class Restart:
    """End it and start it again."""

    why: str
    kill: bool
    """SIGKILL at once: a process that is stuck on the GPU never answers a SIGTERM."""
    counts: bool
    """A failure, as against an operator's wish."""
    patience: float | None = None
    """Seconds from SIGTERM to SIGKILL; None: its `stop_timeout`."""
    resets: bool = True
    """A kill by the watchdog that is a reason to reset the GPU."""
    pid: int | None = None
    """Only the run with this main process is meant; None: whichever runs now."""


@dataclass(frozen=True)
class SaidReady:
    """It has said READY=1, or more of what it needs until then."""

    pid: int
    """Of its main process, or of a sidecar of it."""


@dataclass(frozen=True)
class Probed:
    """A look at whether it is ready."""

    pid: int
    """Of its main process, or of a sidecar of it, when the look began."""
    trouble: str | None
    """None: it is ready."""


@dataclass(frozen=True)
class Stopping:
    """It has said STOPPING=1: it ends by itself."""

    pid: int
    """Of its main process."""


@dataclass(frozen=True)
class Drain:
    """An operator's wish: it goes on, and its end by itself is no failure and is followed by no start."""


@dataclass(frozen=True)
class Reset:
    """An operator clears the account of failures."""


Message: TypeAlias = Exited | Emptied | Look | Stop | Restart | SaidReady | Probed | Stopping | Drain | Reset


@dataclass(frozen=True)
class Ended:
    """Why a run is over, and so what follows."""

    why: str
    failure: bool = True
    """It counts in the restart accounting."""
    busy: bool = False
    """It left because another holds the GPU's lock: wait, no failure."""
    refused: bool = False
    """The keeper lets nothing start any more (the term is over): the node's matter, and no restart."""
    graceful: bool = False
    """SIGTERM and `stop_timeout` first; else SIGKILL at once."""
    by_itself: bool = False
    """It has begun to end, and is not told to."""
    patience: float | None = None
    """Seconds from SIGTERM to SIGKILL; None: its `stop_timeout`."""
    killed: bool = False
    """The watchdog had to kill it: a reason to reset the GPU (docs/services.md, Restart, `after-kill`)."""


def describe(status: int | None) -> str:
    """An exit that nobody asked for, in words: a clean one is a failure as well."""
    if status is None:
        return "ended unexpectedly; its exit code is lost"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited unexpectedly with {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"
