"""The faults of `gpuward demo`, one class each: what is broken, how it is mended, and what that proves.

`inject` breaks something on the node that leads, or in the store; `heal` mends it when the take-over is through (or
after `lasts`), so that the rest of the demo shows that what comes back does no harm.
"""

from supervisor.demo.fault import Fault
from supervisor.demo.node_faults import (
    ClockJump,
    DiskFull,
    HangingStep,
    KillKeeper,
    KillNode,
    KillService,
    KillSupervisor,
    LoseGpu,
    NoFault,
    StopKeeper,
    StopSupervisor,
    UnkillableHolder,
)
from supervisor.demo.store_faults import (
    DeleteKey,
    DeletePrefix,
    EtcdDown,
    KillEtcdLeader,
    KillEtcdLeaderWithHolder,
    OverwriteKey,
    RevokeLease,
    StopEtcdMember,
    Switchover,
)

KINDS: tuple[type[Fault], ...] = (
    NoFault,
    KillSupervisor,
    StopSupervisor,
    KillKeeper,
    StopKeeper,
    KillService,
    KillNode,
    LoseGpu,
    UnkillableHolder,
    HangingStep,
    DiskFull,
    ClockJump,
    Switchover,
    DeleteKey,
    DeletePrefix,
    OverwriteKey,
    RevokeLease,
    StopEtcdMember,
    KillEtcdLeader,
    KillEtcdLeaderWithHolder,
    EtcdDown,
)
NAMES = tuple(kind.name for kind in KINDS)


def make(name: str) -> Fault:
    """The fault of that name; KeyError where there is none."""
    return {kind.name: kind for kind in KINDS}[name]()
