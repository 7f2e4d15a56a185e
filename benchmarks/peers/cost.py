"""What processes cost: CPU time and memory."""

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

_PROCESS_CLOCK = 2
"""CPUCLOCK_SCHED of the kernel's include/linux/posix-timers.h: what clock_getcpuclockid(3) makes a clock id with."""


def cpu_seconds(pid: int) -> float:
    """What the process has used so far, its ended threads included, to the nanosecond; 0 where it has ended."""
    with contextlib.suppress(OSError):
        return time.clock_gettime_ns((~pid << 3) | _PROCESS_CLOCK) / 1e9
    return 0.0


def cpu_of(pids: Iterable[int]) -> dict[int, float]:
    """By pid."""
    return {pid: cpu_seconds(pid) for pid in pids}


def pss_bytes(pids: Iterable[int]) -> int:
    """Proportional set size (proc_pid_smaps_rollup(5)): what is shared counts by its share."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:"))
    return total
