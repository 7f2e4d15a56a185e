"""What one round of the watchdog costs: CPU time by services, by their processes, and by foreign ones on the machine.

    python -m benchmarks.watchdog [--rounds 30]

A real keeper, services that sleep and take turns on a simulated GPU, so that each round looks at the open files of all
their processes. Foreign processes sleep too. CPU time is that of the whole process that holds the round, threads
included, wall time from its begin to its end. Beside it, what it costs to ask the simulated driver, which is no part of
a round in which nothing is suspected: it reads all of /proc, as a real driver need not. Prints Markdown.
"""

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.peers.bed import Bed, bed
from benchmarks.peers.service import BenchmarkError, until
from benchmarks.takeover import percentile, say
from election.clock import boot_time_loop
from supervisor import proc
from supervisor.keeper import client
from supervisor.service.states import State
from supervisor.watchdog.round import Watchdog
from supervisor.watchdog.verdict import Kind
from tests.bed.keeper import bed_around, soon
from tests.bed.services import NodeBed, node_on, shell

CASES = ((8, 8), (8, 1), (200, 1))
"""(services, processes of each)."""
FOREIGN = (0, 1000, 4000)
START = 120.0
"""Limit in seconds for the start of all services, and of all foreign processes."""


@contextmanager
def foreign_processes(place: Bed, count: int) -> Iterator[None]:
    """So many more processes on this machine."""
    script = f"for i in $(seq {count}); do sleep 3600 & done; wait"
    environment = {"PATH": os.environ["PATH"], "OF": f"{place.folder}/"}  # by which the guardian finds them
    with subprocess.Popen(["sh", "-c", script], env=environment, start_new_session=True) as parent:
        try:
            until(lambda: _sleepers(parent.pid) >= count, START, f"{count} foreign processes")
            yield
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()
            until(lambda: not _group_exists(parent.pid), START, "the end of the foreign processes")


def _sleepers(session: int) -> int:
    return sum(found.session == session and found.comm == "sleep" for found in proc.snapshot().values())


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


async def costs(action: Callable[[], Awaitable[object]], times: int) -> tuple[list[float], list[float]]:
    """CPU and wall milliseconds of each time."""
    used, took = [], []
    for _ in range(times):
        cpu, wall = time.process_time(), time.monotonic()
        await action()
        used.append((time.process_time() - cpu) * 1000)
        took.append((time.monotonic() - wall) * 1000)
    return used, took


async def measure(place: Bed, node: NodeBed, rounds: int) -> list[str]:
    """A row's figures with each number of foreign processes."""
    watchdog = Watchdog(
        node.services,
        node.driver,
        clock=node.services.clock,
        interval=60.0,
        confirm=3.0,
        lock_files={0: node.lock_file},
        on_event=node.events.append,
    )

    async def healthy_round() -> None:
        verdicts = await watchdog.round()
        if len(verdicts) != len(node.services.runners) or any(found.kind is not Kind.HEALTHY for found in verdicts):
            raise BenchmarkError(f"not a healthy round: {[found for found in verdicts if found.kind != Kind.HEALTHY]}")

    rows = []
    for count in FOREIGN:
        with foreign_processes(place, count):
            used, took = await costs(healthy_round, rounds)
            asked, _ = await costs(lambda: node.driver.facts(deadline=soon()), rounds)
        rows.append(f"{count} | {_row(used)} | {statistics.median(took):.1f} | {statistics.median(asked):.1f}")
        say(rows[-1])
    return rows


def _row(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} | {percentile(values, 99):.1f}"


async def case(place: Bed, services: int, processes: int, rounds: int) -> list[str]:
    """One number of services, on a keeper of its own."""
    run, group = place.folder / f"run-{services}-{processes}", f"{place.group}/{services}-{processes}"
    run.mkdir()
    script = "sleep 3600 & " * (processes - 1) + "exec sleep 3600"
    specs = {f"s{number}": shell(script, gpu=0, lock="on-demand") for number in range(services)}
    async with (
        bed_around(run, group, lambda: client.spawn(run, group, None, deadline=soon())) as keeper,
        node_on(keeper, **specs) as node,
    ):
        await node.launch()
        for name in specs:
            await node.state(name, State.RUNNING, seconds=START)
        return [f"| {services} | {services * processes} | {row} |" for row in await measure(place, node, rounds)]


async def _main(place: Bed, rounds: int) -> None:
    columns = ("services", "their processes", "foreign", "CPU ms p50", "p99", "wall ms p50", "the driver: CPU ms p50")
    print(f"| {' | '.join(columns)} |")
    print("|" + "---|" * len(columns))
    for services, processes in CASES:
        say(f"{services} services with {processes} processes each")
        for row in await case(place, services, processes, rounds):
            print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure rounds of the watchdog.")
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    with bed() as place, asyncio.Runner(loop_factory=boot_time_loop) as runner:
        runner.run(_main(place, rounds))


if __name__ == "__main__":
    main()
