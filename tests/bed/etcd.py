"""Real etcd for tests. See `supervisor.demo.etcd_cluster`, which the demo uses too."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from supervisor.demo.etcd_cluster import EtcdCluster, EtcdClusterError, find_binaries


@contextmanager
def etcd_cluster(members: int = 3, arguments: Sequence[str] = ()) -> Iterator[EtcdCluster]:
    """A healthy cluster. Without etcd on this machine the test fails, and says how to get it."""
    try:
        find_binaries()
    except EtcdClusterError as error:
        pytest.fail(str(error), pytrace=False)
    with EtcdCluster(members, arguments=arguments) as cluster:
        yield cluster
