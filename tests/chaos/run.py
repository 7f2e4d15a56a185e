"""One chaos run: faults from a seed on three real nodes and a real etcd, and what an observer saw of it.

    unshare --net python -m tests.chaos.run --seed N [--steps 3] [--faults a,b] [--each] [--ttl 6] [--timeline]

Needs root, and a network namespace of its own. The last line of stdout is the result as one JSON object; a run that is
not ok prints its timeline on stderr. Exit status 0: ok.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from election.clock import boot_time, boot_time_loop
from election.store import StoreError
from supervisor.demo.fault import Fault, FaultError, Stage
from supervisor.demo.watch import Event, Watcher
from tests.chaos import oracle
from tests.chaos.bed import ChaosCluster
from tests.chaos.faults import NAMES, ChaosFault, Excuse, go_together

START = 30.0
"""Seconds, besides two TTLs, until all services run somewhere, at the start and after each fault."""
SETTLE = 1.0
LAST = 150
"""Lines of each supervisor's log that are shown of a run that is not ok."""
THAW = 0.1
"""Seconds for which the services of a node that was frozen and thawed may run on (docs/election.md, rule 20)."""


@dataclass
class Run:
    """What happens, and what came of it."""

    seed: int
    ttl: int
    lasts: float | None = None
    """Of a TTL: how long each fault lasts; None: from the seed."""
    events: list[Event] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    excuses: list[Excuse] = field(default_factory=list)
    timeline: bool = False
    """It is shown also where the run is ok."""
    trouble: str | None = None
    begun: list[float] = field(default_factory=list)
    """When each step's first fault was injected (boot-time seconds)."""
    takeovers: list[int] = field(default_factory=list)
    """Of each step."""
    not_done: list[str] = field(default_factory=list)
    """Faults that had nothing to break, since the one before had broken it already."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def notice(self, event: Event) -> None:
        self.events.append(event)

    def say(self, what: str) -> None:
        self.notice(Event(boot_time(), what))


async def play(run: Run, names: list[str], steps: int | None) -> dict[str, Any]:
    """The whole run, `steps` drawn from `names`, or (None) each of them once; the result."""
    drawn = [[name] for name in names] if steps is None else [_choose(run, names) for _ in range(steps)]
    with ChaosCluster(run.ttl) as cluster:
        async with Watcher(cluster, run.notice) as watcher:
            await _settled(run, watcher, "at the start")
            for chosen in drawn:
                if run.trouble is None:
                    before = len(watcher.terms)
                    await _step(run, watcher, chosen)
                    run.takeovers.append(len(watcher.terms) - before)
            observed = await watcher.finish_observer()
        result = _result(run, watcher, observed)
        if run.timeline or not result["ok"]:
            for node in cluster.nodes.values():
                run.events += [Event(boot_time(), f"{node.name}: {line}") for line in node.last_lines(LAST)]
    return result


async def _settled(run: Run, watcher: Watcher, when: str) -> None:
    if not await watcher.until(lambda: watcher.complete() is not None, boot_time() + 2 * run.ttl + START):
        run.trouble = f"{when}: no node had all services running"
        for node in watcher.cluster.nodes.values():
            run.say(f"{node.name} at the end: {(watcher.statuses[node.name] or {}).get('why', 'no answer')}")


async def _step(run: Run, watcher: Watcher, names: list[str]) -> None:
    """One fault, or two at once, for a while; then everything is mended, and must be whole again."""
    await asyncio.sleep(SETTLE + run.random.random())
    holder = watcher.complete()
    if holder is None:
        await _settled(run, watcher, "between two faults")
        return
    chosen = [NAMES[name]() for name in names]
    stage = Stage(watcher.cluster, watcher, holder)
    run.faults.append("+".join(fault.name for fault in chosen))
    begun: list[Fault] = []
    run.begun.append(boot_time())
    try:
        for fault in chosen:
            run.say(f"FAULT {fault.name} on {holder}")
            begun.append(fault)
            await fault.inject(stage)
            await asyncio.sleep(run.random.random() * 0.5)
        await asyncio.sleep(_lasts(run, chosen))
    except (FaultError, StoreError, OSError, RuntimeError, KeyError) as error:
        run.not_done.append(f"{begun[-1].name}: {error}")
        run.say(f"could not be done: {error}")
    finally:
        for fault in reversed(begun):
            await _heal(run, fault, stage)
    await _settled(run, watcher, f"after {run.faults[-1]}")


def _choose(run: Run, names: list[str]) -> list[str]:
    """One, or two that go together."""
    first, *second = run.random.sample(names, min(len(names), run.random.randint(1, 2)))
    return [first, *(name for name in second if go_together(first, name))]


async def _heal(run: Run, fault: Fault, stage: Stage) -> None:
    try:
        await fault.heal(stage)
    except (FaultError, OSError, RuntimeError, AttributeError, KeyError) as error:
        run.say(f"{fault.name} could not be mended: {error}")
    run.say(f"mended {fault.name}")
    if isinstance(fault, ChaosFault):
        run.excuses += fault.excuses
    for name, node in stage.cluster.nodes.items():
        if not node.running:
            run.say(f"{name} is started again")
            stage.cluster.start_node(name)


def _lasts(run: Run, chosen: list[Fault]) -> float:
    if run.lasts is not None:
        return run.lasts * run.ttl
    own = [lasts for fault in chosen if (lasts := fault.lasts(run.ttl)) is not None]
    longest = max((fault.longest for fault in chosen if isinstance(fault, ChaosFault)), default=1.7)
    return max([*own, run.random.uniform(0.3, longest) * run.ttl])


def _result(run: Run, watcher: Watcher, observed: dict[str, Any]) -> dict[str, Any]:
    found = oracle.intervals(observed)
    overlaps = oracle.overlaps(found, run.excuses) if run.excuses else {"": observed["overlap_s"]}
    rise = oracle.tokens_rise(found)
    thawed = overlaps.get("thawed", 0.0)
    why = [run.trouble] if run.trouble else []
    why += ["two nodes had service processes at once"] if overlaps.get("") else []
    why += ["tokens did not rise"] if not rise else []
    why += oracle.out_of_bounds(overlaps, run.excuses)
    why += [f"the services of a thawed node ran on for {thawed:.3f} s"] if thawed > THAW else []
    takeovers = [
        {"from": old.node, "to": new.node, "token": new.token, "detected_s": round(new.since - old.renewed_at, 3)}
        for old, new in zip(watcher.terms, watcher.terms[1:], strict=False)
    ]
    return {
        "seed": run.seed,
        "ttl_s": run.ttl,
        "faults": run.faults,
        "takeovers_by_step": run.takeovers,
        "takeovers": takeovers,
        "overlap_s": round(overlaps.get("", 0.0), 3),
        "excused_s": {kind: round(seconds, 3) for kind, seconds in overlaps.items() if kind},
        "gap_s": observed["gap_s"],
        "not_done": run.not_done,
        "moved_s": oracle.moved(found, run.begun),
        "late": len(observed["late"]),
        "ok": not why,
        "why": why,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="One chaos run.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--each", action="store_true", help="each fault once, in the order given")
    parser.add_argument("--faults", default=",".join(NAMES), help="names, separated by commas")
    parser.add_argument("--ttl", type=int, default=6)
    parser.add_argument("--lasts", type=float, help="of a TTL: how long each fault lasts; default: from the seed")
    parser.add_argument("--timeline", action="store_true", help="print it also where the run is ok")
    arguments = parser.parse_args()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    run = Run(arguments.seed, arguments.ttl, arguments.lasts, timeline=arguments.timeline)
    with asyncio.Runner(loop_factory=boot_time_loop) as runner:
        result = runner.run(play(run, arguments.faults.split(","), None if arguments.each else arguments.steps))
    if run.timeline or not result["ok"]:
        began = min(event.at for event in run.events)
        for event in sorted(run.events, key=lambda event: event.at):
            print(f"{event.at - began:9.3f}  {event.what}", file=sys.stderr)
    print(json.dumps(result), flush=True)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
