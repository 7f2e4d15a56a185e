"""`etcdctl lock` under the faults of benchmarks/faults.py: three of them compete, each with a child that writes stamps.

It runs in a network namespace of its own, on the etcd and the network of tests/chaos/bed.py.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from supervisor.demo.etcd_cluster import find_binaries
from tests.chaos.bed import MEMBERS, Etcd, Network, client_address, from_etcd, to_etcd

PERIOD = 0.02
STAMP = "import sys, time\nwhile True:\n print(time.monotonic(), file=open(sys.argv[1], 'a')); time.sleep(0.02)"
LOCK = "gpu"
FRESH = 0.1
"""Seconds. A node whose last stamp is not older has a process that runs."""


@dataclass
class Field:
    """Three competitors, and who holds the lock."""

    etcd: Etcd
    network: Network
    folder: Path
    ttl: int
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(self) -> None:
        etcdctl, flags = str(find_binaries() / "etcdctl"), ["lock", f"--ttl={self.ttl}", "--", LOCK]
        for node in range(MEMBERS):
            members = [(node + step) % MEMBERS for step in range(MEMBERS)]
            endpoints = ",".join(f"http://{client_address(node, m)}:{self.etcd.client_port(m)}" for m in members)
            child = [sys.executable, "-I", "-S", "-c", STAMP, str(self.folder / f"{node}")]
            command = [etcdctl, f"--endpoints={endpoints}", *flags, *child]
            with (self.folder / f"{node}.out").open("wb") as output:
                self.processes.append(subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True))

    def end(self) -> None:
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)  # its session: etcdctl and its child
            process.wait()

    def stamps(self, node: int) -> list[float]:
        path = self.folder / f"{node}"
        return [float(line) for line in path.read_text().splitlines() if line] if path.exists() else []

    def holder(self) -> int:
        """The node with a fresh stamp; waits for one."""
        until = time.monotonic() + 3 * self.ttl
        while time.monotonic() < until:
            for node in range(MEMBERS):
                if (found := self.stamps(node)) and time.monotonic() - found[-1] < FRESH:
                    return node
            time.sleep(PERIOD)
        raise RuntimeError("nobody got the lock")

    def key(self) -> dict[str, Any]:
        """The holder's key: the oldest."""
        found = json.loads(self.etcd.etcdctl("get", f"{LOCK}/", "--prefix", "-w", "json"))["kvs"]
        oldest: dict[str, Any] = min(found, key=lambda row: row["create_revision"])
        return oldest


def _kill(lock: Field, node: int) -> None:
    lock.processes[node].kill()


def _kill_with_leader(lock: Field, node: int) -> None:
    lock.processes[node].kill()
    lock.etcd.kill(lock.etcd.leader())


def _stop(lock: Field, node: int) -> None:
    lock.processes[node].send_signal(signal.SIGSTOP)


def _cut(lock: Field, node: int) -> None:
    lock.network.drop("cut", to_etcd(node), from_etcd(node))


def _freeze_all(lock: Field, node: int) -> None:
    for member in range(MEMBERS):
        lock.etcd.stop(member)
    time.sleep(1.5 * lock.ttl)
    for member in range(MEMBERS):
        lock.etcd.cont(member)


def _freeze_member(lock: Field, node: int) -> None:
    lock.etcd.stop(node)


def _delete_key(lock: Field, node: int) -> None:
    import base64

    lock.etcd.etcdctl("del", base64.b64decode(lock.key()["key"]).decode())


def _revoke_lease(lock: Field, node: int) -> None:
    lock.etcd.etcdctl("lease", "revoke", f"{lock.key()['lease']:x}")


FAULTS: dict[str, Callable[[Field, int], None]] = {
    "kill": _kill,
    "kill-with-leader": _kill_with_leader,
    "stop": _stop,
    "cut": _cut,
    "freeze-all": _freeze_all,
    "freeze-member": _freeze_member,
    "delete-key": _delete_key,
    "revoke-lease": _revoke_lease,
}


def overlap(stamps: dict[int, list[float]]) -> float:
    """Seconds with fresh stamps of two nodes."""
    marks = sorted((at, node) for node, found in stamps.items() for at in found)
    last: dict[int, float] = {}
    total = 0.0
    for (before, _), (at, node) in itertools.pairwise(marks):
        fresh = {other for other, when in last.items() if before - when < FRESH}
        total += at - before if len(fresh | {node}) > 1 and len(fresh) > 1 else 0.0
        last[node] = at
    return total


def play() -> None:
    """One run, in the namespace: prints what came of it."""
    fault, ttl = sys.argv[1], int(sys.argv[2])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory(prefix="gpuward-bench-") as folder, Etcd(MEMBERS) as etcd:
        lock = Field(etcd, Network(), Path(folder), ttl)
        try:
            lock.start()
            node = lock.holder()
            time.sleep(2.0)
            began = time.monotonic()
            FAULTS[fault](lock, node)
            time.sleep(3 * ttl)
            stamps = {number: lock.stamps(number) for number in range(MEMBERS)}
        finally:
            lock.end()
    others = [[at for at in stamps[number] if at > began] for number in range(MEMBERS) if number != node]
    firsts = [min(later) for later in others if later]
    both = overlap(stamps)
    lives = stamps[node][-1] > began + 3 * ttl - 1.0
    took = min(firsts) - began if firsts else None
    print(json.dumps({"took": took, "overlap_s": both, "for_ever": bool(firsts) and lives and both > ttl}))


def measure(fault: str, runs: int, ttl: int) -> dict[str, Any]:
    """Take-overs of all runs, the longest overlap, and whether it went on to the end of one."""
    found = []
    for _ in range(runs):
        program = "from benchmarks.peers_lock import play; play()"
        command = ["unshare", "--net", sys.executable, "-c", program, fault, str(ttl)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return {
        "took": [row["took"] for row in found if row["took"] is not None],
        "overlap_s": max(row["overlap_s"] for row in found),
        "for_ever": any(row["for_ever"] for row in found),
    }
