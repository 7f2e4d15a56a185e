"""Real etcd for tests. See `supervisor.demo.etcd_cluster`, which the demo uses too."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from supervisor.demo.etcd_cluster import INSTALLER, ClientTls, EtcdCluster, EtcdClusterError, find_binaries
from tests.bed.keeper import PATIENCE

OLDER = INSTALLER.parents[1] / ".cache/etcd/3.4"
"""Where tools/install-etcd.sh puts etcd 3.4, if this machine's apt has it."""


@contextmanager
def etcd_cluster(
    members: int = 3, arguments: Sequence[str] = (), *, tls: ClientTls | None = None, older: bool = False
) -> Iterator[EtcdCluster]:
    """A healthy cluster. Without etcd on this machine the test fails, and says how to get it; without the `older` one,
    etcd 3.4, it is skipped."""
    if older and not (OLDER / "etcd").exists():
        pytest.skip(f"no etcd 3.4 in {OLDER}: tools/install-etcd.sh takes it from apt where that offers it (Debian 12)")
    try:
        find_binaries()
    except EtcdClusterError as error:
        pytest.fail(str(error), pytrace=False)
    with EtcdCluster(members, arguments=arguments, tls=tls, binaries=OLDER if older else None) as cluster:
        yield cluster


def replace_member(cluster: EtcdCluster, member: int) -> None:
    """Removes it from the member list, and adds another one with other ports, which is then the one of this number."""
    (line,) = (line for line in cluster.etcdctl("member", "list").splitlines() if f", m{member}, " in line)
    removed = line.partition(",")[0]
    _insist(cluster, "remove", removed, until=lambda listed: removed not in listed)
    cluster.kill(member)
    address = cluster.move(member)
    _insist(cluster, "add", f"m{member}", f"--peer-urls={address}", until=lambda listed: address in listed)
    cluster.join(member)


def _insist(cluster: EtcdCluster, *change: str, until: Callable[[str], bool]) -> None:
    """etcd refuses until its members have seen each other for 5 s (--strict-reconfig-check); one that is removed may
    go before it has answered."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if until(cluster.etcdctl("member", "list")):
                return
            cluster.etcdctl("member", *change)
        except EtcdClusterError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
