"""Take-over and overlap for each fault of the chaos suite, beside `etcdctl lock`, seen by the same kind of observer.

    python -m benchmarks.faults [--runs 10] [--peer-runs 3] [--ttl 6]

As root. Each run is one `python -m tests.chaos.run` in a network namespace of its own: three nodes with eight services,
and a real three-member etcd. `etcdctl lock` runs on such an etcd and under the same cuts, with a child that writes a
stamp every 20 ms. Take-over: from the fault to the first process, or the first stamp, of another node, both seen from
outside. "overlap": how long two nodes ran at once; "for ever": until the end of the run. Prints Markdown on stdout.
"""

import argparse
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers_lock import measure as measure_peer
from benchmarks.takeover import say
from tests.chaos.many import play


@dataclass(frozen=True)
class Row:
    """A row of the table: what it is called, the fault here, and the fault for `etcdctl lock` (None: not played)."""

    what: str
    fault: str
    peer: str | None
    takes_over: bool = True


ROWS = (
    Row("holder killed, its child alive", "kill-supervisor", "kill"),
    Row("holder stopped (SIGSTOP)", "stop-supervisor", "stop"),
    Row("keeper killed", "kill-keeper", None, takes_over=False),
    Row("keeper stopped", "stop-keeper", None, takes_over=False),
    Row("node killed", "kill-node", None),
    Row("cut off from etcd", "cut-from-etcd", "cut"),
    Row("machine cut off with its member of etcd", "isolate-node", None),
    Row("holder and etcd leader killed", "kill-etcd-leader-with-holder", "kill-with-leader"),
    Row("all of etcd frozen 1.5 TTL", "etcd-down", "freeze-all"),
    Row("key deleted by hand", "delete-key", "delete-key"),
    Row("lease revoked by hand", "revoke-lease", "revoke-lease"),
    Row("the etcd member in use frozen", "stop-etcd-member", "freeze-member", takes_over=False),
    Row("clean hand-over", "switchover", None),
)


@dataclass
class Figures:
    """In seconds."""

    took: list[float] = field(default_factory=list)
    overlap: float = 0.0
    needless: int = 0
    again: int = 0
    runs: int = 0


def measure(row: Row, runs: int, ttl: int) -> Figures:
    """Ours."""
    figures = Figures()
    for seed in range(runs):
        steps = ("--steps", "1", "--lasts", "1.6", "--ttl", str(ttl))
        result, timeline = play(seed, *steps, "--faults", row.fault)
        if not result["ok"]:
            print(timeline, file=sys.stderr)
        figures.runs += 1
        figures.again += bool(result["ok"])
        figures.overlap = max(figures.overlap, result.get("overlap_s", 0.0))
        takeovers = result.get("takeovers", [])
        figures.needless += len(takeovers) > row.takes_over
        figures.took += [took for took in result.get("moved_s", []) if took is not None]
        say(f"{row.fault} {seed + 1}/{runs}: {result.get('moved_s')}")
    return figures


def seconds(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} / {max(values):.2f}" if values else "none"


def line(row: Row, ours: Figures, peer: dict[str, Any] | None) -> str:
    again = f"{ours.again} of {ours.runs}"
    if peer is None:
        theirs = ["–", "–"]
    else:
        overlap = "for ever" if peer["for_ever"] else f"{peer['overlap_s']:.2f}"
        theirs = [seconds(peer["took"]), overlap]
    return f"| {row.what} | {seconds(ours.took)} | {ours.overlap:.3f} | {again} | {theirs[0]} | {theirs[1]} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure each fault.")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--peer-runs", type=int, default=3)
    parser.add_argument("--ttl", type=int, default=6)
    arguments = parser.parse_args()
    subprocess.run(["unshare", "--net", "true"], check=True)
    print(f"TTL {arguments.ttl} s, {arguments.runs} runs of each; take-over in seconds, median / largest\n")
    print("| fault | take-over | overlap s | services ran again | etcdctl lock: take-over | overlap s |")
    print("|---|---|---|---|---|---|")
    for row in ROWS:
        ours = measure(row, arguments.runs, arguments.ttl)
        peer = None if row.peer is None else measure_peer(row.peer, arguments.peer_runs, arguments.ttl)
        print(line(row, ours, peer), flush=True)


if __name__ == "__main__":
    main()
