"""May this node lead? Pure: from what is known of it to the reasons why not (rule 12). No reason: it is fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from supervisor.gpu.driver import GpuFacts


@dataclass(frozen=True)
class Condition:
    """What is known of the node at one moment."""

    keeper_answers: bool
    keeper_trouble: str
    hardware_trouble: str
    """Why the required hardware watchdog does not watch; empty: it does, or is not required."""
    weak: bool
    weak_allowed: bool
    gpus: Sequence[GpuFacts]
    gpu_trouble: str
    """Why the facts could not be read; empty: they could."""
    quarantined: tuple[int, ...]
    """Processes that survived SIGKILL, and are still there."""
    store_trouble: str
    """Why the store's history cannot be trusted; empty: it can."""
    timing_trouble: str
    """Why an end could take longer here than the TTL allows; empty: it could not."""
    stuck_services: tuple[str, ...]
    """Services that are quarantined, each with why."""
    stay_out_left: float
    """Seconds for which this node stays out after a failed take-over (rule 13)."""
    stay_out_because: str


def unfit_because(node: Condition) -> list[str]:
    """Every reason, for people; each says what would end it where that is not plain."""
    reasons = []
    if node.weak and not node.weak_allowed:
        reasons.append(
            "no cgroup v2 can be written here, so services could escape their end: run as root, or delegate a cgroup "
            "and name it in `cgroup`; `allow_weak_containment: true` accepts process groups instead"
        )
    if not node.keeper_answers:
        reasons.append(f"the keeper does not answer: {node.keeper_trouble}")
    if node.hardware_trouble:
        reasons.append(f"the hardware watchdog is required: {node.hardware_trouble}")
    if node.gpu_trouble:
        reasons.append(f"the GPUs cannot be read: {node.gpu_trouble}")
    reasons += [f"GPU {gpu.index} is {gpu.verdict}: {gpu.why}" for gpu in node.gpus if gpu.verdict.node_fault]
    if node.quarantined:
        reasons.append(f"processes survived SIGKILL and may still be on the GPU: {list(node.quarantined)}")
    if node.store_trouble:
        reasons.append(node.store_trouble)
    if node.timing_trouble:
        reasons.append(
            f"timers or kills were too slow for this TTL, {node.timing_trouble}: "
            "relieve this machine, or set a larger `election.ttl`"
        )
    reasons += [f"service {text}" for text in node.stuck_services]
    if node.stay_out_left > 0:
        reasons.append(f"staying out for {node.stay_out_left:.0f} s more: {node.stay_out_because}")
    return reasons
