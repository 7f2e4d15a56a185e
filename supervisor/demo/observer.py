"""The outside observer: which nodes have service processes, seen in /proc every 20 ms and told by nobody.

    python -I -S observer.py FOLDER

A service process is one whose environment names a node (`GPUWARD_NODE`) and lies under FOLDER, the demo's own. A
zombie is none, and neither is one in D state with SIGKILL pending: it can do nothing any more (docs/election.md).
Prints one JSON object a line: `{"at", "present": {node: [token, …]}}` on each change, and after the end of
stdin `{"result": …}`, see `Account.result`.

What it cannot see: a process that lives less than one sampling period, and one that changes its environment
without an exec. When it was late, and by how much, stands in the result, since a late observer may miss something.
"""

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

PERIOD = 0.02
"""Seconds between two samples."""
LATE = 0.1
"""Seconds. Longer distances between two samples are listed in the result, `MOST_LISTED` of them."""
MOST_LISTED = 50
INSTANT = 0.001
"""Seconds for which one sample with two nodes counts at least."""
YOUNG = 1.0
"""Seconds of age below which a process that is none of ours is looked at in every sample: between fork and exec
it still shows the environment of its parent. Older ones are looked at again every `RECHECK` seconds."""
RECHECK = 0.5
TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds. Resolution of a process's start time (proc_pid_stat(5), field 22)."""
SIGKILL_BIT = 1 << 8
"""In the masks of proc_pid_status(5): bit n−1 stands for signal n."""


@dataclass(frozen=True)
class Process:
    """A service process. `started` is boot time, rounded up to the clock tick: at it, the process was surely there."""

    pid: int
    node: str
    token: int
    started: float


@dataclass(frozen=True)
class Sample:
    """The service processes that were alive at the instant `at` (boot time)."""

    at: float
    processes: frozenset[Process]

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset(process.node for process in self.processes)


@dataclass
class Interval:
    """Processes of `node` under `token` were seen from `first` to `last` without a break."""

    node: str
    token: int
    first: float
    last: float


class Account:
    """Adds up samples, which must come in order of time. Pure: no clock, no process."""

    def __init__(self) -> None:
        self.samples = 0
        self.overlap = 0.0
        self.longest = 0.0
        self.late: list[tuple[float, float]] = []
        self.intervals: list[Interval] = []
        self._open: dict[tuple[str, int], Interval] = {}
        self._gap = 0.0
        self._previous: Sample | None = None
        self._seen_last: float | None = None

    @property
    def gap(self) -> float:
        """Longest time without any process, from the first one to the last sample."""
        if self._previous is None or self._seen_last is None:
            return 0.0
        return max(self._gap, self._previous.at - self._seen_last)

    def add(self, sample: Sample) -> None:
        """The next sample."""
        self._note_distance(sample)
        starts = self._starts(sample)
        ordered = sorted(starts.values())
        if len(ordered) > 1:
            self.overlap += max(INSTANT, sample.at - ordered[1])
        if ordered:
            if self._seen_last is not None:
                self._gap = max(self._gap, ordered[0] - self._seen_last)
            self._seen_last = sample.at
        self._extend(sample, starts)
        self._previous = sample
        self.samples += 1

    def result(self) -> dict[str, object]:
        """What `gpuward demo` shows; times in seconds, `first`, `last` and `late` on the boot-time clock."""
        return {
            "samples": self.samples,
            "longest_gap_s": round(self.longest, 3),
            "late": [{"at": round(at, 3), "s": round(length, 3)} for at, length in self.late],
            "overlap_s": round(self.overlap, 3),
            "gap_s": round(self.gap, 3),
            "intervals": [
                {"node": i.node, "token": i.token, "first": round(i.first, 3), "last": round(i.last, 3)}
                for i in self.intervals
            ],
        }

    def _note_distance(self, sample: Sample) -> None:
        if self._previous is None:
            return
        distance = sample.at - self._previous.at
        self.longest = max(self.longest, distance)
        if distance > LATE and len(self.late) < MOST_LISTED:
            self.late.append((self._previous.at, distance))

    def _starts(self, sample: Sample) -> dict[str, float]:
        """From when on each node of `sample` had a process, within the time since the previous sample."""
        earliest = sample.at if self._previous is None else self._previous.at
        before = frozenset[str]() if self._previous is None else self._previous.nodes
        return {
            node: earliest
            if node in before
            else max(earliest, min(p.started for p in sample.processes if p.node == node))
            for node in sample.nodes
        }

    def _extend(self, sample: Sample, starts: dict[str, float]) -> None:
        present = {(process.node, process.token) for process in sample.processes}
        for key in self._open.keys() - present:
            del self._open[key]
        for node, token in sorted(present):
            interval = self._open.get((node, token))
            if interval is None:
                interval = Interval(node, token, starts[node], sample.at)
                self._open[node, token] = interval
                self.intervals.append(interval)
            interval.last = sample.at


