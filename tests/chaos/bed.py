"""Three nodes whose ways to etcd can be cut one by one, in a network namespace of its own.

Everything is on loopback. Node i reaches member m as 127.0.(i+1).(m+1), and members reach each other as 127.1.(m+1).1:
by that nft can tell who talks to whom. The whole program runs in the namespace: see run.py.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from supervisor.demo.cluster import DemoCluster, DemoNode
from supervisor.demo.etcd_cluster import EtcdCluster

MEMBERS = 3
CACHE = Path(__file__).parents[2] / ".cache/containers"
"""Where tools/install-containers.sh puts nft and iptables."""
FIRST_GID = 64_000
"""Of the members: by it nft knows what one sends to the others on connections that it made."""
QUEUE = 1
"""Number of the queue of netfilter for packets that are held back."""


class Etcd(EtcdCluster):
    """Members that listen on all of loopback, and talk to each other by addresses of their own."""

    def _start(self, member: int, *more: str) -> None:
        client, peer = self._ports[member]
        others = ",".join(f"m{i}=http://{peer_address(i)}:{port}" for i, (_, port) in enumerate(self._ports))
        ours = (
            f"--listen-client-urls=http://0.0.0.0:{client}",
            f"--listen-peer-urls=http://0.0.0.0:{peer}",
            f"--initial-advertise-peer-urls=http://{peer_address(member)}:{peer}",
            f"--initial-cluster={others}",
        )
        super()._start(member, *ours, *more)

    def _gid(self, member: int) -> int:
        return FIRST_GID + member

    def client_port(self, member: int) -> int:
        return self._ports[member][0]


class ChaosCluster(DemoCluster):
    """A demo on etcd whose nodes have endpoints of their own, the member on their own machine first."""

    etcd: Etcd

    def __init__(self, ttl: int) -> None:
        super().__init__("etcd", ttl, small_disks=True, own_clocks=True)
        self.network = Network()

    def number(self, name: str) -> int:
        return list(self.nodes).index(name)

    def _make_etcd(self, data: Path) -> EtcdCluster:
        return Etcd(MEMBERS, folder=data)

    def _endpoints(self, node: DemoNode) -> list[str]:
        own = self.number(node.name)
        order = [(own + step) % MEMBERS for step in range(MEMBERS)]
        return [f"http://{client_address(own, member)}:{self.etcd.client_port(member)}" for member in order]


class Network:
    """What is dropped between nodes and members. Each cut has a name, and is mended by it."""

    def __init__(self) -> None:
        self._nft, self._iptables = tool("nft"), tool("xtables-legacy-multi")
        libraries = [str(path) for path in (CACHE / "usr/lib").glob("*-linux-gnu")]
        ours = (
            {"LD_LIBRARY_PATH": ":".join(libraries), "XTABLES_LIBDIR": f"{libraries[0]}/xtables"} if libraries else {}
        )
        self._environ = os.environ | ours
        self._delay: subprocess.Popen[bytes] | None = None
        self._do("add table inet chaos")

    def drop(self, name: str, *matches: str) -> None:
        """Packets that match any of these do not arrive."""
        self._drop(name, "input", matches)

    def silence(self, name: str, member: int) -> None:
        """What a member sends to the others on connections that it made itself does not leave. For `mend`."""
        self._drop(f"{name}-silent", "output", [f"meta skgid {FIRST_GID + member} ip daddr 127.1.0.0/16"])

    def mend(self, name: str) -> None:
        """Fine to repeat."""
        for chain in (name, f"{name}-silent"):
            self._do(f"add chain inet chaos {chain}\ndelete chain inet chaos {chain}")

    def _drop(self, chain: str, hook: str, matches: Iterable[str]) -> None:
        rules = "".join(f"add rule inet chaos {chain} {match} drop\n" for match in matches)
        self._do(f"add chain inet chaos {chain} {{ type filter hook {hook} priority 0; }}\n{rules}")

    def hold_back(self, seconds: float, node: int) -> None:
        """What this node's supervisor sends to etcd, and what it is sent from there, each arrives so much later."""
        command = [sys.executable, "-m", "tests.chaos.delay", str(QUEUE), str(seconds)]
        self._delay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._delay.stdout is not None
        self._delay.stdout.readline()
        for way in ("-d", "-s"):
            rule = [way, f"127.0.{node + 1}.0/24", "-j", "NFQUEUE", "--queue-num", str(QUEUE)]
            self._run([self._iptables, "iptables", "-w", "-A", "INPUT", *rule])

    def let_go(self) -> None:
        """Fine to repeat."""
        if self._delay is not None:
            self._run([self._iptables, "iptables", "-w", "-F", "INPUT"])
            self._delay.communicate()
            self._delay = None

    def _do(self, commands: str) -> None:
        self._run([self._nft, "-f", "-"], commands)

    def _run(self, command: list[str], text: str = "") -> None:
        done = subprocess.run(command, input=text, env=self._environ, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"{command[0]}: {done.stderr.strip()}")


def tool(name: str) -> str:
    """Its path; raises OSError where there is none."""
    if (unpacked := CACHE / "usr/sbin" / name).exists():
        return str(unpacked)
    if (found := shutil.which(name)) is None:
        raise FileNotFoundError(f"no {name}: tools/install-containers.sh fetches it")
    return found


def client_address(node: int, member: int) -> str:
    return f"127.0.{node + 1}.{member + 1}"


def peer_address(member: int) -> str:
    return f"127.1.{member + 1}.1"


def to_etcd(node: int) -> str:
    """nft: what the supervisor of a node sends to any member."""
    return f"ip daddr 127.0.{node + 1}.0/24"


def from_etcd(node: int) -> str:
    return f"ip saddr 127.0.{node + 1}.0/24"


def to_member(member: int) -> str:
    """nft: what other members send to this one, on connections of theirs."""
    return f"ip daddr {peer_address(member)}"


def from_member(member: int) -> str:
    return f"ip saddr {peer_address(member)}"
