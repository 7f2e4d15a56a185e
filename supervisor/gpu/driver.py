"""What this project asks of a GPU driver: facts, a reset, persistence. Nothing else ever talks to one.

Every call can hang for ever in the real driver (gpu-facts, "Every driver call can hang"), so each takes an absolute
deadline and keeps it whatever the driver does. A driver that does not answer is a fact (`unresponsive`), not a wait.
"""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class GpuVerdict(enum.StrEnum):
    """What is to be done about a GPU, as far as its driver says."""

    HEALTHY = "healthy"
    RESET_REQUIRED = "reset-required"
    DRAIN = "drain"
    """Drain, then reset: running work may go on, new work should not start."""
    REBOOT_REQUIRED = "reboot-required"
    LOST = "lost"
    """Fell off the bus: no reset cures it."""
    NO_DRIVER = "no-driver"
    UNRESPONSIVE = "unresponsive"
    """The driver did not answer by the deadline."""
    UNKNOWN = "unknown"
    """It answered something we do not know: hold and alert, never act."""

    @property
    def node_fault(self) -> bool:
        """True where the node cannot work, whatever its services do (not the service's failure)."""
        return self in {self.REBOOT_REQUIRED, self.LOST, self.NO_DRIVER, self.UNRESPONSIVE}

    @property
    def wants_reset(self) -> bool:
        return self in {self.RESET_REQUIRED, self.DRAIN}


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as its driver showed it at one moment."""

    uuid: str
    """`GPU-…`: the only key that stays the same over reboots and card moves."""
    index: int
    minor: int
    """N of /dev/nvidiaN: not the index."""
    device: Path
    verdict: GpuVerdict
    pids: frozenset[int] | None
    """Host PIDs that the driver lists on it; None where it did not say. One that /proc lacks is real (a ghost)."""
    persistence: bool | None
    """Persistence *mode* (a running nvidia-persistenced does not imply it)."""
    why: str = ""
    """Where the verdict came from, for people."""


class DriverError(Exception):
    """The driver could not do it: what was asked, of which GPU, what came back, what to do."""

    def __init__(self, verdict: GpuVerdict, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


class ResetRefusedError(DriverError):
    """The GPU was not reset."""

    def __init__(
        self, verdict: GpuVerdict, message: str, *, permanent: bool = False, holders: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(verdict, message)
        self.permanent = permanent
        """The platform cannot reset (VM, consumer card): remember it, go on without, never loop on it."""
        self.holders = holders
        """Who is on it, where that is the reason."""


class GpuDriver(Protocol):
    """One node's GPUs. Deadlines are boot-time seconds and are kept by the implementation."""

    async def facts(self, *, deadline: float) -> tuple[GpuFacts, ...]:
        """Every GPU, by index. A GPU whose driver does not answer is in the list as `unresponsive`.

        Raises DriverError where not even a list can be had.
        """
        ...

    async def reset(self, uuid: str, *, deadline: float) -> None:
        """Reset it and verify that it is healthy afterwards. Allow 60–120 s (gpu-facts, "Reset").

        Raises ResetRefusedError while a process is on it or where the platform refuses, DriverError otherwise.
        """
        ...

    async def ensure_persistence(self, *, deadline: float) -> None:
        """The persistence daemon runs and persistence mode is on for every GPU. Raises DriverError."""
        ...