def account(samples: Iterable[Sample]) -> Account:
    """All of `samples`, which must be in order of time."""
    total = Account()
    for sample in samples:
        total.add(sample)
    return total


@dataclass
class _Known:
    """What is known of one pid. `process` is None: none of ours, so far."""

    ticks: int
    process: Process | None
    look_again: float
    ended: bool = False
    """It stood in D state with SIGKILL pending: whatever it shows from then on is its end."""


class Reader:
    """Takes samples from `proc`. `folder` is the demo's: its path must stand in the environment of its processes."""

    def __init__(self, folder: str, proc: str = "/proc") -> None:
        self._needle = folder.rstrip("/").encode() + b"/"
        self._proc = proc
        self._known: dict[str, _Known] = {}

    def sample(self, now: float) -> Sample:
        """Those alive at `now`, the time of the call: what started after it is left to the next sample."""
        seen: dict[str, _Known] = {}
        alive: set[Process] = set()
        for name in os.listdir(self._proc):
            if not name.isdigit():
                continue
            known = self._known.get(name)
            if known is not None and known.process is None and now < known.look_again:
                seen[name] = known
                continue
            stat = self._read(name, "stat")
            if stat is None:
                continue
            state, ticks, threads = parse_stat(stat)
            if known is None or known.ticks != ticks or known.process is None:
                known = self._look(name, ticks, threads, now)
            seen[name] = known
            if known.process is not None and self._counts(name, known, state, threads) and known.process.started <= now:
                alive.add(known.process)
        self._known = seen
        return Sample(now, frozenset(alive))

    def _look(self, name: str, ticks: int, threads: int, now: float) -> _Known:
        started = (ticks + 1) * TICK
        environ = self._read(name, "environ") or (self._environ_of_threads(name) if threads > 1 else b"")
        identity = parse_environ(environ, self._needle)
        if identity is not None:
            return _Known(ticks, Process(int(name), *identity, started), now)
        return _Known(ticks, None, now if now - started < YOUNG else now + RECHECK)

    def _environ_of_threads(self, name: str) -> bytes:
        """Where the first thread has ended, only the others still show the environment."""
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"{self._proc}/{name}/task"):
                if environ := self._read(f"{name}/task/{thread}", "environ"):
                    return environ
        return b""

    def _counts(self, name: str, known: _Known, state: str, threads: int) -> bool:
        if state in "ZX":
            return threads > 1  # the first thread has ended, others run on
        known.ended = known.ended or (state == "D" and kill_pending(self._read(name, "status") or b""))
        return not known.ended

    def _read(self, name: str, file: str) -> bytes | None:
        """None: gone, or not ours to read."""
        with contextlib.suppress(OSError), open(f"{self._proc}/{name}/{file}", "rb", buffering=0) as stream:
            return stream.read()
        return None


def parse_stat(stat: bytes) -> tuple[str, int, int]:
    """State, start in clock ticks since boot, number of threads. The command in it may hold anything, `)` included."""
    fields = stat[stat.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[19]), int(fields[17])


def parse_environ(environ: bytes, needle: bytes) -> tuple[str, int] | None:
    """Node and token of a service of the demo whose folder is `needle`; None for any other process."""
    if needle not in environ:
        return None
    pairs = dict(item.split(b"=", 1) for item in environ.split(b"\0") if b"=" in item)
    node = pairs.get(b"GPUWARD_NODE")
    if not node:
        return None
    token = pairs.get(b"GPUWARD_FENCING_TOKEN", b"")
    return node.decode(errors="replace"), int(token) if token.isdigit() else 0


def kill_pending(status: bytes) -> bool:
    """SIGKILL waits to be delivered, to the thread or to the process."""
    return any(
        int(line.split()[1], 16) & SIGKILL_BIT
        for line in status.splitlines()
        if line.startswith((b"SigPnd:", b"ShdPnd:"))
    )


def observe(folder: str) -> None:
    """Sample until stdin ends, then print the result."""
    reader, total = Reader(folder), Account()
    shown: dict[str, list[int]] = {}
    due = _now()
    while True:
        sample = reader.sample(_now())
        total.add(sample)
        present = {node: sorted({p.token for p in sample.processes if p.node == node}) for node in sorted(sample.nodes)}
        if present != shown:
            print(json.dumps({"at": round(sample.at, 3), "present": present}), flush=True)
            shown = present
        due = max(due + PERIOD, _now())
        if select.select([sys.stdin], [], [], max(0.0, due - _now()))[0] and not os.read(0, 4096):
            break
    print(json.dumps({"result": total.result()}), flush=True)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(-10)  # a late observer may miss an overlap; without the right to it, it is an ordinary process
    try:
        observe(sys.argv[1])
    except BrokenPipeError:  # the demo is gone, and nobody wants the result
        os._exit(1)
