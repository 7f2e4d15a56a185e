"""What is wrong with a service: ONE pure function, from what was seen and what is remembered of earlier looks.

A verdict is acted on only when it is `confirmed`: seen at two looks at least `confirm` seconds apart, of the same
process. Whatever is unknown never confirms anything (gpu-facts, "Alive but not holding the GPU").
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from supervisor.gpu.holders import Hold
from supervisor.watchdog.snapshot import Process, ServiceSeen, Who, live


class Kind(enum.StrEnum):
    HEALTHY = "healthy"
    DEAD = "dead"
    """Its main process is gone, and nobody has said so."""
    ZOMBIE = "zombie"
    """Its main process has ended and is not reaped."""
    D_STATE = "d-state"
    """A thread has been stuck in the kernel for a whole interval."""
    EMPTY = "empty"
    LOST_GPU = "lost-gpu"
    """Alive, had the device open, and has not any more."""
    NO_GPU = "no-gpu"
    """Has not opened the device by the end of its start_grace, and must."""
    DEVICE_WITHOUT_MUTEX = "device-without-mutex"
    LONG_SECTION = "long-section"
    """A GPU section that it announced goes on for longer than `max_gpu_section`."""
    SILENT = "silent"
    """No heartbeat within `heartbeat`."""
    NOT_ALIVE = "not-alive"
    """Its liveness looks failed, so many in a row as `liveness.failures` says."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Verdict:
    service: str
    kind: Kind
    evidence: str
    main: Who
    confirmed: bool = False
    offenders: tuple[Who, ...] = ()
    """Whom DEVICE_WITHOUT_MUTEX is about."""


