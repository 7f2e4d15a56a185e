"""Three nodes whose ways to etcd can be cut one by one, in a network namespace of its own.

Everything is on loopback. Node i reaches member m as 127.0.(i+1).(m+1), and members reach each other as 127.1.(m+1).1:
by that nft can tell who talks to whom. The whole program runs in the namespace: see run.py.
"""

import os
import subprocess
from pathlib import Path

from supervisor.demo.cluster import DemoCluster, DemoNode
from supervisor.demo.etcd_cluster import EtcdCluster

MEMBERS = 3
CACHE = Path(__file__).parents[2] / ".cache/containers"
"""Where tools/install-containers.sh puts nft."""


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

    def client_port(self, member: int) -> int:
        return self._ports[member][0]


class ChaosCluster(DemoCluster):
    """A demo on etcd whose nodes have endpoints of their own, the member on their own machine first."""

    etcd: Etcd

    def __init__(self, ttl: int) -> None:
        super().__init__("etcd", ttl)
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
        self._nft = str(CACHE / "usr/sbin/nft") if (CACHE / "usr/sbin/nft").exists() else "nft"
        libraries = [str(path) for path in (CACHE / "usr/lib").glob("*-linux-gnu")]
        self._environ = os.environ | ({"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {})
        self._do("add table inet chaos")

    def drop(self, name: str, *matches: str) -> None:
        """Packets that match any of these do not arrive."""
        rules = "".join(f"add rule inet chaos {name} {match} drop\n" for match in matches)
        self._do(f"add chain inet chaos {name} {{ type filter hook input priority 0; }}\n{rules}")

    def mend(self, name: str) -> None:
        """Fine to repeat."""
        self._do(f"add chain inet chaos {name}\ndelete chain inet chaos {name}")

    def _do(self, commands: str) -> None:
        done = subprocess.run(
            [self._nft, "-f", "-"], input=commands, env=self._environ, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise OSError(f"nft: {done.stderr.strip()}")


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
    """nft: what other members send to this one, on connections of theirs. (Its own go the same way back.)"""
    return f"ip daddr {peer_address(member)}"


def from_member(member: int) -> str:
    return f"ip saddr {peer_address(member)}"
