"""gpuward beside other supervisors: how soon a killed service is back, what idling costs, what is right at the edges.

    python -m benchmarks.supervisors [--kills 60] [--many 200] [--idle 60] [--peers runit,gpuward]

All run the same tiny C service (peers/service.c) on the same machine, with all files on a tmpfs. Restart: from the
SIGKILL of a service to the stamp that the new process itself makes; all peers are up, each with eight services, and
each round kills one of each, in shuffled order. Start: from the start of the supervisor to the stamp of the last
service. Idle: CPU time of all of its own processes, those beside each service and its keeper included, the services
not; each peer alone, for `--idle` seconds. What is not there is named below the table (tools/install-peers.sh fetches
it). Prints Markdown.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.bed import Bed, bed
from benchmarks.peers.circus import Circus
from benchmarks.peers.cost import cpu_of, pss_bytes
from benchmarks.peers.disk import FreezableDisk
from benchmarks.peers.edges import grandchild_ended, killed_and_started_again, second_copy
from benchmarks.peers.gpuward import Gpuward
from benchmarks.peers.monit import Monit
from benchmarks.peers.peer import Peer
from benchmarks.peers.pm2 import Pm2
from benchmarks.peers.runit import Runit
from benchmarks.peers.s6 import S6
from benchmarks.peers.service import BenchmarkError, until
from benchmarks.peers.supervisord import Supervisord
from benchmarks.peers.systemd import Systemd
from benchmarks.takeover import percentile, say

PEERS: Sequence[type[Peer]] = (Gpuward, Runit, S6, Systemd, Pm2, Circus, Supervisord, Monit)
FEW = 8
SETTLE = 5.0
"""Seconds after a start before anything is measured."""
BETWEEN = 1.2
"""Seconds between two rounds of kills, at least: several peers punish a service that lived for less than one."""
BACK = 30.0
"""Limit for one restart, in seconds."""
LOG_BYTES = 50_000_000


@dataclass
class Figures:
    """Of one peer; what is missing could not be measured, and `troubles` say why."""

    restarts: list[float] = field(default_factory=list)
    """Milliseconds."""
    start: float | None = None
    """Seconds."""
    idle: dict[int, float] = field(default_factory=dict)
    """CPU seconds a minute, by number of services."""
    pss: float | None = None
    """MB."""
    edges: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


Table = dict[str, Figures]


def measure_alone(bed: Bed, kind: type[Peer], count: int, seconds: float, figures: Figures) -> None:
    """One peer alone with so many services; fills in `idle`, `start` and `pss`, or `troubles`."""
    try:
        _measure_alone(bed, kind, count, seconds, figures)
    except (BenchmarkError, OSError) as error:
        figures.troubles.append(str(error))
        say(str(error))


def _measure_alone(bed: Bed, kind: type[Peer], count: int, seconds: float, figures: Figures) -> None:
    with bed.running(kind, bed.services(count)) as (peer, took):
        time.sleep(SETTLE)
        before, began = cpu_of(peer.own()), time.monotonic()
        time.sleep(seconds)
        own = peer.own()
        after, lasted = cpu_of(own), time.monotonic() - began
        used = sum(value - before.get(pid, 0.0) for pid, value in after.items())
        figures.idle[count] = used / lasted * 60
        if count == FEW:
            figures.pss = pss_bytes(own) / 1e6
        else:
            figures.start = took
    say(f"{kind.name}: {count} started in {took:.2f} s, {figures.idle[count]:.3f} CPU s a minute")


def measure_restarts(bed: Bed, kinds: Sequence[type[Peer]], kills: int, table: Table) -> None:
    """All peers at once; fills in `restarts`."""
    with contextlib.ExitStack() as stack:
        peers = []
        for kind in kinds:
            try:
                peers.append(stack.enter_context(bed.running(kind, bed.services(FEW)))[0])
            except BenchmarkError as error:
                table[kind.name].troubles.append(str(error))
        time.sleep(SETTLE)
        for kill in range(kills):
            random.shuffle(peers)
            for peer in list(peers):
                try:
                    table[peer.name].restarts.append(_restart(peer, kill % FEW))
                except (BenchmarkError, OSError) as error:
                    table[peer.name].troubles.append(str(error))
                    peers.remove(peer)
            time.sleep(BETWEEN)


def _restart(peer: Peer, number: int) -> float:
    service = peer.services[number]
    pids = peer.pids().get(service.name, [])
    if len(pids) != 1:
        raise BenchmarkError(f"{peer.name}: {service.name} runs {len(pids)} times; it said: {peer.said()}")
    killed_at = time.monotonic_ns()
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: service.started(killed_at) is not None, BACK, f"{peer.name}: the restart of {service.name}")
    return ((service.started(killed_at) or 0) - killed_at) / 1e6


def measure_edges(bed: Bed, kind: type[Peer], figures: Figures) -> None:
    """Fills in `edges`."""
    questions: list[Callable[[Bed, type[Peer]], str]] = [grandchild_ended, second_copy, killed_and_started_again]
    for question in questions:
        missing = FreezableDisk.unavailable() if question is second_copy else None
        if missing:
            figures.edges.append("–")
            figures.troubles.append(f"{kind.name}: no process that hangs in the kernel: {missing}")
            continue
        try:
            figures.edges.append(question(bed, kind))
        except (BenchmarkError, OSError, subprocess.CalledProcessError) as error:
            figures.edges.append("?")
            figures.troubles.append(f"{kind.name}: {question.__name__}: {error}")
        say(f"{kind.name}: {question.__name__}: {figures.edges[-1]}")


def measure_log(bed: Bed) -> str:
    """A service of gpuward that writes as fast as it can; a sentence."""
    services = bed.services(FEW, noisy=("log", str(LOG_BYTES)))
    noisy = services[-1]
    with bed.running(Gpuward, services) as (peer, _):
        until(lambda: noisy.told("log") is not None, BACK, f"{LOG_BYTES} bytes of log")
        longest = (noisy.told("log") or 0) / 1e6
        assert isinstance(peer, Gpuward)
        kept = sum(path.stat().st_size for path in (peer.node.folder / "log").glob("noisy.log*"))
    return (
        f"gpuward, a service that writes {LOG_BYTES / 1e6:.0f} MB to its output at once: its slowest write took "
        f"{longest:.1f} ms, and {kept / 1e6:.1f} MB are in its log."
    )


def markdown(table: Table, many: int) -> str:
    """The table, a row for each peer."""
    rows = [
        f"| | restart ms p50 / p99 / max | start {many} s | idle CPU s a minute, {FEW} / {many} | PSS MB, {FEW} "
        "| double-forked grandchild ended at stop | second copy beside a process that SIGKILL cannot end "
        "| itself killed and started again |",
        "|" + "---|" * 8,
    ]
    for name, figures in table.items():
        idle = " / ".join(_number(figures.idle.get(count), 3) for count in (FEW, many))
        cells = [name, _restarts(figures.restarts), _number(figures.start, 2), idle, _number(figures.pss, 1)]
        rows.append("| " + " | ".join([*cells, *(figures.edges or ["–"] * 3)]) + " |")
    return "\n".join(rows)


def _restarts(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return " / ".join(f"{ms:,.1f}" for ms in (statistics.median(values), percentile(values, 99), max(values)))


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare supervisors.")
    parser.add_argument("--kills", type=int, default=60, help="of each peer")
    parser.add_argument("--many", type=int, default=200, help="services of the larger run")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds for which each peer idles")
    parser.add_argument("--peers", default=",".join(kind.name for kind in PEERS))
    return parser.parse_args()


def measure(place: Bed, kinds: Sequence[type[Peer]], options: argparse.Namespace) -> tuple[Table, str]:
    """All figures, and the sentence on logs. Raises BenchmarkError where nothing can be measured."""
    say(f"services: {place.program}")
    table = {kind.name: Figures() for kind in kinds}
    for count in (FEW, options.many):
        for kind in random.sample(kinds, len(kinds)):
            measure_alone(place, kind, count, options.idle, table[kind.name])
    say(f"{options.kills} kills of each")
    measure_restarts(place, kinds, options.kills, table)
    for kind in kinds:
        measure_edges(place, kind, table[kind.name])
    try:
        return table, measure_log(place) if Gpuward in kinds else ""
    except BenchmarkError as error:
        return table, str(error)


def main() -> None:
    options = _options()
    wanted = [kind for kind in PEERS if kind.name in options.peers.split(",")]
    missing = {kind.name: why for kind in wanted if (why := kind.unavailable()) is not None}
    try:
        with bed() as place:
            table, log = measure(place, [kind for kind in wanted if kind.name not in missing], options)
    except BenchmarkError as error:
        print(f"Not measured: {error}.")
        return
    print(f"{options.kills} kills of each; {options.idle:g} s of idling; bold: right.")
    print(f"\n{markdown(table, options.many)}\n\n{log}")
    troubles = [f"{name}: not compared: {why}" for name, why in missing.items()]
    troubles += [trouble for figures in table.values() for trouble in figures.troubles]
    print("".join(f"\n- {' '.join(trouble.split())}" for trouble in troubles))


if __name__ == "__main__":
    main()