@dataclass(frozen=True)
class Memory:
    """What is remembered of one run of a service (one main process)."""

    main: Who
    attached: bool = False
    """One of its processes has had the device open."""
    suspected: Mapping[tuple[Kind, Who], float] = field(default_factory=dict)
    """What was wrong with whom at the last look, and since when (boot-time seconds)."""
    stuck: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(thread, its context switches) → stuck since."""


@dataclass(frozen=True)
class Rules:
    """Seconds."""

    confirm: float
    stuck_for: float
    """How long a thread may be in D state without a single context switch: disks and networks have slow moments."""


History = Mapping[str, Memory]


def forget_suspicions(history: History) -> dict[str, Memory]:
    """After a gap in our own time nothing that was suspected before it counts; what was attached stays so."""
    return {name: replace(memory, suspected={}, stuck={}) for name, memory in history.items()}


def decide(
    seen: Sequence[ServiceSeen], history: History, rules: Rules, *, now: float, listed: frozenset[int]
) -> tuple[list[Verdict], dict[str, Memory]]:
    """A verdict per service and the new history. `listed`: PIDs that the driver lists on a GPU, as far as is known."""
    verdicts, memories = [], {}
    for service in seen:
        name = service.target.name
        memory = history.get(name)
        if memory is None or memory.main != service.main:
            memory = Memory(service.main)
        verdict, memories[name] = _one(service, memory, rules, now, listed)
        verdicts.append(verdict)
    return verdicts, memories


def _one(
    service: ServiceSeen, memory: Memory, rules: Rules, now: float, listed: frozenset[int]
) -> tuple[Verdict, Memory]:
    if service.frozen:
        frozen = Verdict(service.target.name, Kind.UNKNOWN, "its cgroup is frozen", service.main)
        return frozen, replace(memory, suspected={}, stuck={})
    memory = replace(
        memory,
        attached=memory.attached or any(process.device is Hold.HELD for process in service.processes),
        stuck=_stuck_since(service.processes, memory, now),
    )
    verdict = _look_at(service, memory, rules, now, listed)
    about = verdict.offenders or (verdict.main,)
    wrong = verdict.kind not in {Kind.HEALTHY, Kind.UNKNOWN}
    suspected = {(verdict.kind, who): memory.suspected.get((verdict.kind, who), now) for who in about if wrong}
    confirmed = tuple(who for (_, who), since in suspected.items() if now - since >= rules.confirm)
    if verdict.offenders:
        verdict = replace(verdict, offenders=confirmed or verdict.offenders)
    return replace(verdict, confirmed=bool(confirmed)), replace(memory, suspected=suspected)


def _look_at(service: ServiceSeen, memory: Memory, rules: Rules, now: float, listed: frozenset[int]) -> Verdict:
    """In the order of docs/services.md, Watchdog: process, zombie, D state, cgroup, device and mutex."""
    name, main = service.target.name, service.main
    alive = live(service.processes)
    if not service.main_there:
        return Verdict(name, Kind.DEAD, f"main process {main[0]} is gone; {len(alive)} others live", main)
    if any(process.who == main and process.zombie for process in service.processes):
        return Verdict(name, Kind.ZOMBIE, f"main process {main[0]} has ended and was not reaped", main)
    longest = min(memory.stuck.values(), default=now)
    if memory.stuck and now - longest >= rules.stuck_for:
        tids = sorted(tid for (tid, _), since in memory.stuck.items() if now - since >= rules.stuck_for)
        return Verdict(name, Kind.D_STATE, f"threads {tids} in D state for {now - longest:.0f} s", main)
    if not alive and service.target.footprint.cgroup is not None:
        return Verdict(name, Kind.EMPTY, "no live process in its cgroup", main)
    verdict = _device(service, memory, now, listed)
    return verdict if verdict.kind not in {Kind.HEALTHY, Kind.UNKNOWN} else (_said(service, now) or verdict)


def _said(service: ServiceSeen, now: float) -> Verdict | None:
    """What it announced itself and did not keep, and what it does not answer. A section of a process that has ended has
    ended too."""
    now = min(now, service.target.heard_until)
    target, pids = service.target, {process.who[0] for process in live(service.processes)}
    since = [(at, pid) for (pid, _), at in target.sections.items() if pid in pids]
    longest, pid = min(since, default=(now, 0))
    if now - longest > target.max_section:
        text = f"GPU section of {pid} for {now - longest:.0f} s, max_gpu_section is {target.max_section:g} s"
        return Verdict(target.name, Kind.LONG_SECTION, text, service.main)
    if target.heartbeat is not None and target.heard_at is not None and now - target.heard_at > target.heartbeat:
        text = f"no heartbeat for {now - target.heard_at:.0f} s, heartbeat is {target.heartbeat:g} s"
        return Verdict(target.name, Kind.SILENT, text, service.main)
    if target.not_alive:
        return Verdict(target.name, Kind.NOT_ALIVE, target.not_alive, service.main)
    return None


def _device(service: ServiceSeen, memory: Memory, now: float, listed: frozenset[int]) -> Verdict:
    target, name, main = service.target, service.target.name, service.main
    alive = live(service.processes)
    wrong = offenders(service)
    if wrong:
        evidence = f"GPU {target.gpu} open without its mutex: {', '.join(str(pid) for pid, _ in wrong)}"
        return Verdict(name, Kind.DEVICE_WITHOUT_MUTEX, evidence, main, offenders=wrong)
    unknown = [process.who[0] for process in alive if process.device is Hold.UNKNOWN]
    if not target.needs_device or any(process.device is Hold.HELD for process in alive):
        return Verdict(name, Kind.HEALTHY, f"{len(alive)} processes", main)
    if not service.device_found or unknown:
        return Verdict(name, Kind.UNKNOWN, f"the open files of {unknown or 'its GPU device'} cannot be read", main)
    still = sorted(process.who[0] for process in alive if process.who[0] in listed)
    if still:
        return Verdict(name, Kind.UNKNOWN, f"no device open, but the driver lists {still}", main)
    if memory.attached:
        return Verdict(name, Kind.LOST_GPU, f"none of {len(alive)} processes holds GPU {target.gpu} any more", main)
    if now - target.started_at >= target.start_grace:
        late = f"GPU {target.gpu} not opened within start_grace, {target.start_grace:g} s"
        return Verdict(name, Kind.NO_GPU, late, main)
    return Verdict(name, Kind.HEALTHY, "starting: has not opened its GPU yet", main)


def offenders(service: ServiceSeen) -> tuple[Who, ...]:
    """Its processes that have the GPU open and not its mutex, at this look."""
    return tuple(
        process.who
        for process in live(service.processes)
        if process.device is Hold.HELD and not _lawful(process, service)
    )


def _lawful(process: Process, service: ServiceSeen) -> bool:
    """Whether the mutex covers this process: its service has it for good, its own job has it, or its unit flocks it.

    A job's processes may close the inherited fd; the keeper's duplicate keeps the lock for the whole job.
    """
    if service.target.has_mutex or process.flock:
        return True
    if service.job_mutex and (process.unit is None or process.unit.startswith("/job-")):
        return True
    return any(other.flock and other.unit == process.unit for other in service.processes)


def _stuck_since(processes: Sequence[Process], memory: Memory, now: float) -> dict[tuple[int, int], float]:
    keys = [(thread.tid, thread.switches) for process in processes for thread in process.stuck]
    return {key: memory.stuck.get(key, now) for key in keys}
