"""Whether the watchdog's rounds stay on time while the node is flooded with requests for its status.

    python -m benchmarks.rounds [--seconds 60] [--clients 8]

One node on the local store with one service, and a round a second. Rounds are seen from outside: each opens the
service's `cgroup.events`. Late is what one comes later than a second after the one before it, the work of that one
included. First nobody asks, then so many clients do over HTTP, each without a pause. Prints Markdown.
"""

import argparse
import asyncio
import contextlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncinotify import Inotify, Mask

from benchmarks.peers.bed import Bed, bed
from benchmarks.takeover import percentile, say
from supervisor.cgroup import mount_point
from tests.bed.nodes import LONG_TTL, NodeBed

INTERVAL = 1.0
"""Seconds between two rounds."""
_CLIENT = """
import http.client, sys
asked = http.client.HTTPConnection(sys.argv[1])
while True:
    asked.request("GET", "/status")
    asked.getresponse().read()
    print(flush=True)
"""


async def openings(file: Path, seconds: float) -> list[float]:
    """When the file was opened, by anybody, for so long; seconds."""
    found: list[float] = []
    with Inotify() as inotify:
        inotify.add_watch(file, Mask.OPEN)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                async for _ in inotify:
                    found.append(time.monotonic())
    return found


@contextmanager
def flood(place: Bed, address: str, clients: int) -> Iterator[list[Path]]:
    """So many clients that ask for the status; each adds a byte to its file with each answer."""
    files = [place.folder / f"client-{number}" for number in range(clients)]
    command = [sys.executable, "-c", _CLIENT, address, f"{place.folder}/"]  # by the folder the guardian finds it
    with contextlib.ExitStack() as stack:
        for file in files:
            output = stack.enter_context(file.open("wb"))
            client = stack.enter_context(subprocess.Popen(command, stdout=output))
            stack.callback(client.kill)
        yield files


def measure(place: Bed, node: NodeBed, file: Path, clients: int, seconds: float) -> str:
    """A row of the table."""
    say(f"rounds with {clients} clients")
    with flood(place, node.url.removeprefix("http://"), clients) as files:
        times = asyncio.run(openings(file, seconds))
        answers = sum(path.stat().st_size for path in files)
    late = [(after - before - INTERVAL) * 1000 for before, after in itertools.pairwise(times)]
    figures = " | ".join(f"{ms:.1f}" for ms in (statistics.median(late), percentile(late, 99), max(late)))
    return f"| {clients} | {answers / seconds:,.0f} | {len(late)} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure whether rounds are on time.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    print("| clients | answers a second | rounds | late ms p50 | p99 | max |\n|" + "---|" * 6)
    with bed() as place:
        node = NodeBed(place.folder / "n1", place.group, ttl=LONG_TTL)
        node.config["watchdog"] = {"interval": INTERVAL, "confirm": INTERVAL / 5}
        node.add_service("only", "sleep", "3600")
        node.after_an_orderly_end().start()
        try:
            token = node.until_leading()["term"]["token"]
            file = Path(f"{mount_point()}{node.cgroup}/n1/term-{token}/only/cgroup.events")
            for clients in (0, options.clients):
                print(measure(place, node, file, clients, options.seconds), flush=True)
        finally:
            node.end()


if __name__ == "__main__":
    main()
