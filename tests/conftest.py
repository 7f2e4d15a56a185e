"""What all tests share: the boot-time loop, virtual time, and one real etcd cluster per process.

Async tests run on a loop whose time is the boot-time clock, as production does, or, marked `virtual_time`, on one
whose time jumps.
"""

import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from election.clock import boot_time_loop, virtual_loop
from supervisor.demo.etcd_cluster import EtcdCluster
from tests.bed.etcd import etcd_cluster

settings.register_profile("gpuward", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gpuward")  # how long an example takes is the machine's business


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's job in the background, and so all its children
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "virtual_time: run the async test in virtual time (no I/O, no threads)")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], Any]]:
    if item.get_closest_marker("virtual_time"):
        return {"virtual": virtual_loop}
    return {"boot": boot_time_loop}


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdCluster]:
    """Three healthy members for all tests of this process: use keys of your own, and leave the members alone."""
    with etcd_cluster() as cluster:
        yield cluster


@pytest.fixture
def own_etcd() -> Iterator[EtcdCluster]:
    """Three members for one test, to be killed and stopped at will."""
    with etcd_cluster() as cluster:
        yield cluster
