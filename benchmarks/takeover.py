"""How long a take-over takes: its work, step by step, and how late after the TTL it begins.

    python -m benchmarks.takeover [--runs 100] [--detections 10] [--ttl 6]

Three supervisors, eight services on a simulated GPU, a real three-member etcd, all on this machine. Work is measured on
`--runs` changes that are forced by deleting the leader key (the holder ends its services, then another node claims),
detection on `--detections` nodes that are killed, and as many that are killed together with the etcd leader. Prints
Markdown on stdout.
"""

import argparse
import asyncio
import math
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from election.clock import boot_time, boot_time_loop
from supervisor.demo.cluster import DemoCluster
from supervisor.demo.fault import Fault, Stage
from supervisor.demo.node_faults import KillNode
from supervisor.demo.store_faults import DeleteKey, KillEtcdLeaderWithHolder
from supervisor.demo.watch import Event, Watcher

LIMIT = 30.0
"""Seconds, besides the TTL, for one change."""


@dataclass
class Figures:
    """All in seconds."""

    work: list[float] = field(default_factory=list)
    steps: dict[str, list[float]] = field(default_factory=dict)
    late: dict[str, list[float]] = field(default_factory=dict)
    """By fault: from the last refresh plus the TTL to the claim."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank; the largest value where there are too few to tell."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


@asynccontextmanager
async def running_cluster(ttl: int) -> AsyncIterator[Watcher]:
    """Three nodes on etcd, all services running on one."""
    with DemoCluster("etcd", ttl) as cluster:
        async with Watcher(cluster, _ignore) as watcher:
            await _settled(watcher, 0)
            yield watcher


async def force(fault: Fault, watcher: Watcher) -> int:
    """One change of hands; the index of the new term. The cluster is whole again afterwards."""
    terms = len(watcher.terms)
    stage = Stage(watcher.cluster, watcher, await _settled(watcher, terms - 1))
    await fault.inject(stage)
    await _settled(watcher, terms)
    await fault.heal(stage)
    everybody = watcher.statuses
    if not await watcher.until(lambda: None not in everybody.values(), boot_time() + LIMIT):
        raise RuntimeError(f"after {fault.name} these did not come back: {[n for n, s in everybody.items() if not s]}")
    return terms


async def measure_work(runs: int, ttl: int, figures: Figures) -> None:
    """Fills in `work` and `steps`."""
    async with running_cluster(ttl) as watcher:
        for run in range(runs):
            token = watcher.terms[await force(DeleteKey(), watcher)].token
            told = await _told(watcher, token)
            figures.work.append(told["work_s"])
            for name, seconds in told["steps"].items():
                figures.steps.setdefault(name, []).append(seconds)
            say(f"work {run + 1}/{runs}: {told['work_s'] * 1000:.0f} ms")


async def measure_detection(kind: type[Fault], runs: int, ttl: int, figures: Figures) -> None:
    """Fills in `late` for one fault."""
    async with running_cluster(ttl) as watcher:
        for run in range(runs):
            index = await force(kind(), watcher)
            old, new = watcher.terms[index - 1], watcher.terms[index]
            late = new.since - old.renewed_at - ttl
            figures.late.setdefault(kind.name, []).append(late)
            say(f"{kind.name} {run + 1}/{runs}: claimed {late * 1000:+.0f} ms after last refresh + TTL")


def markdown(figures: Figures, ttl: int) -> str:
    """The tables."""
    rows = [("claim → `/leader` 200, all of it", figures.work), *figures.steps.items()]
    text = ["| take-over work, eight services | runs | p50 ms | p99 ms |", "|---|---|---|---|"]
    text += [_row(name, values) for name, values in rows]
    text += [
        "",
        f"| last refresh + TTL ({ttl} s) → claim | runs | p50 ms | p99 ms |",
        "|---|---|---|---|",
        *(_row(name, values) for name, values in figures.late.items()),
    ]
    return "\n".join(text)


def _row(name: str, values: Sequence[float]) -> str:
    middle, high = statistics.median(values) * 1000, percentile(values, 99) * 1000
    return f"| {name} | {len(values)} | {middle:.0f} | {high:.0f} |"


async def _settled(watcher: Watcher, terms: int) -> str:
    """The node that leads once there is a term after the first `terms` ones and all services run in it."""
    limit = boot_time() + 3 * watcher.cluster.ttl + LIMIT
    while await watcher.until(lambda: len(watcher.terms) > terms and watcher.complete() is not None, limit):
        if holder := watcher.complete():
            return holder
    words = [line for node in watcher.cluster.nodes.values() for line in (node.name, *node.last_lines())]
    raise RuntimeError("no node had all services running in time:\n" + "\n".join(words))


async def _told(watcher: Watcher, token: int) -> dict[str, Any]:
    """What the node that took over says of its work."""
    if not await watcher.until(lambda: token in watcher.works, boot_time() + LIMIT):
        raise RuntimeError(f"no node tells of the take-over with token {token}")
    return watcher.works[token]


def _ignore(_event: Event) -> None:
    """The figures tell enough."""


async def _measure(arguments: argparse.Namespace) -> Figures:
    figures = Figures()
    await measure_work(arguments.runs, arguments.ttl, figures)
    for kind in (KillNode, KillEtcdLeaderWithHolder):
        await measure_detection(kind, arguments.detections, arguments.ttl, figures)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure take-overs.")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--detections", type=int, default=10)
    parser.add_argument("--ttl", type=int, default=6)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=boot_time_loop) as runner:
        print(markdown(runner.run(_measure(arguments)), arguments.ttl))


if __name__ == "__main__":
    main()
