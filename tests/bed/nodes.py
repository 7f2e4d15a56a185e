"""Real supervisors for tests: `gpuward run` on a configuration of the test's own, in a cgroup of its own."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from election.clock import BootClock
from election.record import Keys, TermRecord
from election.store import Delete, Put, Txn
from election.stores.local import LocalStore
from supervisor import proc
from supervisor.demo import cleanup
from supervisor.demo.etcd_cluster import free_ports
from tests.bed.keeper import PATIENCE, wait_for

TTL = 6
LONG_TTL = 90
"""Where the term is to go on: a machine that stands still for some seconds must not cost it."""
T = TypeVar("T")


class NodeBed:
    """One node. `config` may be changed before `start`; `end` leaves nothing behind."""

    def __init__(self, folder: Path, cgroup: str, name: str = "n1", **election: Any) -> None:
        self.name, self.folder, self.cgroup = name, folder, cgroup
        self.run = folder / "run"
        self.out = folder / "out"
        """What the supervisor prints."""
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(exist_ok=True)
        self.config: dict[str, Any] = {
            "cluster": "test",
            "node": name,
            "election": {"ttl": TTL, "store": "local", "local": {"file": str(folder.parent / "election.db")}}
            | election,
            "paths": {part: str(folder / part) for part in ("run", "state", "log")},
            "cgroup": f"{cgroup.strip('/')}/{name}",
            "gpu": {"driver": "simulated", "simulated": {"folder": str(folder / "gpu")}},
            "api": {"listen": f"127.0.0.1:{free_port()}"},
            "watchdog": {"interval": "1s", "confirm": "200ms"},
            "services": {},
        }

    @property
    def url(self) -> str:
        return f"http://{self.config['api']['listen']}"

    def add_service(self, name: str, *command: str, **keys: Any) -> None:
        own = {"command": list(command), "user": "root", "ready_after": "200ms", "stop_timeout": "1s"}
        self.config["services"][name] = own | keys

    def after_an_orderly_end(self) -> "NodeBed":
        """The cluster's last term ended in good order: this node may claim at once (rule 8a). Local store only."""
        asyncio.run(_end_a_term(self.folder.parent / "election.db"))
        return self

    def lose_the_lock(self) -> None:
        """Somebody deletes the leader key. Local store only."""
        asyncio.run(_delete_leader_key(self.folder.parent / "election.db"))

    def told_role(self) -> str | None:
        """What its member record says, which others go by. Local store only."""
        return asyncio.run(_role(self.folder.parent / "election.db", self.name))

    def start(self) -> "NodeBed":
        """The supervisor as a child of the test."""
        path = self.folder / "gpuward.yml"
        path.write_text(yaml.safe_dump(self.config))
        command = [sys.executable, "-m", "supervisor.entry", "run", "--config", str(path)]
        with self.out.open("ab") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the supervisor alone."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def exit_code(self, within: float = PATIENCE) -> int:
        assert self.process is not None
        return self.process.wait(within)

    def keeper(self) -> int:
        """Pid of its keeper."""
        return int(self.until(lambda: (self.status() or {}).get("keeper"))["pid"])

    def output(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self.out.read_text()
        return ""

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and body of an HTTP answer; (0, {}) where nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())
        except (urllib.error.URLError, OSError):
            return 0, {}

    def status(self) -> dict[str, Any] | None:
        code, body = self.get("/status")
        return body if code == 200 else None

    def leads(self) -> bool:
        return self.get("/leader")[0] == 200

    def until_leading(self, within: float = 2 * PATIENCE) -> dict[str, Any]:
        """Its status once it leads with every service running."""

        def ready() -> dict[str, Any] | None:
            found = self.status() if self.leads() else None
            return found if found and all(row["state"] == "running" for row in found["services"]) else None

        return self.until(ready, within)

    def until(self, look: Callable[[], T | None], within: float = PATIENCE) -> T:
        """The first truthy answer of `look`; a failure shows what the supervisor said."""
        end = time.monotonic() + within
        while True:
            found = look()
            if found:
                return found
            if time.monotonic() > end:
                raise AssertionError(f"not within {within} s; {self.name} said:\n{self.output()[-6000:]}")
            time.sleep(0.02)

    def service_pids(self) -> list[int]:
        """Processes with this node's name and run folder in their environment, the dead aside."""
        return [
            pid
            for pid, stat in proc.snapshot().items()
            if stat.state not in "ZX" and proc.environ_value(pid, "GPUWARD_RUN_DIR") == str(self.run)
        ]

    def end(self) -> None:
        """SIGKILL to everything of this node."""
        if self.process is not None:
            if self.process.poll() is None:
                self._kill_children(self.process.pid)
                self.process.kill()
            self.process.wait()
        cleanup.kill_all(self.folder)  # a keeper that is just being spawned, too
        with contextlib.suppress(FileNotFoundError):
            cleanup.remove_group(f"{self.cgroup}/{self.name}")

    @staticmethod
    def _kill_children(parent: int) -> None:
        """In the midst of its execve(2) a process has neither arguments nor environment by which it would be found."""
        os.kill(parent, signal.SIGSTOP)
        wait_for(lambda: (found := proc.stat(parent)) is None or found.state in "TZX", "it to stop")
        for pid, found in proc.snapshot().items():
            if found.ppid == parent:
                proc.kill(pid, found.start_ticks)


Make = Callable[..., NodeBed]


@pytest.fixture
def make_node(tmp_path: Path, own_cgroup: str) -> Iterator[Make]:
    """`make_node("n1")`: nodes of one cluster, ended with everything below them."""
    with contextlib.ExitStack() as ends:

        def make(name: str = "n1", folder: str | None = None, **election: Any) -> NodeBed:
            node = NodeBed(tmp_path / (folder or name), own_cgroup, name, **election)
            ends.callback(node.end)
            return node

        yield make


async def _end_a_term(file: Path) -> None:
    clock = BootClock()
    store = LocalStore(file, clock=clock)
    term = TermRecord(instance="before", node="before", ttl_s=TTL, began="then", ended="then", because="a test")
    await store.commit(Txn((), (Put(Keys("test").term, term.to_json()),)), deadline=clock.now() + 5)
    await store.close()


async def _delete_leader_key(file: Path) -> None:
    clock = BootClock()
    store = LocalStore(file, clock=clock)
    await store.commit(Txn((), (Delete(Keys("test").leader),)), deadline=clock.now() + 5)
    await store.close()


async def _role(file: Path, node: str) -> str | None:
    clock = BootClock()
    store, key = LocalStore(file, clock=clock), Keys("test").member(node)
    found = (await store.read([key], deadline=clock.now() + 5)).get(key)
    await store.close()
    return None if found is None else str(json.loads(found.value)["role"])


def free_port() -> int:
    """A TCP port on loopback that nobody has now, and that the kernel gives to nobody who connects to somewhere."""
    return free_ports(1)[0][0]


def gone(pid: int) -> bool:
    """True once the process has ended."""
    found = proc.stat(pid)
    return found is None or found.state in "ZX" or not os.path.exists(f"/proc/{pid}")
