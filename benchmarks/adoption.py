"""How soon running services are under control again after a SIGKILL of the supervisor, of the keeper, or of both.

    python -m benchmarks.adoption [--runs 20] [--services 8]

One node on the local store, services that sleep. With the supervisor killed, from the start of the new one (its import
of Python modules included) to `/leader` 200 with every service `running`; with the keeper alone, from its SIGKILL to
the new keeper and the same. A run in which a service has another pid than before is an error. Prints Markdown.
"""

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.takeover import percentile, say
from supervisor.demo import cleanup
from tests.bed.nodes import NodeBed

KILLED = ("supervisor", "keeper", "both")
LIMIT = 20.0
"""Seconds for one adoption."""


def measure(node: NodeBed, killed: str) -> float:
    """Seconds of one adoption. Raises AssertionError where a service was restarted."""
    before = node.until_leading()
    keeper = before["keeper"]["pid"]
    began = time.monotonic()
    if killed != "supervisor":
        os.kill(keeper, signal.SIGKILL)
    if killed != "keeper":
        node.kill()
        began = time.monotonic()
        node.start()

    def adopted() -> dict[str, Any] | None:
        found = node.status() if node.leads() else None
        if found is None or found["keeper"] is None or (killed != "supervisor" and found["keeper"]["pid"] == keeper):
            return None
        return found if all(row["state"] == "running" for row in found["services"]) else None

    after = node.until(adopted, LIMIT)
    took = time.monotonic() - began
    assert [row["pid"] for row in after["services"]] == [row["pid"] for row in before["services"]]
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure adoptions.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--services", type=int, default=8)
    arguments = parser.parse_args()
    print(f"| killed, {arguments.services} services run | runs | p50 ms | p99 ms |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="gpuward-bench-") as folder:
        node = NodeBed(Path(folder) / "n1", f"/gpuward-bench-{os.getpid()}")
        for number in range(arguments.services):
            node.add_service(f"s{number}", "sleep", "1000")
        node.after_an_orderly_end().start()
        try:
            for killed in KILLED:
                say(f"{killed}: {arguments.runs} times")
                times = [measure(node, killed) * 1000 for _ in range(arguments.runs)]
                p50, p99 = percentile(times, 50), percentile(times, 99)
                print(f"| {killed} | {arguments.runs} | {p50:.0f} | {p99:.0f} |", flush=True)
        finally:
            node.end()
            cleanup.remove_group(node.cgroup)


if __name__ == "__main__":
    main()
